"""`cometmq store` as an installed command: output, JSON and exit codes, also beside a broker under load."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from tests.cli.conftest import BIN, Run
from tests.store.kit import open_store, send
from tests.store.planted import extract_golden, flip, places, snapshot
from tests.store.tiered.offload import fill, upload

from cometmq import Message
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.object_store import object_store_of
from cometmq.cli import main as cometmq_main
from cometmq.cli import store as store_text
from cometmq.cli.store import print_stats
from cometmq.client.blocking import SyncProducer
from cometmq.message import MessageExt
from cometmq.settings import read_properties_file
from cometmq.store.inspect.stats import Outlook, QueueStats, StoreStats, TopicStats
from cometmq.testing.local import local_broker
from cometmq.testing.process import StandaloneProcess


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `cometmq store` in this process: same arguments, output and exit code, without a process start."""

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["cometmq", "store", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cometmq_main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return subprocess.CompletedProcess(words, end.value.code, out, err)

    return start


def test_a_sound_store(run: Run, sound: Path) -> None:
    done = run("cometmq", "store", "verify", str(sound))
    assert (done.returncode, done.stderr) == (0, "")
    assert "400 records" in done.stdout
    assert "0 errors, 0 warnings, 0 notes" in done.stdout


def test_damage_is_named_and_ends_with_1(store: Run, root: Path) -> None:
    hit = places(root)[200]
    flip(hit.path, hit.at + 100)
    done = store("verify", str(root))
    assert done.returncode == 1
    assert f"error   {hit.path} at byte {hit.at}: no valid record" in done.stdout
    assert "repaired by" in done.stdout
    report = json.loads(store("verify", "--json", str(root)).stdout)
    found = Counter(finding["kind"] for finding in report["findings"])
    assert found == {"log-damage": 1, "queue-unit": 1, "index-entry": 3}  # a record and its entries
    assert report["errors"] == 5


def test_an_unclean_stop_is_no_damage(store: Run, root: Path) -> None:
    last = places(root)[-1]
    flip(last.path, last.at + 100)
    (root / "abort").touch()
    done = store("verify", str(root))
    assert done.returncode == 0
    assert "not stopped cleanly" in done.stdout
    assert "next start" in done.stdout


def test_rebuild_repairs_what_follows_from_the_log(store: Run, root: Path) -> None:
    shutil.rmtree(root / "index")
    for path in (root / "consumequeue" / "T" / "1").iterdir():
        path.unlink()
    # The settings must give the lengths of index files, because no such file is left.
    conf = root / "broker.conf"
    conf.write_text("maxHashSlotNum=100\nmaxIndexNum=400\n")
    assert store("verify", str(root)).returncode == 1
    done = store("rebuild", str(root), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["units"] == 400
    assert store("verify", str(root)).returncode == 0


class TestDump:
    def test_one_record_by_position(self, store: Run, sound: Path) -> None:
        place = places(sound)[7]
        done = store("dump", str(sound), "--offset", str(place.position))
        assert done.returncode == 0
        fields = dict(line.split("  ", 1) for line in done.stdout.splitlines())
        assert {name: value.strip() for name, value in fields.items()}["property KEYS"] == "k7 all"

    def test_by_id_and_key_as_json(self, store: Run, sound: Path) -> None:
        for option in (("--id", "U00007"), ("--key", "k7", "--topic", "T"), ("--key", "k7", "--scan")):
            done = store("dump", str(sound), *option, "--json")
            (line,) = done.stdout.splitlines()
            found = json.loads(line)
            assert (found["msg_id"], found["keys"], found["tags"]) == ("U00007", ["k7", "all"], "tag3")
            assert found["body"].startswith("7:")
            assert found["body_form"] == "text"

    def test_a_range_of_a_queue(self, store: Run, sound: Path) -> None:
        words = ("-t", "T", "-q", "2", "--from", "5", "--limit", "3", "--json")
        done = store("dump", str(sound), *words)
        assert [json.loads(line)["queue_offset"] for line in done.stdout.splitlines()] == [5, 6, 7]

    def test_bodies_in_hex_and_none(self, store: Run, tmp_path: Path) -> None:
        extract_golden(tmp_path / "golden")
        words = ("dump", str(tmp_path / "golden"), "--offset", "0")
        assert "body (hex)         a6" in store(*words).stdout
        assert "body" not in store(*words, "--body", "none").stdout
        assert "\ufffd" in store(*words, "--body", "text").stdout

    def test_compressed_bodies_are_shown_plain(self, store: Run, root: Path) -> None:
        opened = open_store(root)
        at = send(opened, zlib.compress(b"plain words"), sys_flag=1).physical_offset
        opened.close()
        words = ("dump", str(root), "--offset", str(at), "--json")
        assert json.loads(store(*words).stdout)["body"] == "plain words"
        assert json.loads(store(*words, "--raw").stdout)["body"] == zlib.compress(b"plain words").hex()

    def test_a_small_body_that_inflates_beyond_the_limit_is_shown_as_stored(self) -> None:
        bomb = zlib.compress(bytes(store_text.MAX_BODY_BYTES + 1))
        assert store_text.body_of(MessageExt("T", bomb, sys_flag=1), "auto", raw=False) == ("hex", bomb.hex())

    def test_escapes_are_shown_and_not_sent_to_the_terminal(self, store: Run, root: Path) -> None:
        evil = "\x1b[2J\x9b[red]\u202e"
        opened = open_store(root)
        properties = f"KEYS\x01{evil}\x02TAGS\x01{evil}\x02a\x01x\nbody (text)  forged\x02".encode()
        at = send(opened, f"{evil}\nnext\tline".encode(), properties=properties).physical_offset
        opened.close()
        words = ("dump", str(root), "--offset", str(at))

        fields, in_line = store(*words).stdout, store(*words[:-2], "--from", str(at)).stdout
        as_json = store(*words, "--json").stdout

        for shown in (fields, in_line, as_json):
            assert shown.replace("\n", "").replace("\t", "").isprintable()
        (body,) = [line for line in fields.splitlines() if line.startswith("body ")]
        assert body == "body (text)    \\x1b[2J\\x9b[red]\\u202e"
        assert fields.endswith("\nnext\tline\n")
        assert in_line.count("\n") == 1
        assert json.loads(as_json)["tags"] == evil
        assert f"{evil}\nnext" in store(*words, "--raw").stdout

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (("--offset", "1"), "position 1: it is inside the record that begins at 0"),
            (("--offset", "99999999"), "the last segment ends at"),
            (("--id", "nobody"), "no message nobody: it is no offset id"),
            (
                ("--id", "7F00000100002A9F" + "0" * 15 + "1"),
                "it means log position 1: it is inside the record",
            ),
            (("--key", "nobody"), "no message of any topic has the key nobody (by the index; --scan"),
            (("--key", "nobody", "--scan"), "no message of any topic has the key nobody\n"),
            (("--key", "k7", "-t", "Nothing"), "topic Nothing does not exist"),
            (("-t", "T", "-q", "9"), "queue T/9 does not exist: topic T has 0, 1, 2"),
            (("-t", "Nothing", "-q", "9"), "queue Nothing/9 does not exist: topic Nothing has none"),
            (("-t", "T", "-q", "0", "--from", "134"), "queue T/0 ends at offset 134"),
            (("--from", "99999999"), "no messages in this range"),
        ],
    )
    def test_nothing_found_ends_with_1_and_says_why(
        self, store: Run, sound: Path, words: tuple[str, ...], problem: str
    ) -> None:
        done = store("dump", str(sound), *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert problem in done.stderr

    def test_by_position_id_and_key_of_apaches_store(self, store: Run, tmp_path: Path) -> None:
        extract_golden(tmp_path / "golden")
        words = ("dump", str(tmp_path / "golden"), "--json")
        every = [json.loads(line) for line in store(*words, "--limit", "1000").stdout.splitlines()]
        assert len(every) == 204
        for message in every[::40]:
            topic, queue, at = message["topic"], str(message["queue_id"]), str(message["queue_offset"])
            for option in (
                ("--offset", str(message["physical_offset"])),
                ("--id", message["offset_msg_id"]),
                ("-t", topic, "-q", queue, "--from", at, "--limit", "1"),
            ):
                assert json.loads(store(*words, *option).stdout) == message
            for key in message["keys"]:
                found = store(*words, "--key", key, "-t", topic).stdout.splitlines()
                assert message in [json.loads(line) for line in found]


@pytest.mark.parametrize(
    "words",
    [
        ("verify",),
        ("verify", "/no/such/directory"),
        ("verify", "DIR", "--what"),
        ("dump", "DIR", "--offset", "1", "--key", "k"),
        ("dump", "DIR", "--topic", "T"),
        ("dump", "DIR", "--queue", "1"),
        ("dump", "DIR", "--limit", "0"),
        ("nothing",),
    ],
)
def test_usage_errors_end_with_2(store: Run, sound: Path, words: tuple[str, ...]) -> None:
    done = store(*(str(sound) if word == "DIR" else word for word in words))
    assert done.returncode == 2
    assert done.stdout == ""


def test_a_directory_without_a_store_ends_with_1(store: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("verify", "dump", "rebuild", "stats"):
        done = store(command, str(tmp_path / "empty"))
        assert done.returncode == 1
        assert "the store has no commitlog directory" in done.stderr
        assert list((tmp_path / "empty").iterdir()) == []


def test_the_directory_of_a_standalone_cluster_names_its_stores(store: Run, root: Path) -> None:
    done = store("verify", str(root.parent))
    assert done.returncode == 1
    assert f"the store has no commitlog directory; stores in it: {root.name}" in done.stderr


def test_names_that_are_no_utf8_are_shown_in_json_too(store: Run, root: Path) -> None:
    os.mkdir(os.fsencode(root / "commitlog") + b"/\xff")
    result = store("verify", "--json", str(root))
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["findings"][0]["path"] == rf"{root}/commitlog/\udcff"


def test_a_log_over_several_directories(store: Run, root: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    for number, path in enumerate(sorted((root / "commitlog").iterdir())):
        path.rename((first, second)[number % 2] / path.name)
    (root / "commitlog").rmdir()
    (root / "broker.conf").write_text(f"storePathCommitLog={first},{second}\n")
    assert "400 records" in store("verify", str(root)).stdout
    assert json.loads(store("stats", str(root), "--json").stdout)["messages"] == 400
    assert len(store("dump", str(root), "--limit", "999").stdout.splitlines()) == 400
    assert json.loads(store("rebuild", str(root), "--json").stdout)["records"] == 400
    second.rename(tmp_path / "elsewhere")
    for command in ("verify", "dump", "stats", "rebuild"):
        done = store(command, str(root))
        assert (done.returncode, done.stdout) == (1, "")
        assert f"the configured log directory {second} does not exist" in done.stderr


def test_stats(store: Run, sound: Path) -> None:
    done = store("stats", str(sound))
    assert done.returncode == 0
    assert "400 messages" in done.stdout
    assert "retention: 72 h" in done.stdout
    by_queue = store("stats", "--queues", str(sound)).stdout
    assert [line.split()[:4] for line in by_queue.splitlines()[1:4]] == [
        ["T", "0", "0-134", "134"],
        ["T", "1", "0-133", "133"],
        ["T", "2", "0-133", "133"],
    ]
    value = json.loads(store("stats", "--json", str(sound)).stdout)
    assert (value["messages"], len(value["queues"]), value["outlook"]["file_reserved_hours"]) == (400, 3, 72)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("verify",), b"verifying"),
        (("dump", "--key", "k7", "--scan"), b"searching"),
        (("stats",), b"counting"),
        (("rebuild",), b"rebuilding"),
    ],
)
def test_a_terminal_sees_a_progress_bar(root: Path, words: tuple[str, ...], shown: bytes) -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [str(BIN / "cometmq"), "store", words[0], str(root), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                data = os.read(leader, 4096)
            except OSError:  # reading fails once the pseudo-terminal has no writer
                break
            if not data:
                break
            seen += data
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(leader)
    assert process.returncode == 0
    assert shown in seen
    assert b"100" in seen or b"/" in seen
    assert shown not in out


@pytest.mark.slow("verifies a store while a broker is under load")
def test_beside_a_broker_under_load(run: Run, tmp_path: Path) -> None:
    with StandaloneProcess(tmp_path) as cluster:
        stop = threading.Event()
        sent: list[str] = []
        failures: list[BaseException] = []

        def load() -> None:
            try:
                with SyncProducer("load", namesrv=cluster.namesrv) as producer:
                    while not stop.wait(0.001):
                        message = Message("Load", bytes(700), tags="t", keys=(f"k{len(sent)}",))
                        sent.append(producer.send(message).msg_id)
            except BaseException as failure:
                failures.append(failure)

        sender = threading.Thread(target=load)
        sender.start()
        directory = str(tmp_path / "broker-a")
        try:
            for _ in range(2):
                done = run("cometmq", "store", "verify", "--json", directory)
                report = json.loads(done.stdout)
                assert (report["findings"], report["live"], done.returncode) == ([], True, 0)
            assert report["records"] > 50
            number = len(sent) - 1
            shown = run(
                "cometmq", "store", "dump", directory, "--key", f"k{number}", "--topic", "Load", "--json"
            )
            assert json.loads(shown.stdout)["msg_id"] == sent[number]
            assert run("cometmq", "store", "stats", directory).returncode == 0
            refused = run("cometmq", "store", "rebuild", directory)
            assert refused.returncode == 1
            assert "a broker is using this store" in refused.stderr
        finally:
            stop.set()
            sender.join()
        assert failures == []
    after = json.loads(run("cometmq", "store", "verify", "--json", directory).stdout)
    assert (after["findings"], after["live"], after["clean"]) == ([], False, True)
    assert after["units"] == len(sent)


def test_reading_commands_change_nothing(store: Run, root: Path) -> None:
    before = snapshot(root)
    for command in ("verify", "dump", "stats"):
        assert store(command, str(root)).returncode == 0
    assert snapshot(root) == before


def test_a_broker_in_the_same_process_keeps_its_lock(tmp_path: Path, run: Run) -> None:
    """A process loses a POSIX lock when it closes any descriptor of the file."""
    from cometmq.store.inspect.verify import verify

    with local_broker(tmp_path) as broker:
        directory = str(broker.data_dir / broker.broker_name)
        assert verify(directory).live
        assert json.loads(run("cometmq", "store", "verify", "--json", directory).stdout)["live"]


class TestTruncate:
    def test_a_dry_run_names_what_would_go(self, store: Run, root: Path) -> None:
        before, hit = snapshot(root), places(root)[390]
        done = store("truncate", str(root), "--to", str(hit.position), "--dry-run")
        assert done.returncode == 0
        assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["T/0", "T/1", "T/2", str(root)]
        assert "10 records (" in done.stdout
        assert "would be removed; the log ends at" in done.stdout
        assert snapshot(root) == {**before, "lock": b"lock"}

    def test_what_is_cut_is_gone(self, store: Run, root: Path) -> None:
        hit = places(root)[200]
        done = store("truncate", str(root), "--to", str(hit.position), "--json")
        report = json.loads(done.stdout)
        assert (done.returncode, report["records"], report["done"]) == (0, 200, True)
        assert sum(queue["messages"] for queue in report["queues"]) == 200
        assert "0 errors, 0 warnings" in store("verify", str(root)).stdout
        again = store("truncate", str(root), "--to", str(hit.position))
        assert "0 records (0 bytes of the log) removed" in again.stdout

    def test_between_records_it_names_the_nearest_ends(self, store: Run, root: Path) -> None:
        hit = places(root)[200]
        done = store("truncate", str(root), "--to", str(hit.position + 1))
        assert done.returncode == 1
        assert f"the nearest ends are {hit.position} or {hit.position + hit.size}" in done.stderr

    def test_beside_a_broker_it_refuses(self, store: Run, tmp_path: Path) -> None:
        open_store(tmp_path)
        done = store("truncate", str(tmp_path), "--to", "0")
        assert (done.returncode, "a broker is using this store; stop it first" in done.stderr) == (1, True)


# -- Tables of a store with names that do not belong to CometMQ


NAME = "[red]:smile:\x1b[2J"


def blank(kind: type[msgspec.Struct], **given: object) -> dict[str, object]:
    """Return the fields of a struct with the given values and empty values otherwise."""
    empty = {int: -1, float: 0.0, str: "", bool: False}
    fields = msgspec.structs.fields(kind)
    return {field.name: given.get(field.name, empty.get(field.type)) for field in fields}


@pytest.mark.parametrize("by_queue", [False, True])
def test_a_topics_name_is_neither_markup_nor_an_escape(
    capsys: pytest.CaptureFixture[str], by_queue: bool
) -> None:
    outlook = Outlook(**blank(Outlook))
    topics = [TopicStats(**blank(TopicStats, topic=NAME))]
    queues = [QueueStats(**blank(QueueStats, topic=NAME))]
    print_stats(
        StoreStats(**blank(StoreStats, topics=topics, queues=queues, outlook=outlook)), by_queue=by_queue
    )

    shown = capsys.readouterr().out
    assert "[red]:smile:\\x1b[2J" in shown
    assert "\x1b" not in shown


class TestRestore:
    CONF = "brokerName=b\nmappedFileSizeCommitLog=65536\nmaxHashSlotNum=100\nmaxIndexNum=400\n"

    def test_a_directory_is_restored_from_the_objects_of_a_broker(self, store: Run, tmp_path: Path) -> None:
        conf = tmp_path / "b.conf"
        conf.write_text(f"{self.CONF}tieredStoreUri=file://{tmp_path}/objects\n")
        objects = object_store_of(BrokerConfig.from_properties(read_properties_file(str(conf))))
        first = open_store(tmp_path / "first", objects=objects)
        fill(first, 3)
        upload(first)
        first.crash()

        def run(*options: str) -> subprocess.CompletedProcess[str]:
            return store("restore", str(tmp_path / "second"), "-c", str(conf), *options)

        dry = run("--dry-run")
        assert "the log from position 0 to 131072 would be restored from store" in dry.stdout
        assert not (tmp_path / "second").exists()
        report = json.loads(run("--json").stdout)
        assert (report["end"], report["segments"], report["done"]) == (131072, 2, True)
        assert report["messages"] > 40
        again = run()
        assert (again.returncode, "the directory is not empty" in again.stderr) == (1, True)
        shutil.rmtree(tmp_path / "second")
        done = run("--id", report["store_id"])
        assert f"{report['messages']} messages in 2 queues" in done.stdout
        assert "lost: the log from position 131072 on" in done.stdout
        assert "0 errors, 0 warnings" in store("verify", str(tmp_path / "second"), "-c", str(conf)).stdout

    def test_a_configuration_without_an_object_store_is_refused(self, store: Run, tmp_path: Path) -> None:
        (tmp_path / "broker.conf").write_text(self.CONF)
        done = store("restore", str(tmp_path))
        assert (done.returncode, "tieredStoreUri" in done.stderr) == (1, True)
