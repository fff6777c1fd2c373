import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientConfigurationBuilder;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.StaticSessionCredentialsProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.FilterExpressionType;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.ProducerBuilder;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Apache's Java client of 5.x, which speaks gRPC, under the commands of grpc_driver.py. The process ends with its
 * standard input.
 */
public final class GrpcDriver {
    private static final PrintStream OUT =
        new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);

    private final ClientServiceProvider provider = ClientServiceProvider.loadService();
    private final Map<String, AutoCloseable> clients = new ConcurrentHashMap<>();
    private final Map<Long, MessageView> received = new ConcurrentHashMap<>();
    private final AtomicLong numbers = new AtomicLong();

    private GrpcDriver() {
    }

    public static void main(String[] args) throws Exception {
        System.setOut(System.err);
        new GrpcDriver().serve();
        Runtime.getRuntime().halt(0);
    }

    private void serve() throws Exception {
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Args command = Args.of(Json.parse(line));
            workers.execute(() -> answer(command));
        }
    }

    private void answer(Args args) {
        Map<String, Object> reply = new LinkedHashMap<>();
        reply.put("id", args.big("id", -1));
        try {
            reply.put("result", run(args.text("op"), args));
            reply.put("ok", true);
        } catch (Throwable problem) {
            reply.put("ok", false);
            reply.put("error", problem.getClass().getSimpleName());
            reply.put("message", String.valueOf(problem.getMessage()));
            reply.put("code", -1);
            problem.printStackTrace();
        }
        emit(reply);
    }

    private static void emit(Map<String, Object> line) {
        String text = Json.write(line);
        synchronized (OUT) {
            OUT.println(text);
            OUT.flush();
        }
    }

    private Object run(String op, Args args) throws Exception {
        String name = args.text("name", "");
        switch (op) {
            case "ping":
                return "pong";
            case "producer_start":
                return keep(name, producer(args));
            case "simple_start":
                return keep(name, provider.newSimpleConsumerBuilder()
                    .setClientConfiguration(configuration(args))
                    .setConsumerGroup(args.text("group"))
                    .setSubscriptionExpressions(Map.of(args.text("topic"), subscription(args)))
                    .setAwaitDuration(Duration.ofSeconds(args.number("await_s", 5)))
                    .build());
            case "push_start":
                return keep(name, pushConsumer(name, args));
            case "stop":
                clients.remove(name).close();
                return null;
            case "send":
                return send((Producer) clients.get(name), args);
            case "send_load":
                return GrpcLoad.send(provider, (Producer) clients.get(name), args);
            case "receive_load":
                return GrpcLoad.receive((SimpleConsumer) clients.get(name), args);
            case "transaction":
                return transaction((Producer) clients.get(name), args);
            case "recall":
                return recall((Producer) clients.get(name), args);
            case "receive":
                return receive((SimpleConsumer) clients.get(name), args);
            case "ack":
                ((SimpleConsumer) clients.get(name)).ack(received.get(args.big("number", -1)));
                return null;
            case "change":
                ((SimpleConsumer) clients.get(name)).changeInvisibleDuration(
                    received.get(args.big("number", -1)), Duration.ofSeconds(args.number("invisible_s", 0)));
                return null;
            default:
                throw new IllegalArgumentException("no such op: " + op);
        }
    }

    private Object keep(String name, AutoCloseable client) {
        clients.put(name, client);
        return null;
    }

    private static ClientConfiguration configuration(Args args) {
        ClientConfigurationBuilder builder = ClientConfiguration.newBuilder()
            .setEndpoints(args.text("endpoint"))
            .setRequestTimeout(Duration.ofSeconds(30));
        if (!args.flag("tls", false)) {
            builder.enableSsl(false);
        }
        if (args.has("key")) {
            builder.setCredentialProvider(
                new StaticSessionCredentialsProvider(args.text("key"), args.text("secret")));
        }
        return builder.build();
    }

    private static FilterExpression subscription(Args args) {
        return new FilterExpression(args.text("expression", "*"),
            args.flag("sql", false) ? FilterExpressionType.SQL92 : FilterExpressionType.TAG);
    }

    private Producer producer(Args args) throws Exception {
        ProducerBuilder builder = provider.newProducerBuilder()
            .setClientConfiguration(configuration(args))
            .setTopics(args.list("topics").toArray(new String[0]));
        if (args.has("checked")) {
            TransactionResolution resolution = TransactionResolution.valueOf(args.text("checked"));
            builder.setTransactionChecker(view -> resolution);
        }
        return builder.build();
    }

    /** A consumer that reports each message and fails the first delivery of those with a body of "failing". */
    private AutoCloseable pushConsumer(String name, Args args) throws Exception {
        Set<Object> left = ConcurrentHashMap.newKeySet();
        left.addAll(args.list("failing"));
        return provider.newPushConsumerBuilder()
            .setClientConfiguration(configuration(args))
            .setConsumerGroup(args.text("group"))
            .setSubscriptionExpressions(Map.of(args.text("topic"), subscription(args)))
            .setMessageListener(view -> {
                Map<String, Object> message = written(view);
                boolean fails = left.remove(message.get("body"));
                Map<String, Object> event = new LinkedHashMap<>();
                event.put("event", "push");
                event.put("consumer", name);
                event.put("messages", List.of(message));
                event.put("failed", fails);
                emit(event);
                return fails ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            })
            .build();
    }

    private Message message(Args args) throws Exception {
        MessageBuilder builder = provider.newMessageBuilder()
            .setTopic(args.text("topic"))
            .setBody(Base64.getDecoder().decode(args.text("body")));
        if (args.has("tag")) {
            builder.setTag(args.text("tag"));
        }
        if (args.has("key")) {
            builder.setKeys(args.text("key"));
        }
        args.map("properties").forEach((key, value) -> builder.addProperty(key, value.toString()));
        if (args.has("group")) {
            builder.setMessageGroup(args.text("group"));
        }
        if (args.has("deliver_at_ms")) {
            builder.setDeliveryTimestamp(args.big("deliver_at_ms", 0));
        }
        if (args.has("priority")) {
            // By reflection, as 5.0.8 has no such method.
            MessageBuilder.class.getMethod("setPriority", int.class).invoke(builder, args.number("priority", 0));
        }
        return builder.build();
    }

    private Object send(Producer producer, Args args) throws Exception {
        SendReceipt receipt = producer.send(message(Args.of(args.map("message"))));
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("id", receipt.getMessageId().toString());
        if (args.flag("recallable", false)) {
            out.put("recall", SendReceipt.class.getMethod("getRecallHandle").invoke(receipt));
        }
        return out;
    }

    private Object transaction(Producer producer, Args args) throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message(Args.of(args.map("message"))), transaction);
        if (args.text("end", "").equals("COMMIT")) {
            transaction.commit();
        } else if (args.text("end", "").equals("ROLLBACK")) {
            transaction.rollback();
        }
        return null;
    }

    private static Object recall(Producer producer, Args args) throws Exception {
        Object receipt = Producer.class.getMethod("recallMessage", String.class, String.class)
            .invoke(producer, args.text("topic"), args.text("handle"));
        return receipt.toString();
    }

    private Object receive(SimpleConsumer consumer, Args args) throws Exception {
        List<Object> out = new ArrayList<>();
        Duration invisible = Duration.ofSeconds(args.number("invisible_s", 10));
        for (MessageView view : consumer.receive(args.number("count", 16), invisible)) {
            long number = numbers.incrementAndGet();
            received.put(number, view);
            Map<String, Object> message = written(view);
            message.put("number", number);
            out.add(message);
        }
        return out;
    }

    private static Map<String, Object> written(MessageView view) {
        byte[] body = new byte[view.getBody().remaining()];
        view.getBody().duplicate().get(body);
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("topic", view.getTopic());
        out.put("body", Base64.getEncoder().encodeToString(body));
        out.put("id", view.getMessageId().toString());
        out.put("tag", view.getTag().orElse(null));
        out.put("keys", view.getKeys());
        out.put("properties", view.getProperties());
        out.put("group", view.getMessageGroup().orElse(null));
        out.put("attempt", view.getDeliveryAttempt());
        return out;
    }
}
