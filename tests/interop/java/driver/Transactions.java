import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Transaction producers. What a listener says stands in the message: user properties {@code local} and {@code check}
 * name a LocalTransactionState; anything else is thrown.
 */
final class Transactions {
    private final Map<String, TransactionMQProducer> running = new ConcurrentHashMap<>();
    private final Map<String, List<Object>> asked = new ConcurrentHashMap<>();

    Object start(Args args) throws Exception {
        String name = args.text("name");
        List<Object> questions = new ArrayList<>();
        asked.put(name, questions);
        running.put(name, open(args, name, new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.valueOf(message.getUserProperty("local"));
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                synchronized (questions) {
                    questions.add(Messages.write(message));
                }
                return LocalTransactionState.valueOf(message.getUserProperty("check"));
            }
        }));
        return "started";
    }

    /** A producer all of whose transactions are committed at once. */
    static TransactionMQProducer committing(Args args, String name) throws Exception {
        return open(args, name, new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
    }

    private static TransactionMQProducer open(Args args, String name, TransactionListener listener) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(
            null, args.text("group", "driver-transactions"), Access.hook(), args.flag("trace", false), null);
        Access.reach(producer, args);
        producer.setInstanceName(name + "-" + System.nanoTime());
        producer.setSendMsgTimeout(60_000);
        producer.setVipChannelEnabled(false);
        producer.setHeartbeatBrokerInterval(1000);
        producer.setTransactionListener(listener);
        producer.start();
        return producer;
    }

    Object stop(Args args) {
        running.remove(args.text("name")).shutdown();
        return "stopped";
    }

    Object send(Args args) throws Exception {
        List<Object> results = new ArrayList<>();
        for (Message message : Messages.readAll(args)) {
            TransactionSendResult sent = running.get(args.text("name")).sendMessageInTransaction(message, null);
            Map<String, Object> out = new LinkedHashMap<>(Messages.write(sent));
            out.put("state", sent.getLocalTransactionState().name());
            results.add(out);
        }
        return results;
    }

    /** The messages that this producer was asked about so far. */
    Object asked(Args args) {
        List<Object> questions = asked.get(args.text("name"));
        synchronized (questions) {
            return new ArrayList<>(questions);
        }
    }
}
