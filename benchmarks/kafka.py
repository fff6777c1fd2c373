"""Our Spark source, sink and archive job beside Spark's own Kafka source and sink, with the same records.

Both servers run on this machine, with one node and 8 queues or partitions per topic; one Spark session on
`local[2]` uses them in turns. Spark's Kafka connector is published only for some versions of Spark, so run
this in an environment with that PySpark (VERSION).
"""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from tests.interop.jars import java_tool, resolve
from tests.interop.processes import Process
from tests.ports import free_port

from benchmarks.turns import Figures, Options, in_turns, median, ratio, table
from cometmq.pipeline.jobs.archive import archive
from cometmq.pipeline.session import spark_session
from cometmq.testing import StandaloneProcess

Work = Callable[[str, int], None]
VERSION = "4.2.0"
KAFKA = "4.1.0"
# The token provider of 4.2 is not published, so that of 4.0 is used. Spark provides their dependencies.
CONNECTOR = [
    ("org.apache.spark:spark-sql-kafka-0-10_2.13", VERSION),
    ("org.apache.spark:spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka:kafka-clients", "3.9.1"),
    ("org.apache.commons:commons-pool2", "2.12.0"),
]
QUEUES = 8
SIZES = {"1k": (1024, 2_000_000), "100": (100, 10_000_000)}  # bytes per body and number of messages
COLUMNS = (
    "keys string, body binary, topic string, queue_id int, queue_offset bigint, store_timestamp timestamp"
)


def run(options: Options) -> str:
    """Return a table for each size of body: rates, and the ratio of ours to Kafka's, turn by turn."""
    if not pyspark.__version__.startswith(VERSION):
        raise SystemExit(f"Spark's Kafka connector is for PySpark {VERSION}, this is {pyspark.__version__}")
    jars = ",".join(map(str, resolve(CONNECTOR, transitive=False)))
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--jars {jars} pyspark-shell"
    tables = []
    with kafka(options.data / "kafka") as servers, StandaloneProcess(options.data / "comet") as cluster:
        spark = spark_session("benchmark", master="local[2]", memory="2g")
        try:
            for name, (size, count) in SIZES.items():
                if not options.rows or name in options.rows:
                    messages = 20_000 if options.short else count
                    pair = Pair(spark, servers, cluster.namesrv, options.data, f"bench{name}", size, messages)
                    tables.append(f"{messages:,} messages of {size} B\n\n{pair.measure(options.turns)}")
        finally:
            spark.stop()
    return "\n".join(tables)


@contextmanager
def kafka(directory: Path) -> Iterator[str]:
    """Run one Kafka node in KRaft mode; yield its address."""
    directory.mkdir(parents=True)
    port, controller = free_port(), free_port()
    settings = directory / "server.properties"
    settings.write_text(
        f"process.roles=broker,controller\nnode.id=1\ncontroller.listener.names=CONTROLLER\n"
        f"controller.quorum.voters=1@127.0.0.1:{controller}\nlog.dirs={directory / 'log'}\n"
        f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
        f"advertised.listeners=PLAINTEXT://127.0.0.1:{port}\nnum.partitions={QUEUES}\n"
        "offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n"
        "transaction.state.log.min.isr=1\n"
    )
    path = os.pathsep.join(map(str, resolve([("org.apache.kafka:kafka_2.13", KAFKA)])))
    java = [java_tool("java"), "-Xms512m", "-Xmx1g", "-cp", path]
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    made = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)]
    subprocess.run(made, check=True, capture_output=True)
    process = Process("Kafka", [*java, "kafka.Kafka", str(settings)], directory / "out.log", cwd=directory)
    try:
        process.wait_ready("its port", lambda: _listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Pair:
    """The same records in a topic of each server."""

    spark: SparkSession
    kafka: str
    comet: str
    home: Path
    topic: str
    size: int
    count: int

    def measure(self, turns: int) -> str:
        """Return the rows of all kinds of work, each measured in turns of both servers."""
        self.fill("kafka", self.topic, self.count)
        self.fill("comet", self.topic, self.count)
        rows = []
        for what, (work, count) in self.works().items():

            def timed(server: str, turn: int, work: Work = work, count: int = count) -> Figures:
                began = time.perf_counter()
                work(server, turn)
                return {"rate": count / (time.perf_counter() - began)}

            found = in_turns(f"{self.size} B, {what}", ("kafka", "comet"), turns, timed)
            theirs, ours = found["kafka"], found["comet"]
            rates = [f"{median(each, 'rate'):,.0f}" for each in (theirs, ours)]
            rows.append([what, *rates, ratio(theirs, ours, "rate")])
        return table(["Work", "Kafka's, messages/s", "ours", "ratio"], rows)

    def works(self) -> dict[str, tuple[Work, int]]:
        """Return the measured work by name, with its number of messages."""
        sent = max(1000, self.count // 5)

        def columns_to_parquet(server: str, turn: int) -> None:
            self.load(server, COLUMNS).write.parquet(self.place(f"{server}-columns-{turn}"))

        def kept(server: str, turn: int) -> None:
            where = self.place(f"{server}-kept-{turn}")
            if server == "comet":
                archive(self.spark, self.comet, [self.topic], where)
            else:
                self.load(server).write.option("compression", "zstd").parquet(where)

        return {
            "read, sum over the body": (self.sum_of_bodies, self.count),
            "Kafka's columns to Spark's Parquet": (columns_to_parquet, self.count),
            "AvailableNow": (self.available_now, self.count),
            "archive job, source into Spark's Parquet": (kept, self.count),
            "sink": (lambda server, turn: self.fill(server, f"{self.topic}-{turn}", sent), sent),
        }

    def place(self, name: str) -> str:
        return str(self.home / f"{self.topic}-{name}")

    def rows(self, count: int) -> DataFrame:
        """Create keys and bodies with a repetitive part."""
        text = F.concat(F.col("id").cast("string"), F.lit(":"), F.sha2(F.col("id").cast("string"), 512))
        body = F.rpad(text, self.size, "0123456789abcdefghijklmnopqrstuvwxyz").cast("binary")
        return self.spark.range(0, count, 1, QUEUES).select(
            F.col("id").cast("string").alias("key"), body.alias("body")
        )

    def fill(self, server: str, topic: str, count: int) -> None:
        rows = self.rows(count)
        if server == "kafka":
            self.create(topic)
            writer = rows.select("key", F.col("body").alias("value")).write.format("kafka")
            writer = writer.option("kafka.bootstrap.servers", self.kafka)
        else:
            writer = rows.select(F.col("key").alias("keys"), "body").write.format("cometmq").mode("append")
            writer = writer.option("namesrv", self.comet)
        writer.option("topic", topic).save()

    def create(self, topic: str) -> None:
        """Create a topic of Kafka.

        Created by its first sender, it sometimes had no leader for two minutes.
        """
        jvm: Any = self.spark.sparkContext._jvm  # noqa: SLF001 - the connector brings Kafka's Java client
        kafka = jvm.org.apache.kafka.clients.admin
        settings = jvm.java.util.HashMap()
        settings.put("bootstrap.servers", self.kafka)
        admin = kafka.Admin.create(settings)
        topics = jvm.java.util.ArrayList()
        topics.add(kafka.NewTopic(topic, QUEUES, jvm.Short.parseShort("1")))
        admin.createTopics(topics).all().get()
        admin.close()

    def options(self, server: str) -> dict[str, str]:
        place = {"kafka.bootstrap.servers": self.kafka} if server == "kafka" else {"namesrv": self.comet}
        return place | {"subscribe": self.topic, "startingOffsets": "earliest"}

    def load(self, server: str, columns: str | None = None) -> DataFrame:
        if server == "kafka":
            return self.spark.read.format("kafka").options(**self.options(server)).load()
        reader = self.spark.read.format("cometmq").options(**self.options(server))
        return (reader.schema(columns) if columns else reader).load()

    def sum_of_bodies(self, server: str, _: int) -> None:
        frame, body = self.load(server, "body binary"), "value" if server == "kafka" else "body"
        row = frame.agg(F.count("*"), F.sum(F.length(body))).first()
        if row is None or tuple(row) != (self.count, self.count * self.size):
            raise AssertionError(f"{server} gave {row}")

    def available_now(self, server: str, turn: int) -> None:
        reader = self.spark.readStream.format("kafka" if server == "kafka" else "cometmq")
        reader = reader.options(**self.options(server))
        if server == "comet":
            reader = reader.schema(COLUMNS).option("maxOffsetsPerTrigger", str(self.count))
        writer = reader.load().writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", self.place(f"{server}-checkpoint-{turn}")).start()
        query.awaitTermination()
