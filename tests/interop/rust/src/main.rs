//! A process with Apache's Rust client of 5.x, which takes commands like grpc_driver.py. It ends with its standard input.

use std::cell::RefCell;
use std::collections::HashMap;
use std::error::Error;
use std::rc::Rc;
use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD};
use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};
use tokio::task::{LocalSet, spawn_local};

type Outcome = Result<Value, Box<dyn Error>>;

enum Client {
    Producer(Producer),
    Simple(SimpleConsumer, String, FilterExpression),
}

#[derive(Default)]
struct Clients {
    running: RefCell<HashMap<String, Rc<Client>>>,
    received: RefCell<Vec<Rc<MessageView>>>,
}

fn text(args: &Value, name: &str) -> String {
    args[name].as_str().unwrap_or_default().to_owned()
}

fn number(args: &Value, name: &str) -> i64 {
    args[name].as_i64().unwrap_or_default()
}

fn options(args: &Value) -> ClientOption {
    let mut option = ClientOption::default();
    option.set_access_url(text(args, "endpoint"));
    if args["await_s"].is_number() {
        option.set_long_polling_timeout(Duration::from_secs(number(args, "await_s") as u64));
    }
    if args["key"].is_string() {
        option.set_access_key(text(args, "key"));
        option.set_secret_key(text(args, "secret"));
    }
    option
}

fn read(given: &Value) -> Result<impl Message + use<>, Box<dyn Error>> {
    let mut builder = MessageBuilder::builder()
        .set_topic(text(given, "topic"))
        .set_body(STANDARD.decode(text(given, "body"))?);
    if given["tag"].is_string() {
        builder = builder.set_tag(text(given, "tag"));
    }
    if given["key"].is_string() {
        builder = builder.set_keys(vec![text(given, "key")]);
    }
    if let Some(found) = given["properties"].as_object() {
        let properties = found.iter().map(|(name, value)| (name, value.as_str().unwrap_or_default()));
        builder = builder.set_properties(properties.collect());
    }
    if given["group"].is_string() {
        builder = builder.set_message_group(text(given, "group"));
    }
    if given["deliver_at_ms"].is_number() {
        builder = builder.set_delivery_timestamp(number(given, "deliver_at_ms") / 1000);
    }
    if given["transaction"] == true {
        builder = builder.enable_transaction();
    }
    Ok(builder.build()?)
}

fn written(view: &MessageView, number: usize) -> Value {
    json!({
        "topic": view.topic(),
        "body": STANDARD.encode(view.body()),
        "id": view.message_id(),
        "tag": view.tag(),
        "keys": view.keys(),
        "properties": view.properties(),
        "group": view.message_group(),
        "attempt": view.delivery_attempt(),
        "number": number,
    })
}

async fn new_producer(args: &Value) -> Result<Client, Box<dyn Error>> {
    let mut option = ProducerOption::default();
    let topics = args["topics"].as_array().into_iter().flatten();
    option.set_topics(topics.filter_map(Value::as_str).collect());
    let mut producer = match args["checked"].as_str() {
        None => Producer::new(option, options(args))?,
        Some(checked) => {
            let commits = checked == "COMMIT";
            Producer::new_transaction_producer(
                option,
                options(args),
                Box::new(move |_, _| {
                    if commits { TransactionResolution::COMMIT } else { TransactionResolution::ROLLBACK }
                }),
            )?
        }
    };
    producer.start().await?;
    Ok(Client::Producer(producer))
}

async fn new_simple(args: &Value) -> Result<Client, Box<dyn Error>> {
    let mut option = SimpleConsumerOption::default();
    option.set_consumer_group(text(args, "group"));
    option.set_topics(vec![text(args, "topic")]);
    let mut consumer = SimpleConsumer::new(option, options(args))?;
    consumer.start().await?;
    let kind = if args["sql"] == true { FilterType::Sql } else { FilterType::Tag };
    let filter = FilterExpression::new(kind, args["expression"].as_str().unwrap_or("*"));
    Ok(Client::Simple(consumer, text(args, "topic"), filter))
}

impl Clients {
    async fn run(&self, args: &Value) -> Outcome {
        let (op, name) = (text(args, "op"), text(args, "name"));
        let started = match op.as_str() {
            "ping" => return Ok(json!("pong")),
            "producer_start" => Some(new_producer(args).await?),
            "simple_start" => Some(new_simple(args).await?),
            _ => None,
        };
        if let Some(client) = started {
            self.running.borrow_mut().insert(name, Rc::new(client));
            return Ok(Value::Null);
        }
        if op == "stop" {
            let found = self.running.borrow_mut().remove(&name);
            match found.and_then(Rc::into_inner).ok_or("no such client, or it is in use")? {
                Client::Producer(producer) => producer.shutdown().await?,
                Client::Simple(consumer, ..) => consumer.shutdown().await?,
            }
            return Ok(Value::Null);
        }
        let client = self.running.borrow().get(&name).cloned().ok_or("no such client")?;
        match &*client {
            Client::Producer(producer) => produce(producer, &op, args).await,
            Client::Simple(consumer, topic, filter) => self.consume(consumer, topic, filter, &op, args).await,
        }
    }

    async fn consume(
        &self, consumer: &SimpleConsumer, topic: &str, filter: &FilterExpression, op: &str, args: &Value,
    ) -> Outcome {
        if op == "ack" {
            let view = self.received.borrow()[number(args, "number") as usize].clone();
            consumer.ack(&*view).await?;
            return Ok(Value::Null);
        }
        if op != "receive" {
            return Err(format!("the client has no {op}").into());
        }
        let invisible = Duration::from_secs(number(args, "invisible_s") as u64);
        let found = consumer.receive_with(topic, filter, number(args, "count") as i32, invisible).await?;
        let mut received = self.received.borrow_mut();
        let mut out = Vec::new();
        for view in found {
            out.push(written(&view, received.len()));
            received.push(Rc::new(view));
        }
        Ok(Value::Array(out))
    }
}

async fn produce(producer: &Producer, op: &str, args: &Value) -> Outcome {
    let mut given = args["message"].clone();
    match op {
        "send" => {
            let receipt = producer.send(read(&given)?).await?;
            Ok(json!({"id": receipt.message_id()}))
        }
        "transaction" => {
            given["transaction"] = json!(true);
            let transaction = producer.send_transaction_message(read(&given)?).await?;
            match args["end"].as_str() {
                Some("COMMIT") => transaction.commit().await?,
                Some("ROLLBACK") => transaction.rollback().await?,
                _ => {}
            }
            Ok(Value::Null)
        }
        _ => Err(format!("the client has no {op}").into()),
    }
}

async fn serve() {
    let clients = Rc::new(Clients::default());
    let mut lines = BufReader::new(stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let clients = clients.clone();
        spawn_local(async move {
            let args: Value = serde_json::from_str(&line).expect("a command in JSON");
            let answer = match clients.run(&args).await {
                Ok(result) => json!({"id": args["id"], "ok": true, "result": result}),
                Err(error) => json!({
                    "id": args["id"], "ok": false, "error": "ClientError", "message": error.to_string(), "code": -1,
                }),
            };
            println!("{answer}");
        });
    }
}

#[tokio::main]
async fn main() {
    LocalSet::new().run_until(serve()).await;
    std::process::exit(0); // the clients that still run need not stop
}
