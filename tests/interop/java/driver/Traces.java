import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.AccessChannel;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.trace.TraceBean;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;
import org.apache.rocketmq.client.trace.TraceTransferBean;
import org.apache.rocketmq.client.trace.TraceType;
import org.apache.rocketmq.common.message.MessageType;

/** Apache's text of traces, written by Apache's own code. */
final class Traces {
    private Traces() {
    }

    /** The text of each of {@code traces}, and the keys it is found by. A trace has one message. */
    static Object encode(Args args) {
        List<Object> out = new ArrayList<>();
        for (Object each : args.list("traces")) {
            TraceTransferBean made = TraceDataEncoder.encoderFromContextBean(context(Args.of(each)));
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("text", made.getTransData());
            line.put("keys", new ArrayList<Object>(new TreeSet<>(made.getTransKey())));
            out.add(line);
        }
        return out;
    }

    private static TraceContext context(Args from) {
        TraceContext context = new TraceContext();
        context.setTraceType(TraceType.valueOf(from.text("type")));
        context.setTimeStamp(from.big("timestampMs", 0));
        context.setRegionId(from.text("region", null));
        context.setGroupName(from.text("group", null));
        context.setRequestId(from.text("requestId", null));
        context.setCostTime(from.number("costMs", 0));
        context.setSuccess(from.flag("success", true));
        context.setContextCode(from.number("contextCode", 0));
        context.setAccessChannel(AccessChannel.valueOf(from.text("channel", "LOCAL")));
        TraceBean bean = new TraceBean();
        bean.setTopic(from.text("topic", null));
        bean.setMsgId(from.text("msgId"));
        bean.setTags(from.text("tags", null));
        bean.setKeys(from.text("keys", null));
        bean.setStoreHost(from.text("storeHost", null));
        bean.setBodyLength(from.number("bodyLength", 0));
        bean.setMsgType(MessageType.values()[from.number("messageType", 0)]);
        bean.setOffsetMsgId(from.text("offsetMsgId", null));
        bean.setRetryTimes(from.number("retryTimes", 0));
        bean.setTransactionId(from.text("transactionId", null));
        bean.setTransactionState(LocalTransactionState.valueOf(from.text("state", "UNKNOW")));
        bean.setFromTransactionCheck(from.flag("fromCheck", false));
        context.setTraceBeans(new ArrayList<>(List.of(bean)));
        return context;
    }
}
