"""Apache RocketMQ's own name server and broker as processes on 127.0.0.1, in any version of jars.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.interop.jars import java_tool, server_jars
from tests.interop.processes import (
    OPENED,
    QUICK,
    Broker,
    Cluster,
    NameServer,
    Process,
    Server,
    launcher_classes,
    write_settings,
)
from tests.ports import free_port

LOGBACK = """<configuration><statusListener class="ch.qos.logback.core.status.NopStatusListener"/>
<appender name="out" class="ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d %-5p %c - %m%n</pattern></encoder></appender>
<root level="{level}"><appender-ref ref="out"/></root></configuration>
"""


class ApacheServer(Server):
    """A main class of RocketMQ's server jars, run with our JVM flags and RocketMQ's settings file.

    With `proxy`, settings of RocketMQ's proxy, the broker runs inside a proxy in local mode.
    """

    def __init__(
        self,
        name: str,
        main_class: str,
        version: str,
        directory: Path,
        settings: dict[str, str],
        jvm: list[str],
        proxy: dict[str, object] | None = None,
    ) -> None:
        self.version = version
        self.directory = directory
        conf = rocketmq_home(directory)
        settings_file = write_settings(conf / f"{name}.conf", settings)
        arguments = [main_class, "-c", settings_file]
        if proxy is not None:
            proxy_file = conf / "rmq-proxy.json"
            proxy_file.write_text(json.dumps(proxy | {"brokerConfigPath": settings_file}))
            arguments = ["org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local", "-pc", str(proxy_file)]
            jvm = [*jvm, "-Dtls.server.mode=disabled"]  # TLS needs a native library that Ivy does not find
        command = [
            java_tool("java"),
            *jvm,
            *common_flags(directory),
            f"-Drmq.logback.configurationFile={conf / f'rmq.{name}.logback.xml'}",
            "-cp",
            class_path(version, *(["proxy"] if proxy is not None else [])),
            "ServerLauncher",
            *arguments,
        ]
        self.process = Process(
            f"Apache {version} {name}",
            command,
            directory / f"{name}.log",
            cwd=directory,
            env={"ROCKETMQ_HOME": str(directory)},
        )


class ApacheNamesrv(ApacheServer, NameServer):
    def __init__(
        self, version: str, directory: Path, *, port: int = 0, jvm: list[str] | None = None, wait: bool = True
    ) -> None:
        settings = {
            **self.place(directory, port),
            "configStorePath": str(directory / "namesrv" / "namesrv.properties"),
        }
        flags = jvm if jvm is not None else ["-Xms64m", "-Xmx256m", *QUICK]
        super().__init__(
            "namesrv", "org.apache.rocketmq.namesrv.NamesrvStartup", version, directory, settings, flags
        )
        if wait:
            self.wait_ready()


class ApacheBroker(ApacheServer, Broker):
    """A broker with its store in ``store`` (default ``directory/store``); ``settings`` override all else.

    With a `grpc_port` the broker runs inside Apache's proxy, which listens on that port for clients of 5.x.
    """

    def __init__(
        self,
        version: str,
        directory: Path,
        namesrv: str,
        *,
        name: str = "broker-a",
        port: int = 0,
        store: Path | None = None,
        settings: dict[str, str] | None = None,
        jvm: list[str] | None = None,
        wait: bool = True,
        grpc_port: int = 0,
    ) -> None:
        merged = {
            **self.place(directory, namesrv, name, port, store),
            "brokerIP2": "127.0.0.1",
            "haListenPort": str(self.port + 1),
            "enablePropertyFilter": "true",
            "diskMaxUsedSpaceRatio": "95",
            "waitTimeMillsInSendQueue": "10000",  # the default 200 ms refuses sends while a JVM warms up
            "osPageCacheBusyTimeOutMills": "10000",
            # 5.x writes op messages with a delay, and a check before that would end a transaction twice. With
            # this small size it writes each immediately. The interval is long because 5.5.0 busy-waits once
            # it has passed since the last op message.
            "transactionTimeOut": "3000",
            "transactionOpMsgMaxSize": "1",
            "transactionOpBatchInterval": "3600000",
            "recallMessageEnable": "true",
            **(settings or {}),
        }
        flags = jvm if jvm is not None else ["-Xms256m", "-Xmx768m", *QUICK]
        proxy: dict[str, object] = {
            "namesrvAddr": namesrv,
            "localServeAddr": "127.0.0.1",
            "grpcServerPort": grpc_port,
            "remotingListenPort": free_port(),
        }
        super().__init__(
            "broker",
            "org.apache.rocketmq.broker.BrokerStartup",
            version,
            directory,
            merged,
            flags,
            proxy if grpc_port else None,
        )
        if wait:
            self.wait_ready()


class ApacheCluster(Cluster):
    """A name server and a broker of one version, which tests share. The broker takes about 10 s to stop."""

    def __init__(self, version: str, directory: Path) -> None:
        self.version = version
        super().__init__(
            directory,
            ApacheNamesrv(version, directory),
            # By default, an idle 5.5.0 writes all slots of its timer wheel each second: a seventh of a core.
            lambda namesrv: ApacheBroker(
                version, directory, namesrv, settings={"timerFlushIntervalMs": "30000"}
            ),
        )


def mqadmin(version: str, directory: Path, *arguments: str, timeout_s: float = 60.0) -> str:
    """Run a command of Apache's mqadmin; return its output, since it seldom sets an exit code."""
    done = subprocess.run(
        _mqadmin_line(version, directory, *arguments),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=directory,
        env={**os.environ, "ROCKETMQ_HOME": str(directory)},
    )
    return done.stdout + done.stderr


def mqadmin_until(version: str, directory: Path, last: str, *arguments: str) -> str:
    """Run a command that never ends, stop it at a line that begins with `last`, and return the output."""
    running = Process(
        f"mqadmin {version}",
        _mqadmin_line(version, directory, *arguments),
        directory / "mqadmin.log",
        cwd=directory,
        env={"ROCKETMQ_HOME": str(directory)},
    )

    def printed() -> str:
        whole, _, _ = running.log.read_text().rpartition("\n")
        return whole

    try:
        running.wait_ready(f"a line of {last}", lambda: f"\n{last}" in printed())
        return printed()
    finally:
        running.kill()


def _mqadmin_line(version: str, directory: Path, *arguments: str) -> list[str]:
    conf = rocketmq_home(directory)
    return [
        java_tool("java"),
        "-Xmx256m",
        "-XX:TieredStopAtLevel=1",
        *common_flags(directory),
        f"-Drmq.logback.configurationFile={conf / 'rmq.tools.logback.xml'}",
        "-cp",
        class_path(version),
        "org.apache.rocketmq.tools.command.MQAdminStartup",
        *arguments,
    ]


def rocketmq_home(directory: Path) -> Path:
    """Make ``directory`` a ROCKETMQ_HOME: the programs need its logging configuration to start."""
    conf = directory / "conf"
    conf.mkdir(parents=True, exist_ok=True)
    # At its end, the client of a command logs the interruption of its own requests with stack traces.
    for part, level in (("broker", "WARN"), ("namesrv", "WARN"), ("tools", "OFF")):
        text = LOGBACK.format(level=level)
        (conf / f"logback_{part}.xml").write_text(text)  # the file's name in 4.9
        (conf / f"rmq.{part}.logback.xml").write_text(text)  # the file's name in 5.x
    return conf


def class_path(version: str, *more: str) -> str:
    return os.pathsep.join(map(str, [launcher_classes(), *server_jars(version, *more)]))


def common_flags(directory: Path) -> list[str]:
    return [
        *OPENED,
        "-Xshare:auto",
        "-XX:-UsePerfData",
        "-Dfile.encoding=UTF-8",
        f"-Duser.home={directory}",
        f"-Drocketmq.home.dir={directory}",
        "-Djava.net.preferIPv4Stack=true",
        "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
        "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
    ]
