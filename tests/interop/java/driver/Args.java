import java.util.List;
import java.util.Map;

/** Named arguments of one command, with the defaults spelled where they are used. */
final class Args {
    private final Map<String, Object> values;

    Args(Map<String, Object> values) {
        this.values = values;
    }

    boolean has(String name) {
        return values.get(name) != null;
    }

    String text(String name) {
        Object value = values.get(name);
        if (value == null) {
            throw new IllegalArgumentException("argument " + name + " is missing");
        }
        return value.toString();
    }

    String text(String name, String fallback) {
        return has(name) ? text(name) : fallback;
    }

    int number(String name, int fallback) {
        return has(name) ? ((Number) values.get(name)).intValue() : fallback;
    }

    long big(String name, long fallback) {
        return has(name) ? ((Number) values.get(name)).longValue() : fallback;
    }

    boolean flag(String name, boolean fallback) {
        return has(name) ? (Boolean) values.get(name) : fallback;
    }

    @SuppressWarnings("unchecked")
    List<Object> list(String name) {
        return has(name) ? (List<Object>) values.get(name) : List.of();
    }

    @SuppressWarnings("unchecked")
    Map<String, Object> map(String name) {
        return has(name) ? (Map<String, Object>) values.get(name) : Map.of();
    }

    @SuppressWarnings("unchecked")
    static Args of(Object value) {
        return new Args((Map<String, Object>) value);
    }
}
