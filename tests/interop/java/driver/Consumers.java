import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueConsistentHash;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Commands on push, pull and lite pull consumers. Push consumers report each message as an event. */
@SuppressWarnings("deprecation")
final class Consumers {
    private final Map<String, DefaultMQPushConsumer> push = new ConcurrentHashMap<>();
    private final Map<String, DefaultMQPullConsumer> pull = new ConcurrentHashMap<>();
    private final Map<String, DefaultLitePullConsumer> lite = new ConcurrentHashMap<>();

    Object pushStart(Args args) throws Exception {
        String name = args.text("name");
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            args.text("group"), Access.hook(), new AllocateMessageQueueAveragely(), args.flag("trace", false), null);
        Access.reach(consumer, args);
        consumer.setInstanceName(name + "-" + System.nanoTime());
        consumer.setVipChannelEnabled(args.flag("vip", false));
        consumer.setPollNameServerInterval(args.number("routeMillis", 1000));
        // 5.x raises the version of its subscription with each rebalance and tells the broker by a heartbeat, which
        // it leaves out when another one is under way: its pulls are then refused as not the latest until the next.
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.valueOf(args.text("from", "CONSUME_FROM_FIRST_OFFSET")));
        consumer.setConsumeThreadMin(args.number("threads", 4));
        consumer.setConsumeThreadMax(args.number("threads", 4));
        consumer.setConsumeMessageBatchMaxSize(args.number("consumeBatch", 1));
        consumer.setPullBatchSize(args.number("pullBatch", 32));
        consumer.setAwaitTerminationMillisWhenShutdown(5000);  // what has been reported is committed too
        consumer.setMaxReconsumeTimes(args.number("maxReconsumeTimes", -1));
        consumer.setSuspendCurrentQueueTimeMillis(args.big("suspendMillis", 200));
        if (args.flag("broadcasting", false)) {
            broadcast(consumer);
        }
        if (args.flag("consistentHash", false)) {
            consumer.setAllocateMessageQueueStrategy(new AllocateMessageQueueConsistentHash());
        }
        if (args.has("namespace")) {
            consumer.setNamespace(args.text("namespace"));
        }
        if (args.flag("brokerRebalance", false)) {  // 5.x only: the broker assigns queues, and may switch to pops
            DefaultMQPushConsumer.class.getMethod("setClientRebalance", boolean.class).invoke(consumer, false);
        }
        for (Map.Entry<String, Object> each : args.map("topics").entrySet()) {
            String source = args.text("filterSource", "");
            if (source.isEmpty()) {
                consumer.subscribe(each.getKey(), selector(args, String.valueOf(each.getValue())));
            } else {
                consumer.subscribe(each.getKey(), String.valueOf(each.getValue()), source);
            }
        }
        if (args.flag("orderly", false)) {
            consumer.registerMessageListener(orderly(name, args));
        } else {
            consumer.registerMessageListener(concurrent(name, args));
        }
        push.put(name, consumer);
        consumer.start();
        return "started";
    }

    static MessageSelector selector(Args args, String expression) {
        return args.flag("sql", false) ? MessageSelector.bySql(expression) : MessageSelector.byTag(expression);
    }

    /** The two client versions keep the enumeration in different packages. */
    private static void broadcast(DefaultMQPushConsumer consumer) throws ReflectiveOperationException {
        for (var method : DefaultMQPushConsumer.class.getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                for (Object model : method.getParameterTypes()[0].getEnumConstants()) {
                    if (model.toString().equals("BROADCASTING")) {
                        method.invoke(consumer, model);
                    }
                }
            }
        }
    }

    /** How often a message fails: its property {@code fails}, else the consumer's {@code failTimes}. */
    private static int failures(MessageExt message, Args args) {
        String own = message.getUserProperty("fails");
        return own == null ? args.number("failTimes", 0) : Integer.parseInt(own);
    }

    private static MessageListenerConcurrently concurrent(String name, Args args) {
        int delayLevel = args.number("failDelayLevel", 0);
        long sleepMillis = args.big("sleepMillis", 0);
        return (List<MessageExt> messages, ConsumeConcurrentlyContext context) -> {
            long began = System.nanoTime();
            boolean fails = messages.stream().anyMatch(each -> each.getReconsumeTimes() < failures(each, args));
            sleep(sleepMillis);
            report(name, messages, fails, began);
            if (fails) {
                context.setDelayLevelWhenNextConsume(delayLevel);
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
    }

    /** Says {@code answers}, if given, one after the other and without automatic commit; SUCCESS after the last. */
    private static MessageListenerOrderly orderly(String name, Args args) {
        long sleepMillis = args.big("sleepMillis", 0);
        Map<String, AtomicInteger> tries = new ConcurrentHashMap<>();
        AtomicInteger calls = new AtomicInteger();
        List<Object> answers = args.list("answers");
        return (messages, context) -> {
            long began = System.nanoTime();
            boolean fails = messages.stream().anyMatch(each -> tries.computeIfAbsent(
                each.getMsgId(), id -> new AtomicInteger()).getAndIncrement() < failures(each, args));
            sleep(sleepMillis);
            report(name, messages, fails, began);
            if (!answers.isEmpty()) {
                context.setAutoCommit(false);
                int call = calls.getAndIncrement();
                return ConsumeOrderlyStatus.valueOf(call < answers.size() ? answers.get(call).toString() : "SUCCESS");
            }
            return fails ? ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT : ConsumeOrderlyStatus.SUCCESS;
        };
    }

    private static void sleep(long millis) {
        if (millis > 0) {
            try {
                Thread.sleep(millis);
            } catch (InterruptedException stop) {
                Thread.currentThread().interrupt();
            }
        }
    }

    /** Begin and end of the call are in nanoseconds of the clock that all processes of the machine share. */
    private static void report(String name, List<MessageExt> messages, boolean failed, long began) {
        Map<String, Object> event = new LinkedHashMap<>();
        event.put("event", "messages");
        event.put("consumer", name);
        event.put("failed", failed);
        event.put("began", began);
        event.put("ended", System.nanoTime());
        event.put("messages", Messages.writeAll(messages));
        Driver.emit(event);
    }

    Object pushStop(Args args) {
        push.remove(args.text("name")).shutdown();
        return "stopped";
    }

    /** Queues that the rebalance has given to this consumer just now. */
    Object pushQueues(Args args) {
        List<Object> out = new ArrayList<>();
        push.get(args.text("name")).getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
            .keySet().forEach(queue -> out.add(Messages.write(queue)));
        return out;
    }

    Object pullStart(Args args) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(args.text("group"), Access.hook());
        Access.reach(consumer, args);
        consumer.setInstanceName(args.text("name") + "-" + System.nanoTime());
        consumer.setVipChannelEnabled(args.flag("vip", false));
        consumer.setPollNameServerInterval(args.number("routeMillis", 1000));
        consumer.setHeartbeatBrokerInterval(1000);
        pull.put(args.text("name"), consumer);
        consumer.start();
        return "started";
    }

    Object pullStop(Args args) {
        pull.remove(args.text("name")).shutdown();
        return "stopped";
    }

    Object pull(Args args) throws Exception {
        DefaultMQPullConsumer consumer = pull.get(args.text("name"));
        MessageQueue queue = Messages.queue(Args.of(args.map("queue")));
        String expression = args.text("expression", "*");
        PullResult found = args.flag("block", false)
            ? consumer.pullBlockIfNotFound(queue, expression, args.big("offset", 0), args.number("max", 32))
            : consumer.pull(queue, selector(args, expression), args.big("offset", 0), args.number("max", 32));
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("status", found.getPullStatus().name());
        out.put("next", found.getNextBeginOffset());
        out.put("min", found.getMinOffset());
        out.put("max", found.getMaxOffset());
        out.put("messages", Messages.writeAll(found.getMsgFoundList()));
        return out;
    }

    Object offsetUpdate(Args args) throws Exception {
        DefaultMQPullConsumer consumer = pull.get(args.text("name"));
        MessageQueue queue = Messages.queue(Args.of(args.map("queue")));
        consumer.getDefaultMQPullConsumerImpl().getOffsetStore()
            .updateConsumeOffsetToBroker(queue, args.big("offset", 0), false);
        return "updated";
    }

    Object offsetFetch(Args args) throws Exception {
        return pull.get(args.text("name")).fetchConsumeOffset(Messages.queue(Args.of(args.map("queue"))), true);
    }

    Object liteStart(Args args) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(args.text("group"), Access.hook());
        Access.reach(consumer, args);
        consumer.setInstanceName(args.text("name") + "-" + System.nanoTime());
        consumer.setVipChannelEnabled(args.flag("vip", false));
        consumer.setPollNameServerInterval(args.number("routeMillis", 1000));
        consumer.setHeartbeatBrokerInterval(1000);  // as in pushStart
        consumer.setConsumeFromWhere(ConsumeFromWhere.valueOf(args.text("from", "CONSUME_FROM_FIRST_OFFSET")));
        consumer.setAutoCommit(args.flag("autoCommit", true));
        consumer.setEnableMsgTrace(args.flag("trace", false));
        consumer.setPullBatchSize(args.number("pullBatch", 10));
        for (Map.Entry<String, Object> each : args.map("topics").entrySet()) {
            consumer.subscribe(each.getKey(), selector(args, String.valueOf(each.getValue())));
        }
        lite.put(args.text("name"), consumer);
        consumer.start();
        return "started";
    }

    Object liteStop(Args args) {
        lite.remove(args.text("name")).shutdown();
        return "stopped";
    }

    Object litePoll(Args args) {
        return Messages.writeAll(lite.get(args.text("name")).poll(args.big("timeout", 3000)));
    }

    Object liteCommit(Args args) {
        lite.get(args.text("name")).commitSync();
        return "committed";
    }
}
