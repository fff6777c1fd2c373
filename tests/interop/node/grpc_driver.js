// A process with Apache's Node client of 5.x, which takes commands like grpc_driver.py. It ends with its standard input.
'use strict';

const readline = require('node:readline');
const { createRequire } = require('node:module');

const load = createRequire(`${process.argv[2]}/`); // the directory into which npm has installed the client
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = load('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = load(
  'rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const quiet = { debug() {}, info() {}, warn: console.error, error: console.error };
const clients = new Map();
const received = [];

function emit(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

function written(view) {
  return {
    topic: view.topic,
    body: view.body.toString('base64'),
    id: view.messageId,
    tag: view.tag,
    keys: view.keys,
    properties: Object.fromEntries(view.properties),
    group: view.messageGroup,
    attempt: view.deliveryAttempt,
  };
}

function read(given) {
  return {
    topic: given.topic,
    body: Buffer.from(given.body, 'base64'),
    tag: given.tag,
    keys: given.key === undefined ? [] : [given.key],
    properties: new Map(Object.entries(given.properties ?? {})),
    messageGroup: given.group,
    deliveryTimestamp: given.deliver_at_ms === undefined ? undefined : new Date(given.deliver_at_ms),
    priority: given.priority,
  };
}

function options(args) {
  const account = args.key === undefined ? undefined : { accessKey: args.key, accessSecret: args.secret };
  return {
    endpoints: args.endpoint,
    namespace: '',
    sslEnabled: args.tls === true,
    sessionCredentials: account,
    logger: quiet,
    requestTimeout: 30000,
    consumerGroup: args.group,
  };
}

function subscriptions(args) {
  const filter = new FilterExpression(args.expression ?? '*', args.sql ? FilterType.SQL : FilterType.TAG);
  return new Map([[args.topic, filter]]);
}

async function start(args, client) {
  await client.startup();
  clients.set(args.name, client);
}

const commands = {
  ping: async () => 'pong',

  producer_start(args) {
    const resolution = TransactionResolution[args.checked];
    return start(args, new Producer({
      ...options(args),
      topics: args.topics,
      checker: { check: async () => resolution },
    }));
  },

  simple_start(args) {
    return start(args, new SimpleConsumer({
      ...options(args), subscriptions: subscriptions(args), awaitDuration: args.await_s * 1000,
    }));
  },

  push_start(args) {
    const left = new Set(args.failing ?? []);
    const consume = async view => {
      const message = written(view);
      const failed = left.delete(message.body);
      emit({ event: 'push', consumer: args.name, messages: [message], failed });
      return failed ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
    };
    return start(args, new PushConsumer({
      ...options(args), subscriptions: subscriptions(args), messageListener: { consume },
    }));
  },

  async stop(args) {
    const client = clients.get(args.name);
    clients.delete(args.name);
    await client.shutdown();
  },

  async send(args) {
    const receipt = await clients.get(args.name).send(read(args.message));
    return { id: receipt.messageId, recall: receipt.recallHandle };
  },

  async transaction(args) {
    const producer = clients.get(args.name);
    const transaction = producer.beginTransaction();
    await producer.send(read(args.message), transaction);
    if (args.end === 'COMMIT') await transaction.commit();
    else if (args.end === 'ROLLBACK') await transaction.rollback();
  },

  async recall(args) {
    return String(await clients.get(args.name).recallMessage(args.topic, args.handle));
  },

  async receive(args) {
    const found = await clients.get(args.name).receive(args.count, args.invisible_s * 1000);
    return found.map(view => ({ ...written(view), number: received.push(view) - 1 }));
  },

  async ack(args) {
    await clients.get(args.name).ack(received[args.number]);
  },

  async change(args) {
    await clients.get(args.name).changeInvisibleDuration(received[args.number], args.invisible_s * 1000);
  },
};

readline.createInterface({ input: process.stdin }).on('line', async line => {
  const args = JSON.parse(line);
  try {
    emit({ id: args.id, ok: true, result: (await commands[args.op](args)) ?? null });
  } catch (error) {
    console.error(error);
    emit({ id: args.id, ok: false, error: error.constructor.name, message: String(error), code: -1 });
  }
}).on('close', () => process.exit(0));
