import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.LongStream;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;

/** Loads of a benchmark: threads that share one client, and with it one connection. The first failure ends a load. */
final class GrpcLoad {
    private GrpcLoad() {
    }

    /**
     * Sends synchronously for {@code seconds}, or at most {@code count} messages. With {@code per_second} the sends are
     * due at that rate, and their latency counts from the time when they were due: a stall delays the sends after it.
     */
    static Map<String, Object> send(ClientServiceProvider provider, Producer producer, Args args) throws Exception {
        byte[] body = "x".repeat(args.number("size", 1024)).getBytes(StandardCharsets.UTF_8);
        long count = args.big("count", Long.MAX_VALUE);
        long perSecond = args.big("per_second", 0);
        AtomicLong numbers = new AtomicLong();
        long begin = System.nanoTime();
        long end = begin + args.big("seconds", 1) * 1_000_000_000L;
        List<long[]> found = inThreads(args.number("threads", 1), () -> {
            LongStream.Builder latencies = LongStream.builder();
            while (true) {
                long number = numbers.getAndIncrement();
                long due = perSecond == 0 ? System.nanoTime() : begin + number * 1_000_000_000L / perSecond;
                if (number >= count || due >= end) {
                    return latencies.build().toArray();
                }
                for (long wait = due - System.nanoTime(); wait > 0; wait = due - System.nanoTime()) {
                    LockSupport.parkNanos(wait);
                }
                producer.send(provider.newMessageBuilder().setTopic(args.text("topic")).setBody(body).build());
                latencies.add(System.nanoTime() - due);
            }
        });
        long nanos = System.nanoTime() - begin;
        long[] sorted = found.stream().flatMapToLong(Arrays::stream).sorted().toArray();
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("messages", sorted.length);
        out.put("rate", sorted.length * 1e9 / nanos);
        out.put("p50", sorted[sorted.length / 2] / 1e6);
        out.put("p99", sorted[sorted.length * 99 / 100] / 1e6);
        return out;
    }

    /** Receives up to 32 messages a request, and acknowledges each in a request of its own, all of these at once. */
    static Map<String, Object> receive(SimpleConsumer consumer, Args args) throws Exception {
        long count = args.big("count", 1);
        Duration invisible = Duration.ofSeconds(args.number("invisible_s", 30));
        AtomicLong acked = new AtomicLong();
        AtomicLong finished = new AtomicLong();
        long begin = System.nanoTime();
        long end = begin + args.big("seconds", 1) * 1_000_000_000L;
        inThreads(args.number("threads", 1), () -> {
            while (acked.get() < count && System.nanoTime() < end) {
                List<MessageView> views = consumer.receive(32, invisible);
                CompletableFuture.allOf(
                    views.stream().map(consumer::ackAsync).toArray(CompletableFuture[]::new)).join();
                if (acked.addAndGet(views.size()) >= count) {
                    finished.compareAndSet(0, System.nanoTime());
                }
            }
            return null;
        });
        if (acked.get() < count) {
            throw new IllegalStateException(acked + " of " + count + " messages were acknowledged in time");
        }
        Map<String, Object> out = new LinkedHashMap<>();
        out.put("messages", acked.get());
        out.put("rate", count * 1e9 / (finished.get() - begin));
        return out;
    }

    private static <T> List<T> inThreads(int threads, Callable<T> work) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(threads);
        try {
            List<T> found = new ArrayList<>();
            for (Future<T> each : pool.invokeAll(Collections.nCopies(threads, work))) {
                found.add(each.get());
            }
            return found;
        } finally {
            pool.shutdown();
        }
    }
}
