import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Apache's mqadmin for many commands in one JVM: a line of tab-separated words in, a line with all that the command
 * printed (base64) out. Ends with standard input.
 */
public final class AdminShell {
    private AdminShell() {
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers = new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            ByteArrayOutputStream printed = new ByteArrayOutputStream();
            PrintStream into = new PrintStream(printed, true, StandardCharsets.UTF_8);
            System.setOut(into);
            System.setErr(into);
            try {
                MQAdminStartup.main(line.split("\t"));
            } catch (Throwable problem) {
                problem.printStackTrace(into);
            }
            answers.println(Base64.getEncoder().encodeToString(printed.toByteArray()));
        }
        Runtime.getRuntime().halt(0);
    }
}
