import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;

/** Reads a backlog of {@code count} messages with one push consumer; the clock runs from the first to the last one. */
final class Drain {
    private Drain() {
    }

    static Object run(Args args) throws Exception {
        long count = args.big("count", 1);
        AtomicLong seen = new AtomicLong();
        AtomicLong first = new AtomicLong();
        AtomicLong last = new AtomicLong();
        CountDownLatch done = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args.text("group"));
        Access.reach(consumer, args);
        consumer.setInstanceName("drain-" + System.nanoTime());
        consumer.setVipChannelEnabled(args.flag("vip", false));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeMessageBatchMaxSize(args.number("consumeBatch", 32));
        consumer.setPullBatchSize(args.number("pullBatch", 32));
        consumer.subscribe(args.text("topic"), Consumers.selector(args, args.text("expression", "*")));
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            first.compareAndSet(0, now);
            if (seen.addAndGet(messages.size()) >= count) {
                last.compareAndSet(0, now);
                done.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean complete = done.await(args.big("seconds", 120), TimeUnit.SECONDS);
        consumer.shutdown();
        long nanos = (complete ? last.get() : System.nanoTime()) - first.get();
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("complete", complete);
        out.put("messages", seen.get());
        out.put("seconds", nanos / 1e9);
        out.put("rate", seen.get() * 1e9 / Math.max(1, nanos));
        return out;
    }
}
