import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;

/**
 * A closed-loop sender: {@code threads} threads, each sending until {@code count} messages in all are sent or
 * {@code seconds} are over. Reports the rate of messages and the latency of requests (nanoseconds, every request kept).
 *
 * <p>Modes: {@code sync}; {@code batch} ({@code batch} messages a request); {@code async} ({@code inflight} requests
 * under way per thread); {@code oneway}; {@code transaction} (a half message, and its commit, which has no answer). All
 * threads share one client, and with it one connection to the broker, unless
 * {@code clients} says how many there are. With {@code topics} messages go to so many topics in turn, in an order that
 * is always the same: {@code topic}-0000 and so on. With {@code numbered} the property n of messages goes from 0 up to
 * that number, over and over.
 */
final class Load {
    private final Args args;
    private final List<String> topics = new ArrayList<>();
    private final AtomicInteger turn = new AtomicInteger();
    private final AtomicInteger number = new AtomicInteger();
    private final String mode;
    private final int size;
    private final int batch;
    private final AtomicLong left;
    private final AtomicLong errors = new AtomicLong();
    private volatile String firstError;
    private volatile long deadline = Long.MAX_VALUE;

    private Load(Args args) {
        this.args = args;
        if (args.has("topics")) {
            for (int i = 0; i < args.number("topics", 1); i++) {
                topics.add(String.format("%s-%04d", args.text("topic"), i));
            }
            Collections.shuffle(topics, new Random(7));
        } else {
            topics.add(args.text("topic"));
        }
        mode = args.text("mode", "sync");
        size = args.number("size", 1024);
        batch = mode.equals("batch") ? args.number("batch", 32) : 1;
        left = new AtomicLong(args.big("count", Long.MAX_VALUE));
    }

    static Object run(Args args) throws Exception {
        return new Load(args).run();
    }

    private Map<String, Object> run() throws Exception {
        int threads = args.number("threads", 1);
        List<DefaultMQProducer> clients = new ArrayList<>();
        for (int i = 0; i < args.number("clients", 1); i++) {
            boolean plain = !mode.equals("transaction");
            clients.add(plain ? Producers.open(args, "load-" + i) : Transactions.committing(args, "load-" + i));
        }
        for (String ignored : topics) {
            clients.get(0).send(message());  // the route is known and the topic exists before the clock starts
        }
        if (args.has("seconds")) {
            deadline = System.nanoTime() + args.big("seconds", 1) * 1_000_000_000L;
        }
        List<Worker> workers = new ArrayList<>();
        long begin = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            Worker worker = new Worker(clients.get(i % clients.size()));
            workers.add(worker);
            worker.start();
        }
        for (Worker worker : workers) {
            worker.join();
        }
        long nanos = System.nanoTime() - begin;
        clients.forEach(DefaultMQProducer::shutdown);
        return report(workers, nanos);
    }

    private Map<String, Object> report(List<Worker> workers, long nanos) {
        long[] all = workers.stream().flatMapToLong(each -> Arrays.stream(each.latencies())).sorted().toArray();
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("messages", all.length * (long) batch);
        out.put("seconds", nanos / 1e9);
        out.put("rate", all.length * (double) batch * 1e9 / nanos);
        out.put("errors", errors.get());
        out.put("firstError", firstError);
        out.put("p50", at(all, 0.50));
        out.put("p90", at(all, 0.90));
        out.put("p99", at(all, 0.99));
        out.put("p999", at(all, 0.999));
        out.put("max", at(all, 1.0));
        return out;
    }

    /** Latency in milliseconds below which the given share of requests stayed. */
    private static double at(long[] sorted, double share) {
        if (sorted.length == 0) {
            return -1;
        }
        return sorted[(int) Math.min(sorted.length - 1, (long) (sorted.length * share))] / 1e6;
    }

    private Message message() {
        byte[] body = new byte[size];
        Arrays.fill(body, (byte) 'x');
        String topic = topics.get(Math.floorMod(turn.getAndIncrement(), topics.size()));
        Message message = new Message(topic, body);
        if (args.has("tags")) {
            message.setTags(args.text("tags"));
        }
        if (args.has("numbered")) {
            message.putUserProperty("n", String.valueOf(number.getAndIncrement() % args.number("numbered", 1)));
        }
        return message;
    }

    private boolean next() {
        return left.getAndAdd(-batch) > 0 && System.nanoTime() < deadline;
    }

    private void failed(Throwable problem) {
        errors.incrementAndGet();
        if (firstError == null) {
            firstError = problem.toString();
        }
    }

    private final class Worker extends Thread {
        private final DefaultMQProducer client;
        private long[] nanos = new long[1 << 14];
        private int used;

        Worker(DefaultMQProducer client) {
            this.client = client;
        }

        @Override
        public void run() {
            try {
                if (mode.equals("async")) {
                    async();
                    return;
                }
                while (next()) {
                    request();
                }
            } catch (Exception problem) {
                failed(problem);
            }
        }

        private void request() throws Exception {
            long begin = System.nanoTime();
            try {
                SendResult sent = null;
                if (mode.equals("sync")) {
                    sent = client.send(message());
                } else if (mode.equals("transaction")) {
                    sent = client.sendMessageInTransaction(message(), null);
                } else if (mode.equals("oneway")) {
                    client.sendOneway(message());
                } else {
                    List<Message> messages = new ArrayList<>(batch);
                    for (int i = 0; i < batch; i++) {
                        messages.add(message());
                    }
                    sent = client.send(messages);
                }
                if (sent != null && sent.getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException("status " + sent.getSendStatus());
                }
            } catch (InterruptedException stop) {
                throw stop;
            } catch (Exception problem) {
                failed(problem);
                return;
            }
            keep(System.nanoTime() - begin);
        }

        private void async() throws Exception {
            int inflight = args.number("inflight", 256);
            Semaphore places = new Semaphore(inflight);
            while (next()) {
                places.acquire();
                long begin = System.nanoTime();
                client.send(message(), new SendCallback() {
                    @Override
                    public void onSuccess(SendResult result) {
                        keep(System.nanoTime() - begin);
                        places.release();
                    }

                    @Override
                    public void onException(Throwable problem) {
                        failed(problem);
                        places.release();
                    }
                });
            }
            places.acquire(inflight);
        }

        private synchronized void keep(long latency) {
            if (used == nanos.length) {
                nanos = Arrays.copyOf(nanos, used * 2);
            }
            nanos[used++] = latency;
        }

        private synchronized long[] latencies() {
            return Arrays.copyOf(nanos, used);
        }
    }
}
