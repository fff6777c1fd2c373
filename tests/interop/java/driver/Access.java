import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.remoting.RPCHook;

/** How the clients of this process reach a cluster, and the account that signs their requests. */
final class Access {
    private Access() {
    }

    /** Sets the name server, and a timeout of requests that a busy machine keeps. Apache's own is 3 s. */
    static void reach(ClientConfig client, Args args) {
        client.setNamesrvAddr(args.text("namesrv"));
        client.setMqClientApiTimeout(args.number("apiMillis", 60_000));
    }

    /** The account of driver.accessKey and driver.secretKey (system properties). Null without an account. The class is looked up by name: of 4.9 it is in a jar of its own. */
    static RPCHook hook() throws Exception {
        String key = System.getProperty("driver.accessKey");
        if (key == null) {
            return null;
        }
        Class<?> account = Class.forName("org.apache.rocketmq.acl.common.SessionCredentials");
        Object mine = account.getConstructor(String.class, String.class)
            .newInstance(key, System.getProperty("driver.secretKey"));
        return (RPCHook) Class.forName("org.apache.rocketmq.acl.common.AclClientRPCHook")
            .getConstructor(account).newInstance(mine);
    }
}
