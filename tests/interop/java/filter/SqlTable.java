import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.filter.SqlFilter;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * What RocketMQ's own filter library makes of expressions. A line on standard input is a word and texts in base64,
 * divided by tabs: {@code P} with names and values in turn adds a set of properties, {@code E} with an expression is
 * answered by a line: {@code E} if it does not compile, else a letter for each set, {@code T}rue, {@code F}alse,
 * {@code N}ull or an e{@code X}ception.
 */
public final class SqlTable {
    private SqlTable() {
    }

    public static void main(String[] args) throws Exception {
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        List<Map<String, String>> sets = new ArrayList<>();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split("\t", -1);
            for (int i = 1; i < words.length; i++) {
                words[i] = new String(Base64.getDecoder().decode(words[i]), StandardCharsets.UTF_8);
            }
            if (words[0].equals("P")) {
                Map<String, String> properties = new HashMap<>();
                for (int i = 1; i + 1 < words.length; i += 2) {
                    properties.put(words[i], words[i + 1]);
                }
                sets.add(properties);
            } else {
                out.println(outcomes(words[1], sets));
            }
        }
        out.flush();
    }

    private static String outcomes(String text, List<Map<String, String>> sets) {
        Expression expression;
        try {
            expression = new SqlFilter().compile(text);
        } catch (Throwable refused) {
            return "E";
        }
        StringBuilder found = new StringBuilder();
        for (Map<String, String> properties : sets) {
            found.append(outcome(expression, properties));
        }
        return found.toString();
    }

    private static char outcome(Expression expression, Map<String, String> properties) {
        try {
            Object value = expression.evaluate(new EvaluationContext() {
                @Override
                public Object get(String name) {
                    return properties.get(name);
                }

                @Override
                public Map<String, Object> keyValues() {
                    return new HashMap<>(properties);
                }
            });
            return value == null ? 'N' : Boolean.TRUE.equals(value) ? 'T' : 'F';
        } catch (Throwable thrown) {
            return 'X';
        }
    }
}
