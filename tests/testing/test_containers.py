"""The image of conf/container, and `cometmq.testing.containers`, which runs it for tests."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import testcontainers.core.container
from docker.errors import APIError
from testcontainers.core.config import ConnectionMode, testcontainers_config
from tests.container_engine import IMAGE, Engine, engine_with_image
from tests.interop.jars import java_tool, resolve
from tests.kit.waiting import wait_until
from tests.long_form import long_form
from tests.ports import free_port
from tests.test_helm import of_kind, pods

from cometmq import Message, SyncProducer
from cometmq.broker.access.accounts import read_acl
from cometmq.client import ClientOptions
from cometmq.errors import BrokerError
from cometmq.protocol.java_properties import parse_properties
from cometmq.remoting.client import parse_addr
from cometmq.standalone import small_files
from cometmq.testing import ServerProcess
from cometmq.testing.containers import READY, CometMQContainer

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
SINGLE = Path(__file__).parents[2] / "src" / "cometmq" / "conf" / "container" / "single.sh"
MAX_IMAGE_BYTES = 150_000_000
Start = Callable[..., CometMQContainer]
ACCOUNT = {"accessKey": "operator", "secretKey": "12345678", "admin": True}
real = [
    long_form("an image is built, with packages from registries"),
    pytest.mark.timeout(900),  # including the fixture `engine`
    pytest.mark.xdist_group("containers"),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_with_image(tmp_path_factory.mktemp("engine")) as found:
        yield found


@pytest.fixture
def containers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The container engine, configured for Testcontainers. Its cleanup container (Ryuk) is not available."""
    monkeypatch.setenv("DOCKER_HOST", engine.address)
    monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", True)
    monkeypatch.setattr(testcontainers_config, "connection_mode_override", ConnectionMode.docker_host)
    return engine


class FakeDocker:
    """A fake of the part of Testcontainers' client that `CometMQContainer` uses. The first starts fail."""

    def __init__(self, failures: list[str] | None = None, host: str = "localhost") -> None:
        self.failures = failures or []
        self._host = host
        self.created: list[dict[str, Any]] = []
        self.removed = 0
        self.files: dict[str, bytes] = {}

    def create(self, image: str, **options: Any) -> FakeDocker:
        self.created.append({**options, "image": image, "ports": dict(options["ports"])})
        return self

    def start(self, _container: object) -> None:
        if self.failures:
            raise APIError(self.failures.pop(0))

    def put_archive(self, path: str, data: bytes) -> bool:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                self.files["/" + member.name.lstrip("/")] = archive.extractfile(member).read()  # type: ignore[union-attr]
        return True

    def logs(self, **_streams: bool) -> bytes:
        return b"The broker[broker-a, 127.0.0.1:1] boot success. serializeType=JSON"

    def remove(self, **_options: bool) -> None:
        self.removed += 1

    def get_connection_mode(self) -> ConnectionMode:
        return ConnectionMode.docker_host

    def host(self) -> str:
        return self._host

    id = short_id = "1"
    status = "running"

    def reload(self) -> None:
        """Testcontainers asks for the newest state."""


class TestWithoutEngine:
    @pytest.fixture
    def start(self, monkeypatch: pytest.MonkeyPatch) -> Start:
        monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", True)

        def start(docker: FakeDocker, **options: Any) -> CometMQContainer:
            monkeypatch.setattr(testcontainers.core.container, "DockerClient", lambda: docker)
            return CometMQContainer(**options).start()

        return start

    def test_the_port_of_the_broker_is_the_same_inside_and_outside(self, start: Start) -> None:
        docker = FakeDocker(host="docker.example")
        started = start(docker, settings={"brokerName": "a b"})
        (created,) = docker.created
        _, port = parse_addr(started.broker_addr)
        assert started.broker_addr == f"docker.example:{port}"
        assert created["ports"] == {"9876": None, "8081": None, str(port): port}
        assert created["command"][3:] == ["brokerName=a b", f"listenPort={port}"]
        assert docker.files == {"/run/cometmq/address": b"docker.example"}

    def test_localhost_is_no_ipv6_address(self, start: Start) -> None:
        docker = FakeDocker()
        start(docker)
        assert docker.files == {"/run/cometmq/address": b"127.0.0.1"}

    @pytest.mark.parametrize("text", ["bind: address already in use", "Bind: port is already allocated"])
    def test_another_port_is_taken_if_the_first_one_is_in_use(self, start: Start, text: str) -> None:
        docker = FakeDocker([text])
        started = start(docker)
        first, second = (set(each["ports"]) - {"9876", "8081"} for each in docker.created)
        assert (docker.removed, first & second, len(second)) == (1, set(), 1)
        assert second == {started.broker_addr.rpartition(":")[2]}

    def test_a_port_of_the_settings_is_not_exchanged(self, start: Start) -> None:
        docker = FakeDocker(["address already in use"])
        with pytest.raises(APIError):
            start(docker, settings={"listenPort": "12345"})
        assert len(docker.created) == 1

    def test_another_failure_is_not_repeated(self, start: Start) -> None:
        docker = FakeDocker(["no such image"])
        with pytest.raises(APIError, match="no such image"):
            start(docker)
        assert len(docker.created) == 1

    def test_accounts_are_a_file_that_the_broker_reads(self, start: Start) -> None:
        docker = FakeDocker()
        start(docker, accounts=[ACCOUNT])
        content = docker.files["/etc/cometmq/plain_acl.yml"]
        assert "aclEnable=true" in docker.created[0]["command"]
        assert [each.access_key for each in read_acl("plain_acl.yml", content).accounts] == ["operator"]


@pytest.mark.slow("starts two servers")
def test_the_command_of_the_image_starts_both_servers(tmp_path: Path) -> None:
    """The script of the image as a plain process, in other directories."""
    conf, run, data = (tmp_path / name for name in ("etc", "run", "data"))
    for path in (conf, run, data):
        path.mkdir()
    for name in ("broker.conf", "namesrv.conf"):
        text = (SINGLE.parent / name).read_text()
        (conf / name).write_text(
            text.replace("/var/lib/cometmq", str(data)).replace("metricsExporterType=PROM", "")
        )
    port, namesrv = free_port(), free_port()
    script = tmp_path / "cometmq-single"
    moved = {
        "/etc/cometmq": str(conf),
        "/run/cometmq": str(run),
        "/var/lib/cometmq": str(data),
        "9876": str(namesrv),
    }
    text = SINGLE.read_text().replace("mqnamesrv -c", f"mqnamesrv --port {namesrv} -c")
    for old, new in moved.items():
        text = text.replace(old, new)
    script.write_text(text)
    wrapped = tmp_path / "bin"
    wrapped.mkdir()
    for name in ("mqnamesrv", "mqbroker"):
        (wrapped / name).write_text(
            f'#!/bin/sh\necho $$ > {name}.pid; exec "{sys.executable}" -m cometmq {name} "$@"\n'
        )
        (wrapped / name).chmod(0o755)
    (wrapped / "python").symlink_to(sys.executable)
    env = {"PATH": f"{wrapped}:{os.environ['PATH']}", "COMETMQ_RUN_DIR": str(run)}
    settings = ["brokerIP1=127.0.0.1", f"listenPort={port}", "grpcPort=0", "brokerName=from the arguments"]
    with ServerProcess(["sh", str(script), *settings], READY, env) as server:
        line = server.wait_ready()
        with SyncProducer("g", namesrv=f"127.0.0.1:{namesrv}") as producer:
            assert producer.send(Message("t", b"x")).queue.broker_name == "from the arguments"
        # In a container it ends with the broker, which is the first process there.
        os.kill(int((run / "mqnamesrv.pid").read_text()), signal.SIGKILL)
        written = parse_properties((run / "broker.conf").read_text())

    assert f"127.0.0.1:{port}] boot success" in line
    assert small_files().items() <= written.items()


class TestImage:
    pytestmark = real

    def test_it_is_small(self, engine: Engine) -> None:
        (size,) = json.loads(engine.run("image", "inspect", "--format", "[{{.Size}}]", IMAGE))

        assert size < MAX_IMAGE_BYTES

    def test_it_holds_no_installer_and_nothing_of_the_build(self, engine: Engine) -> None:
        script = (
            "ls /usr/src /usr/bin/apt-get /opt/cometmq/bin/pip /usr/bin/perl 2>/dev/null || true; ls /opt"
        )

        assert engine.run("run", "--rm", IMAGE, "sh", "-c", script) == "cometmq\n"

    def test_both_servers_need_no_root_and_no_writable_image_and_stop_at_the_signal(
        self, engine: Engine
    ) -> None:
        start = ("run", "--detach", "--read-only", IMAGE)
        broker = engine.run(*start).strip()
        namesrv = engine.run(*start, "mqnamesrv", "-c", "/etc/cometmq/namesrv.conf").strip()
        inspect = ("image", "inspect", "--format", "{{json .Config.Healthcheck.Test}}", IMAGE)
        check = json.loads(engine.run(*inspect))
        try:
            for each in (broker, namesrv):
                ask = 'until python -c "$0" 2>/dev/null; do sleep 0.1; done'
                engine.run("exec", each, "sh", "-c", ask, check[-1])
                assert engine.run("exec", each, "python", "-c", "import os; print(os.getuid())") == "10001\n"
                # The servers' entries for mqshutdown are there: the directory can be written
                assert ".pid" in engine.run("exec", each, "ls", "/run/cometmq")
                engine.run("stop", "--time", "60", each)
                assert engine.run("inspect", "--format", "{{.State.ExitCode}}", each) == "0\n"
            assert "boot success" in engine.run("logs", broker)
        finally:
            engine.run("rm", "--force", "--volumes", broker, namesrv)


class TestChart:
    pytestmark = real

    def test_a_member_starts_from_a_read_only_image(self, engine: Engine, tmp_path: Path) -> None:
        """The start script of conf/helm, which needs programs of the image, with the chart's own settings."""
        values = "least"
        (config,) = of_kind(values, "ConfigMap")
        for name, text in config["data"].items():
            (tmp_path / name).write_text(text.replace("aclEnable=true", "aclEnable=false"))
        pod = "demo-cometmq-broker-a-0"
        (container,) = pods(values)["demo-cometmq-broker-a"]["spec"]["containers"]
        options = ["--read-only", "--env", f"POD_NAME={pod}"]
        options += ["--volume", f"{tmp_path}:/etc/cometmq-map:ro"]
        options += ["--add-host", f"{pod}.demo-cometmq-broker-a.queues.svc.cluster.local:127.0.0.1"]
        tmp_path.chmod(0o755)
        started = engine.run("run", "--detach", *options, IMAGE, *container["command"]).strip()
        try:
            wait_until("it has started", lambda: f"[broker-a, {pod}." in engine.run("logs", started))
        finally:
            engine.run("rm", "--force", "--volumes", started)


def speaks_http2(addr: str) -> bool:
    """Return whether a server answers a client's preface with its SETTINGS."""
    with socket.create_connection(parse_addr(addr), 30) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        return connection.recv(9)[3] == 4


# The end of the JVM stops the container by a shutdown hook, because nothing else removes it here.
JAVA_PROGRAM = """
import java.net.ServerSocket;
import java.util.List;
import org.testcontainers.DockerClientFactory;
import org.testcontainers.containers.GenericContainer;
import org.testcontainers.containers.wait.strategy.Wait;
import org.testcontainers.utility.DockerImageName;

public class Recipe {
  public static void main(String[] arguments) throws Exception {
    %s
    Runtime.getRuntime().addShutdownHook(new Thread(broker::stop));
    System.out.println("ready " + namesrv + " " + endpoints);
    Thread.currentThread().join();
  }
}
"""


class TestContainer:
    pytestmark = real

    def test_a_client_of_the_host_sends_to_the_broker(self, containers: Engine) -> None:
        with CometMQContainer(IMAGE, **containers.run_options) as broker:
            with SyncProducer("g", namesrv=broker.namesrv) as producer:
                result = producer.send(Message("t", b"x"))
            assert speaks_http2(broker.grpc_addr)

        assert result.queue_offset == 0

    def test_the_program_of_the_page_works(self, containers: Engine) -> None:
        (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        options = f"{IMAGE!r}, **{containers.run_options}, settings="
        exec(program.replace("CometMQContainer(settings=", f"CometMQContainer({options}"), {})

    @pytest.mark.foreign("Testcontainers for Java")
    def test_the_java_program_of_the_page_works(self, containers: Engine, tmp_path: Path) -> None:
        (program,) = re.findall(r"```java\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
        program = program.replace('"cometmq"', f'"{IMAGE}"')
        if network := containers.run_options.get("network_mode"):
            program = program.replace("broker.start();", f'broker.withNetworkMode("{network}").start();')
        (tmp_path / "Recipe.java").write_text(JAVA_PROGRAM % program)
        jars = resolve([("org.testcontainers:testcontainers", "1.21.3"), ("org.slf4j:slf4j-nop", "1.7.36")])
        env = {
            "DOCKER_HOST": containers.address,
            "TESTCONTAINERS_RYUK_DISABLED": "true",
            "TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1",
        }
        classes = os.pathsep.join(map(str, jars))
        command = [java_tool("java"), "-cp", classes, str(tmp_path / "Recipe.java")]
        with ServerProcess(command, r"^ready ", env) as java:
            _, namesrv, endpoints = java.wait_ready().split()
            with SyncProducer("g", namesrv=namesrv) as producer:
                assert producer.send(Message("t", b"x")).queue_offset == 0
            assert speaks_http2(endpoints)

    def test_settings_and_accounts_are_those_of_the_broker(self, containers: Engine) -> None:
        settings = {"brokerName": "named", "listenPort": str(free_port())}
        keys = ClientOptions(access_key="operator", secret_key="12345678")
        with CometMQContainer(
            IMAGE, settings=settings, accounts=[ACCOUNT], **containers.run_options
        ) as broker:
            assert broker.broker_addr == f"127.0.0.1:{settings['listenPort']}"
            with (
                SyncProducer("g", namesrv=broker.namesrv) as stranger,
                pytest.raises(BrokerError, match="No accessKey"),
            ):
                stranger.send(Message("t", b"x"))
            with SyncProducer("g", namesrv=broker.namesrv, client_options=keys) as producer:
                assert producer.send(Message("t", b"x")).queue.broker_name == "named"
