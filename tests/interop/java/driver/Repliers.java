import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Consumers that reply to each request: {@code re: } and the body of the request, as often as {@code times} says. */
final class Repliers {
    private record Replier(DefaultMQPushConsumer consumer, DefaultMQProducer producer) {
    }

    private final Map<String, Replier> running = new ConcurrentHashMap<>();

    Object start(Args args) throws Exception {
        String name = args.text("name");
        DefaultMQProducer producer = Producers.open(args, name);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            args.text("consumerGroup"), Access.hook(), new AllocateMessageQueueAveragely());
        Access.reach(consumer, args);
        consumer.setInstanceName(name + "-" + System.nanoTime());
        consumer.setVipChannelEnabled(false);
        consumer.setPollNameServerInterval(1000);
        consumer.setHeartbeatBrokerInterval(1000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(args.text("topic"), "*");
        int times = args.number("times", 1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            try {
                for (MessageExt request : messages) {
                    for (int time = 0; time < times; time++) {
                        producer.send(reply(request));
                    }
                }
            } catch (Exception problem) {
                problem.printStackTrace();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        running.put(name, new Replier(consumer, producer));
        consumer.start();
        return "started";
    }

    private static Message reply(MessageExt request) throws Exception {
        byte[] body = request.getBody();
        byte[] answer = new byte[4 + body.length];
        System.arraycopy("re: ".getBytes(StandardCharsets.US_ASCII), 0, answer, 0, 4);
        System.arraycopy(body, 0, answer, 4, body.length);
        return MessageUtil.createReplyMessage(request, answer);
    }

    Object stop(Args args) {
        Replier replier = running.remove(args.text("name"));
        replier.consumer().shutdown();
        replier.producer().shutdown();
        return "stopped";
    }
}
