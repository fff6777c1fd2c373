import org.apache.rocketmq.remoting.RPCHook;

/** What signs the requests of this process: the account of the system properties driver.accessKey and driver.secretKey. */
final class Access {
    private Access() {
    }

    /** Null without an account. The class is looked up by name: of 4.9 it is in a jar of its own. */
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
