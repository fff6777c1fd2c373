"""No secret and no message appears in the logs of programs, in success or failure.

Real servers, clients and commands run with accounts and TLS, and log at the most verbose level as JSON, which
contains the values of events.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlencode

import pytest
from cryptography.hazmat.primitives import serialization as forms
from tests.broker.access.test_files import write
from tests.certificates import Certificates
from tests.console.conftest import READY, console_command

from cometmq.testing import ServerProcess

ADMIN, PROGRAM, ADDED = "sEcReT-of-admin", "sEcReT-of-program", "sEcReT-of-added"
WRONG, HALF = "sEcReT-that-is-wrong", "sEcReT-in-half-a-line"
KEY_PASSWORD, BAD_PASSWORD = "sEcReT-of-the-key", "sEcReT-of-no-key"
HEADER, CHANGED = "token:sEcReT-of-the-start", "token:sEcReT-by-request"
BODY, PROPERTY = "sEcReT body of a message", "sEcReT property"
LOGIN = "sEcReT password of nobody"
MARK = "sEcReT"
SPEAKS = {"COMETMQ_LOG_LEVEL": "DEBUG", "COMETMQ_LOG_FORMAT": "json"}

ACL = f"""
accounts:
- {{accessKey: adminer, secretKey: {ADMIN}, admin: true}}
- accessKey: program
  secretKey: {PROGRAM}
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
  topicPerms: [Closed=DENY, DefaultCluster_REPLY_TOPIC=PUB]
"""

CLIENT = """
import asyncio, sys
from cometmq import *
from cometmq import logs
logs.set_up()
namesrv, tls, secret, wrong, body, text = sys.argv[1:]

def options(key):
    return ClientOptions(access_key="program", secret_key=key, tls=tls, trace=TraceOptions())

def message(topic):
    return Message(topic, body.encode() * 50, tags="T", keys=["k"], properties={"password": text})

class Bank:
    async def execute_local_transaction(self, message, argument):
        raise RuntimeError("away")
    async def check_local_transaction(self, message):
        return TransactionState.ROLLBACK

async def main():
    came = 0
    done = asyncio.Event()
    async def take(messages):
        nonlocal came
        came += 1
        if came == 1:
            raise LookupError("not yet")
        done.set()
        return ConsumeStatus.SUCCESS
    good = {"namesrv": namesrv, "client_options": options(secret)}
    first = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with Producer("P", **good) as producer, TransactionProducer("PT", Bank(), **good) as transactions:
        for topic in ("Orders", "Closed"):
            for work in (producer.send, producer.send_oneway, transactions.send_in_transaction):
                try:
                    await work(message(topic))
                except CometError as error:
                    print(error)
        await producer.send_batch([message("Orders"), message("Orders")])
        async with PushConsumer("G", take, "Orders", options=first, **good):
            async with asyncio.timeout(60):
                await done.wait()
        try:
            await producer.request(message("Orders"), timeout_s=0.5)
        except CometError as error:
            print(error)
    try:
        async with Producer("P", namesrv=namesrv, client_options=options(wrong)) as producer:
            await producer.send(message("Orders"))
    except CometError as error:
        print(error)
    asyncio.get_running_loop().call_exception_handler({"message": "the end of the client"})

asyncio.run(main())
"""


class Scene:
    """The servers and the output of every program. `logs` has the log lines by program."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs: dict[str, str] = {}
        self.certificates = Certificates(directory / "certificates")
        key = forms.load_pem_private_key(self.certificates.server.read_bytes(), None)
        path = directory / "key.pem"
        kept = forms.BestAvailableEncryption(KEY_PASSWORD.encode())
        path.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, kept))
        self.key = {"tls_server_keyPath": str(path), "tls_server_keyPassword": KEY_PASSWORD}
        self.tls = self.certificates.settings(**self.key)
        self.acl = directory / "home" / "conf" / "plain_acl.yml"
        write(self.acl, ACL)
        self.namesrv = self.addr = ""

    def conf(self, name: str, **settings: str) -> list[str]:
        path = self.directory / f"{name}.conf"
        pairs = {"listenPort": "0", "bindAddress": "127.0.0.1", "tls.config.file": str(self.tls)}
        pairs |= {"tls.server.mode": "enforcing"} | settings
        path.write_text("".join(f"{key}={value}\n" for key, value in pairs.items()))
        return [sys.executable, "-m", "cometmq", name.partition("-")[0], "-c", str(path)]

    def broker(self, name: str, **settings: str) -> list[str]:
        return self.conf(
            name,
            **{
                "brokerIP1": "127.0.0.1", "namesrvAddr": self.namesrv, "aclEnable": "true",
                "rocketmqHome": str(self.directory / "home"),
                "storePathRootDir": str(self.directory / name), "mappedFileSizeCommitLog": "16777216",
                "transactionTimeOut": "500", "transactionCheckInterval": "500",
                "metricsGrpcExporterHeader": HEADER,
            } | settings,
        )  # fmt: skip

    def run(self, name: str, command: list[str], **environment: str) -> str:
        """Run a program to its end; all output on standard error counts as its log."""
        env = {**os.environ, **SPEAKS, **environment}
        done = subprocess.run(command, capture_output=True, env=env, text=True, timeout=120)
        self.logs[f"{name} {len(self.logs)}"] = done.stderr
        return done.stdout

    def admin(self, *words: str, secret: str = ADMIN, key: str = "adminer") -> str:
        access = {"COMETMQ_ACCESS_KEY": key, "COMETMQ_SECRET_KEY": secret, "COMETMQ_TLS": str(self.tls)}
        command = [sys.executable, "-m", "cometmq", words[0], *words[1:], "-n", self.namesrv]
        return self.run(" ".join(words[:2]), command, **access)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Run a name server and a broker with accounts, which accept only TLS."""
    made = Scene(tmp_path)
    files = {name: str(tmp_path / name) for name in ("kvConfigPath", "configStorePath")}
    with ServerProcess(made.conf("namesrv", **files), "boot success", SPEAKS) as names:
        made.namesrv = f"127.0.0.1:{names.wait_ready().rpartition(' ')[2]}"
        with ServerProcess(made.broker("broker"), "boot success", SPEAKS) as broker:
            found = re.search(r"127\.0\.0\.1:[0-9]+", broker.wait_ready())
            assert found is not None
            made.addr = found[0]
            yield made
            # This line is not a valid account and has a secret in the wrong place.
            write(made.acl, f"{ACL}- {{accessKey: other, secretKey:{HALF}: x}}\n")
            broker.wait_line("plain_acl", 30)
        made.logs["broker"] = broker.output
    made.logs["namesrv"] = names.output
    check(made)


def check(scene: Scene) -> None:
    for program, text in scene.logs.items():
        lines = [line for line in text.splitlines() if MARK in line]
        assert lines == [], f"{program} says: {lines[0][:500]}"
    for server in ("broker", "namesrv"):
        assert any(line.startswith('{"') for line in scene.logs[server].splitlines()), server
    assert "plain_acl" in scene.logs["broker"]


@pytest.mark.slow("starts each program with debug logs")
def test_programs_log_no_secret_and_no_message(scene: Scene) -> None:
    client = [sys.executable, "-c", CLIENT, scene.namesrv, str(scene.tls)]
    said = scene.run("client", [*client, PROGRAM, WRONG, BODY, PROPERTY])
    assert "Closed" in said  # the account has no right to this topic
    assert "signature" in said.lower()
    assert MARK not in said
    at = ("-b", scene.addr)
    for words in (
        ("updateAclConfig", *at, "-a", "added-one", "-s", ADDED),
        ("updateAclConfig", *at, "-a", "x", "-s", ADDED),  # the account's name is too short
        ("updateAclConfig", *at, "-a", "added-two", "-s", f"{ADDED} with blanks"),
        ("deleteAclConfig", *at, "-a", "added-one"),
        ("updateBrokerConfig", *at, "-k", "metricsGrpcExporterHeader", "-v", CHANGED),
        ("updateBrokerConfig", *at, "-k", "metricsGrpcExporterHeaders", "-v", CHANGED),
        ("getBrokerConfig", *at),
    ):
        assert MARK not in scene.admin("admin", *words), words
    (sent,) = re.findall(r"[0-9A-F]{32}", scene.admin("send", "Orders", BODY, key="program", secret=PROGRAM))[
        :1
    ]
    for key, secret in (("adminer", ADMIN), ("program", PROGRAM), ("program", WRONG), ("nobody", WRONG)):
        shown = scene.admin("admin", "printMsg", "-t", "Orders", key=key, secret=secret)
        assert (BODY in shown) == (secret != WRONG)  # the command prints the requested message
        scene.admin("admin", "queryMsgByUniqueKey", "-t", "Orders", "-i", sent, key=key, secret=secret)
        scene.admin("send", "Closed", BODY, key=key, secret=secret)
        scene.admin("consume", "Orders", "-g", "G2", "--timeout", "1", "-c", "1", key=key, secret=secret)
    scene.admin("doctor")
    events = [json.loads(line) for line in scene.logs["client 0"].splitlines()]
    assert {"DEBUG", "WARNING", "ERROR"} <= {each["level"] for each in events}
    assert "the end of the client" in {each["message"] for each in events}


def test_what_does_not_start_tells_no_secret(scene: Scene) -> None:
    before = scene.tls
    bad = {**scene.key, "tls_server_keyPassword": BAD_PASSWORD}
    scene.tls = scene.certificates.settings("bad.properties", **bad)
    assert "certificate" in fails(scene, scene.broker("broker-b"))
    assert "certificate" in fails(scene, scene.conf("namesrv-b"))
    scene.tls = before
    write(scene.directory / "other" / "conf" / "plain_acl.yml", f"{ACL}  secretkey: {HALF}\n")
    assert "secretkey" in fails(scene, scene.broker("broker-c", rocketmqHome=str(scene.directory / "other")))
    assert "metricsGrpcExporterHeader" in fails(
        scene, scene.broker("broker-d", metricsGrpcExporterHeader=f"{MARK} without a name")
    )


def fails(scene: Scene, command: list[str]) -> str:
    out = scene.run(" ".join(command[3:]), command)
    said = list(scene.logs.values())[-1]
    assert "boot success" not in out
    return said


def test_the_console_logs_no_password(scene: Scene) -> None:
    data = scene.directory / "console"
    access = {"COMETMQ_ACCESS_KEY": "adminer", "COMETMQ_SECRET_KEY": ADMIN, "COMETMQ_TLS": str(scene.tls)}
    with ServerProcess(console_command(scene.namesrv, data), READY, {**SPEAKS, **access}) as console:
        url = console.wait_line(READY, 60).rpartition(" ")[2].rstrip("/")
        told = console.wait_line(r"first account .*password", 10)
        password = told.split()[-1]
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        for word in (LOGIN, password):
            page = browser.open(f"{url}/login", timeout=30).read().decode()
            (token,) = re.findall(r'name="csrf" value="([^"]+)"', page)
            fields = {"csrf": token, "next": "/", "name": "admin", "password": word}
            try:
                page = browser.open(f"{url}/login", urlencode(fields).encode(), timeout=30).read().decode()
            except urllib.error.HTTPError as error:
                page = error.read().decode()
            assert ('type="password"' in page) == (word == LOGIN)
    text = "\n".join(line for line in console.lines if line != told)
    assert password not in text
    assert password not in (data / "audit.jsonl").read_text()
    scene.logs["console"] = text
    scene.logs["audit"] = (data / "audit.jsonl").read_text()
