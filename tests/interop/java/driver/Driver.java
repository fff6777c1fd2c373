import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * Apache's Java client under remote control. Commands come as one JSON object a line on standard input
 * ({@code id}, {@code op}, arguments); answers ({@code id}, {@code ok}, {@code result} or {@code error}) and events
 * ({@code event} …) leave the same way on standard output. Commands run side by side, so a long one holds up none.
 * The process ends with its standard input.
 */
public final class Driver {
    private static final PrintStream OUT =
        new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private final Producers producers = new Producers();
    private final Consumers consumers = new Consumers();
    private final Repliers repliers = new Repliers();
    private final Transactions transactions = new Transactions();

    private Driver() {
    }

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        new Driver().serve();
        Runtime.getRuntime().halt(0);
    }

    static void emit(Map<String, Object> line) {
        String text = Json.write(line);
        synchronized (OUT) {
            OUT.print(text);
            OUT.print('\n');
            OUT.flush();
        }
    }

    private void serve() throws Exception {
        ExecutorService workers = Executors.newCachedThreadPool(task -> {
            Thread thread = new Thread(task, "command");
            thread.setDaemon(true);
            return thread;
        });
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Args command = Args.of(Json.parse(line));
            workers.execute(() -> answer(command));
        }
    }

    private void answer(Args command) {
        Map<String, Object> reply = new LinkedHashMap<>();
        reply.put("id", command.big("id", -1));
        try {
            reply.put("result", run(command.text("op"), command));
            reply.put("ok", true);
        } catch (Throwable problem) {
            reply.put("ok", false);
            reply.put("error", problem.getClass().getSimpleName());
            reply.put("message", String.valueOf(problem.getMessage()));
            reply.put("code", responseCode(problem));
            problem.printStackTrace();
        }
        emit(reply);
    }

    private Object run(String op, Args args) throws Exception {
        return switch (op) {
            case "ping" -> "pong";
            case "producer_start" -> producers.start(args);
            case "producer_stop" -> producers.stop(args);
            case "send" -> producers.send(args);
            case "queues" -> producers.queues(args);
            case "recall" -> producers.recall(args);
            case "view" -> producers.view(args);
            case "query" -> producers.query(args);
            case "bounds" -> producers.bounds(args);
            case "allocate_nearby" -> Allocation.nearby(args);
            case "push_start" -> consumers.pushStart(args);
            case "push_stop" -> consumers.pushStop(args);
            case "push_queues" -> consumers.pushQueues(args);
            case "replier_start" -> repliers.start(args);
            case "replier_stop" -> repliers.stop(args);
            case "pull_start" -> consumers.pullStart(args);
            case "pull_stop" -> consumers.pullStop(args);
            case "pull" -> consumers.pull(args);
            case "offset_update" -> consumers.offsetUpdate(args);
            case "offset_fetch" -> consumers.offsetFetch(args);
            case "lite_start" -> consumers.liteStart(args);
            case "lite_stop" -> consumers.liteStop(args);
            case "lite_poll" -> consumers.litePoll(args);
            case "lite_commit" -> consumers.liteCommit(args);
            case "trace_encode" -> Traces.encode(args);
            case "transaction_start" -> transactions.start(args);
            case "transaction_stop" -> transactions.stop(args);
            case "transaction_send" -> transactions.send(args);
            case "transaction_asked" -> transactions.asked(args);
            case "load" -> Load.run(args);
            case "drain" -> Drain.run(args);
            default -> throw new IllegalArgumentException("no such op: " + op);
        };
    }

    /** The broker's response code where the client's exception carries one, else -1. */
    private static int responseCode(Throwable problem) {
        for (Throwable each = problem; each != null; each = each.getCause()) {
            try {
                return (Integer) each.getClass().getMethod("getResponseCode").invoke(each);
            } catch (ReflectiveOperationException without) {
                // This class has no code: look at its cause.
            }
        }
        return -1;
    }
}
