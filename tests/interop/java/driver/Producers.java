import java.lang.reflect.InvocationTargetException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Commands on producers, and the look-ups that every client has. */
final class Producers {
    private static final long ASYNC_WAIT_SECONDS = 60;
    private static final MessageQueueSelector BY_NUMBER =
        (queues, message, number) -> queues.get((int) (((Number) number).longValue() % queues.size()));

    private final Map<String, DefaultMQProducer> running = new ConcurrentHashMap<>();

    static DefaultMQProducer open(Args args, String name) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(
            args.text("group", "driver-producers"), Access.hook(), args.flag("trace", false), null);
        Access.reach(producer, args);
        producer.setInstanceName(name + "-" + System.nanoTime());
        producer.setSendMsgTimeout(args.number("timeout", 60_000));
        producer.setVipChannelEnabled(args.flag("vip", false));
        producer.setCompressMsgBodyOverHowmuch(args.number("compressOver", 4096));
        producer.setHeartbeatBrokerInterval(args.number("heartbeatMillis", 30_000));
        producer.setPollNameServerInterval(args.number("pollMillis", 30_000));
        producer.setRetryTimesWhenSendFailed(args.number("retries", 2));
        producer.setMaxMessageSize(args.number("maxSize", 4 * 1024 * 1024));
        if (args.has("namespace")) {
            producer.setNamespace(args.text("namespace"));
        }
        producer.start();
        return producer;
    }

    Object start(Args args) throws Exception {
        running.put(args.text("name"), open(args, args.text("name")));
        return "started";
    }

    Object stop(Args args) {
        running.remove(args.text("name")).shutdown();
        return "stopped";
    }

    Object send(Args args) throws Exception {
        DefaultMQProducer producer = producer(args);
        List<Message> messages = Messages.readAll(args);
        List<Object> results = new ArrayList<>();
        String mode = args.text("mode", "sync");
        if (mode.equals("batch")) {
            SendResult sent = args.has("queue")
                ? producer.send(messages, Messages.queue(Args.of(args.map("queue")))) : producer.send(messages);
            results.add(Messages.write(sent));
            return results;
        }
        if (mode.equals("async")) {
            List<CompletableFuture<SendResult>> waiting = new ArrayList<>();
            for (Message message : messages) {
                CompletableFuture<SendResult> future = new CompletableFuture<>();
                waiting.add(future);
                producer.send(message, into(future));
            }
            for (CompletableFuture<SendResult> future : waiting) {
                results.add(Messages.write(future.get(ASYNC_WAIT_SECONDS, TimeUnit.SECONDS)));
            }
            return results;
        }
        for (Message message : messages) {
            switch (mode) {
                case "sync" -> results.add(Messages.write(producer.send(message)));
                case "request" -> results.add(
                    Messages.write((MessageExt) producer.request(message, args.big("within", 10_000))));
                case "oneway" -> producer.sendOneway(message);
                case "queue" -> results.add(
                    Messages.write(producer.send(message, Messages.queue(Args.of(args.map("queue"))))));
                case "selector" -> results.add(
                    Messages.write(producer.send(message, BY_NUMBER, args.big("select", 0))));
                default -> throw new IllegalArgumentException("no such mode: " + mode);
            }
        }
        return results;
    }

    static SendCallback into(CompletableFuture<SendResult> future) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                future.complete(result);
            }

            @Override
            public void onException(Throwable problem) {
                future.completeExceptionally(problem);
            }
        };
    }

    /** Take back a message that waits (5.3 and later). */
    Object recall(Args args) throws Exception {
        DefaultMQProducer producer = producer(args);
        try {
            return producer.getClass().getMethod("recallMessage", String.class, String.class)
                .invoke(producer, args.text("topic"), args.text("handle"));
        } catch (InvocationTargetException thrown) {
            throw (Exception) thrown.getCause();
        }
    }

    Object queues(Args args) throws Exception {
        List<Object> out = new ArrayList<>();
        for (MessageQueue queue : producer(args).fetchPublishMessageQueues(args.text("topic"))) {
            out.add(Messages.write(queue));
        }
        return out;
    }

    Object view(Args args) throws Exception {
        return Messages.write(producer(args).viewMessage(args.text("topic"), args.text("msgId")));
    }

    Object query(Args args) throws Exception {
        QueryResult found = producer(args).queryMessage(
            args.text("topic"), args.text("key"), args.number("max", 32),
            args.big("begin", 0), args.big("end", Long.MAX_VALUE));
        return Messages.writeAll(found.getMessageList());
    }

    /** Offsets of one queue: min, max, the time of its first message and, if a time is given, the offset at it. */
    Object bounds(Args args) throws Exception {
        DefaultMQProducer producer = producer(args);
        MessageQueue queue = Messages.queue(Args.of(args.map("queue")));
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("min", producer.minOffset(queue));
        out.put("max", producer.maxOffset(queue));
        out.put("earliest", producer.earliestMsgStoreTime(queue));
        if (args.has("timestamp")) {
            out.put("at", producer.searchOffset(queue, args.big("timestamp", 0)));
        }
        return out;
    }

    private DefaultMQProducer producer(Args args) {
        DefaultMQProducer producer = running.get(args.text("name"));
        if (producer == null) {
            throw new IllegalArgumentException("no producer " + args.text("name"));
        }
        return producer;
    }
}
