import java.util.ArrayList;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The client's values to and from JSON. */
final class Messages {
    private Messages() {
    }

    static Message read(Args from) {
        byte[] body = Base64.getDecoder().decode(from.text("body", ""));
        Message message = new Message(from.text("topic"), body);
        if (from.has("tags")) {
            message.setTags(from.text("tags"));
        }
        if (from.has("keys")) {
            message.setKeys(from.text("keys"));
        }
        message.setFlag(from.number("flag", 0));
        if (from.number("delay", 0) > 0) {
            message.setDelayTimeLevel(from.number("delay", 0));
        }
        if (from.has("wait")) {
            message.setWaitStoreMsgOK(from.flag("wait", true));
        }
        // 5.x only: 4.9 has no such methods.
        for (String name : List.of("setDelayTimeMs", "setDelayTimeSec", "setDeliverTimeMs")) {
            if (from.has(name)) {
                call(message, name, long.class, from.big(name, 0));
            }
        }
        from.map("properties").forEach((name, value) -> message.putUserProperty(name, value.toString()));
        return message;
    }

    /** A method that only some versions have. */
    static Object call(Object target, String name, Class<?> kind, Object argument) {
        try {
            return target.getClass().getMethod(name, kind).invoke(target, argument);
        } catch (ReflectiveOperationException problem) {
            throw new IllegalStateException(problem);
        }
    }

    static List<Message> readAll(Args from) {
        List<Message> messages = new ArrayList<>();
        for (Object each : from.list("messages")) {
            messages.add(read(Args.of(each)));
        }
        return messages;
    }

    static MessageQueue queue(Args from) {
        return new MessageQueue(from.text("topic"), from.text("brokerName"), from.number("queueId", 0));
    }

    static Map<String, Object> write(MessageQueue queue) {
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("topic", queue.getTopic());
        out.put("brokerName", queue.getBrokerName());
        out.put("queueId", queue.getQueueId());
        return out;
    }

    static Map<String, Object> write(SendResult sent) {
        Map<String, Object> out = write(sent.getMessageQueue());
        out.put("status", sent.getSendStatus().name());
        out.put("msgId", sent.getMsgId());
        out.put("offsetMsgId", sent.getOffsetMsgId());
        out.put("queueOffset", sent.getQueueOffset());
        out.put("transactionId", sent.getTransactionId());
        out.put("regionId", sent.getRegionId());
        out.put("traceOn", sent.isTraceOn());
        try {
            out.put("recallHandle", sent.getClass().getMethod("getRecallHandle").invoke(sent));
        } catch (ReflectiveOperationException before53) {
            out.put("recallHandle", null);
        }
        return out;
    }

    static Map<String, Object> write(MessageExt message) {
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("topic", message.getTopic());
        out.put("brokerName", message.getBrokerName());
        out.put("queueId", message.getQueueId());
        out.put("queueOffset", message.getQueueOffset());
        out.put("msgId", message.getMsgId());
        if (message instanceof MessageClientExt ext) {
            out.put("offsetMsgId", ext.getOffsetMsgId());
        }
        out.put("body", message.getBody() == null ? "" : Base64.getEncoder().encodeToString(message.getBody()));
        out.put("tags", message.getTags());
        out.put("keys", message.getKeys());
        out.put("flag", message.getFlag());
        out.put("sysFlag", message.getSysFlag());
        out.put("bornTimestamp", message.getBornTimestamp());
        out.put("storeTimestamp", message.getStoreTimestamp());
        out.put("bornHost", message.getBornHostString());
        out.put("reconsumeTimes", message.getReconsumeTimes());
        out.put("commitLogOffset", message.getCommitLogOffset());
        out.put("storeSize", message.getStoreSize());
        out.put("bodyCRC", message.getBodyCRC());
        out.put("properties", new LinkedHashMap<>(message.getProperties()));
        return out;
    }

    static List<Object> writeAll(List<MessageExt> messages) {
        List<Object> out = new ArrayList<>();
        if (messages != null) {
            messages.forEach(each -> out.add(write(each)));
        }
        return out;
    }
}
