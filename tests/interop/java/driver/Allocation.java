import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMachineRoomNearby;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.common.message.MessageQueue;

/** Shares of queues by Java's strategies. */
final class Allocation {
    private Allocation() {
    }

    /** Rooms stand before the @ of a broker's name and a client id; the inner strategy is AVG. */
    static Object nearby(Args args) {
        var strategy = new AllocateMachineRoomNearby(
            new AllocateMessageQueueAveragely(),
            new AllocateMachineRoomNearby.MachineRoomResolver() {
                @Override
                public String brokerDeployIn(MessageQueue queue) {
                    return queue.getBrokerName().split("@")[0];
                }

                @Override
                public String consumerDeployIn(String clientId) {
                    return clientId.split("@")[0];
                }
            });
        List<MessageQueue> queues = new ArrayList<>();
        for (Object each : args.list("queues")) {
            String[] parts = each.toString().split("#");
            queues.add(new MessageQueue("TopicTest", parts[0], Integer.parseInt(parts[1])));
        }
        List<String> members = new ArrayList<>();
        args.list("members").forEach(each -> members.add(each.toString()));
        List<String> mine = new ArrayList<>();
        for (MessageQueue queue : strategy.allocate("g", args.text("member"), queues, members)) {
            mine.add(queue.getBrokerName() + "#" + queue.getQueueId());
        }
        return mine;
    }
}
