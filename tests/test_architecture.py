"""The architecture as a test: allowed imports, code free of I/O, and limits on the size of code.

The rooms are the first-level packages and modules of `cometmq`. Everything is read from the syntax trees of
the sources; nothing is imported, so a forbidden import is reported even where it would not run.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.import_circles import among, circles
from tests.tested_by import TESTED_BY, found, wanted

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PACKAGE = SRC / "cometmq"

MODULE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
FOLDER_MODULES_MAX = 18

# Rooms that every room may import, including each other.
COMMON = {
    "message",
    "errors",
    "protocol",
    "text",
    "logs",
    "settings",
    "periodic",
    "private",
    "clock",
    "yaml_file",
    "command_options",
    "contexts",
}

# The rooms that each room may import, beside COMMON; "*" is any.
ALLOWED: dict[str, set[str]] = {
    "message": set(),
    "errors": set(),
    "text": set(),
    "logs": set(),
    "settings": set(),
    "periodic": set(),
    "private": set(),
    "clock": set(),
    "yaml_file": set(),
    "command_options": set(),
    "contexts": set(),
    "protocol": set(),
    "remoting": set(),
    "store": set(),
    "raft": set(),
    "metrics": set(),
    "namesrv": {"remoting", "metrics"},
    "broker": {"store", "remoting", "raft", "metrics"},
    "filtersrv": {"remoting"},
    "grpc": {"broker", "remoting", "metrics"},
    "client": {"remoting"},
    "admin": {"client"},
    "integrations": {"client", "admin"},
    "console": {"client", "admin"},
    "pipeline": {"client", "admin", "store"},
    "broker_process": {"broker", "grpc", "remoting", "store"},
    "standalone": {"*"},
    "testing": {"*"},
    "cli": {"*"},
    "__main__": {"cli"},
    # `import cometmq` provides the client and Admin, and must not import a server.
    "__init__": {"client", "admin"},
}

# The sub-rooms of each room, lowest first: each may import the ones before it. Modules directly in the room
# may import all of them.
SUB_ROOMS: dict[str, tuple[str, ...]] = {
    "store": (
        *("base", "log", "derived", "tables", "writing", "reading"),
        *("recovery", "raft_log", "tiered", "background", "inspect"),
    ),
    "broker": (
        *("base", "access", "rates", "tables", "filters", "groups", "send", "pull", "pop", "lite"),
        *("timers", "transactions", "replication"),
        "admin",
    ),
    "client": ("cluster", "producer", "group", "simple", "consumer", "pull", "idempotency"),
    "pipeline": ("base", "live", "stored", "table", "sink", "jobs"),
    "console": ("base", "auth", "widgets", "messages", "pages"),
    "grpc": ("http2", "http1", "rpc", "listener", "service", "gateway"),
}

# Rooms that others import only through the package itself, and the exceptions: room -> sub-room it may
# import.
FRONT_DOORS: dict[str, dict[str, str]] = {
    "store": {"cli": "inspect", "pipeline": "inspect", "broker": "raft_log"}
}

# Parts that still receive the whole object that they belong to.
NOT_YET_APART = ()

# These modules make decisions as functions of (now, event), so they must not access the outside world.
SANS_IO_PACKAGES = ("protocol", "raft", "grpc/http2", "grpc/http1", "grpc/rpc")
SANS_IO_MODULES = (
    "message.py",
    "errors.py",
    "broker/access/accounts.py",
    "broker/access/addresses.py",
    "broker/access/decision.py",
    "broker/access/rights.py",
    "broker/base/pressure.py",
    "metrics/families.py",
    "namesrv/tables.py",
    "broker/lite/subscriptions.py",
    "broker/pop/leases.py",
    "broker/replication/ha_master.py",
    "broker/replication/ha_slave.py",
    "broker/send/stored_form.py",
    "broker/transactions/half.py",
    "broker/transactions/ledger.py",
    "client/group/allocate.py",
    "client/consumer/orderly_queue.py",
    "client/group/process_queue.py",
    "client/producer/selectors.py",
)
WORLD = {
    *("asyncio", "socket", "selectors", "ssl", "threading", "multiprocessing", "concurrent", "subprocess"),
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "fcntl", "signal", "uvloop"),
    *("time", "datetime", "random", "secrets", "uuid"),
}
WORLD_CALLS = {"open", "input", "print"}
IN_MEMORY = {"io.BytesIO"}

# The store accesses files only through its Disk and time only through its Clock, so that tests can replace
# both.
STORE_SEAMS = ("store/base/disk.py", "store/base/clock.py", "store/log/sync_child.py")
BESIDE_THE_SEAMS = {"shutil", "io", "pathlib", "tempfile", "glob", "mmap", "fcntl", "random"}
HARMLESS = {
    "os": {"path", "strerror", "sysconf"},
    "os.path": {"abspath", "basename", "dirname", "expanduser", "join", "realpath"},
    "time": {"localtime", "strftime", "sleep"},
}

# Heavy or optional packages, and the only modules that may import them.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "pyspark": ("pipeline/", "cli/pipeline/", "../pyspark_cometmq"),
    "pyarrow": (
        "pipeline/",
        "../pyspark_cometmq",
        "protocol/record/arrow.py",
        "protocol/properties/columns.py",
    ),
    "obstore": ("pipeline/table/objects.py", "broker/object_store.py"),
    "click": ("cli/", "cli.py", "admin/", "command_options.py"),
    "cryptography": ("grpc/listener/self_signed.py",),
    "deltalake": ("pipeline/table/delta.py",),
    "fastavro": ("pipeline/table/body_avro.py",),
    "h11": ("grpc/http1/connection.py",),
    "google": ("pipeline/table/body_protobuf.py", "grpc/rpc/messages.py"),
    "faststream": ("integrations/faststream/",),
    "fast_depends": ("integrations/faststream/",),
    **{name: (f"integrations/{name}.py",) for name in ("dramatiq", "kombu", "mcp", "taskiq")},
    "lark": ("protocol/sql/grammar.py",),
    "opentelemetry": ("client/cluster/telemetry.py", "metrics/otlp.py", "integrations/faststream/"),
    "pyiceberg": ("pipeline/table/iceberg.py",),
    "rich": ("cli/", "cli.py", "admin/"),
    "pytest": ("testing/",),
    "docker": ("testing/containers.py",),
    "testcontainers": ("testing/containers.py",),
    "matplotlib": ("pipeline/base/report.py",),
    "argon2": ("console/auth/accounts.py",),
    "fastapi": ("console/app.py",),
    "nicegui": ("console/",),
    "starlette": ("console/",),
    "uvicorn": ("console/app.py", "console/auth/connections.py", "cli/mcp.py"),
    "redis": ("client/idempotency/redis_marks.py",),
    "yaml": ("yaml_file.py",),
    "prometheus_client": ("pipeline/metrics.py", "metrics/port.py", "integrations/faststream/"),
}


# The client and its dependencies also run on Windows: names that exist only on Unix, by module; "" for
# methods of event loops.
PORTABLE = ("client/", "protocol/", "remoting/", *(f"{room}.py" for room in COMMON - {"protocol"}))
SERVERS_ONLY = ("remoting/loop.py", "remoting/server.py")
UNIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
UNIX_NAMES: dict[str, set[str]] = {
    "os": {
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "chown", "fchmod", "fchown", "fdatasync"),
        *("fork", "forkpty"),
        *("geteuid", "getgid", "getpgid", "getuid", "killpg", "lockf", "mkfifo", "nice", "posix_fadvise"),
        *("posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "register_at_fork"),
        *("sched_getaffinity", "sendfile", "setgid", "setsid", "setuid", "statvfs", "uname"),
        *("wait", "waitpid"),
    },
    "signal": {
        *("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGUSR1", "SIGUSR2"),
        *("alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer", "sigtimedwait", "sigwait"),
    },
    "socket": {"AF_UNIX", "SCM_RIGHTS", "SO_REUSEPORT", "recv_fds", "send_fds"},
    "": {"add_signal_handler", "connect_read_pipe", "connect_write_pipe", "create_unix_connection"},
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py")) + short_names()


def short_names() -> list[Path]:
    """Return the modules by which Spark finds CometMQ's formats."""
    return sorted(SRC.glob("pyspark_*/**/*.py"))


def name_of(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).as_posix()
    return "../" + path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import, including those in functions and TYPE_CHECKING.

    `from a import b` yields "a.b", because b may be a module; callers compare prefixes.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def package_of(path: Path) -> str:
    """Return the dotted package against which the relative imports of a file are resolved."""
    return ".".join(path.relative_to(SRC).parent.parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return what `ast.walk` yields. Several tests need it, and it takes longer than parsing."""
    return tuple(ast.walk(tree))


def teardown_module() -> None:
    """Free the millions of nodes, which each later garbage collection of this process would examine."""
    parse.cache_clear()
    nodes_of.cache_clear()


def forbidden_room_imports(path: Path, tree: ast.AST) -> Iterator[str]:
    room = room_of(path)
    allowed = ALLOWED[room]
    for line, module in imported_modules(tree, package_of(path)):
        parts = module.split(".")
        if parts[0] != "cometmq" or "*" in allowed or module == "cometmq.__version__":
            continue
        # `from cometmq import Producer` imports from the facade, which only users of the client may do.
        target = parts[1] if len(parts) > 1 else "__init__"
        if target not in ALLOWED:
            target = "__init__"
        if target == room or target in COMMON or target in allowed:
            continue
        yield f"{name_of(path)}:{line} imports {module}: {room} may not use {target}"


def forbidden_sub_room_imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield a module's imports from a higher sub-room of its own room, or from the room's top level."""
    room, *inside = path.relative_to(PACKAGE).parts
    order = SUB_ROOMS.get(room)
    if order is None or len(inside) < 2:
        return
    for line, module in imported_modules(tree, package_of(path)):
        parts = module.split(".")
        if parts[:2] != ["cometmq", room] or module.startswith(NOT_YET_APART):
            continue
        target = parts[2] if len(parts) > 2 else ""
        if target not in order or order.index(target) > order.index(inside[0]):
            yield f"{name_of(path)}:{line} imports {module}"


def imports_past_the_front_door(path: Path, tree: ast.AST) -> Iterator[str]:
    """Yield a module's imports from inside a room of which it may import only the package itself."""
    room = room_of(path)
    for line, module in imported_modules(tree, package_of(path)):
        _, *inside = module.split(".")
        target = inside[0] if inside else ""
        if target == room or target not in FRONT_DOORS or len(inside) == 1:
            continue
        if inside[1] == FRONT_DOORS[target].get(room):
            wrong = len(inside) > 3
        else:
            inner = PACKAGE / target / inside[1]
            wrong = len(inside) > 2 or inner.is_dir() or inner.with_suffix(".py").exists()
        if wrong:
            yield f"{name_of(path)}:{line} imports {module}"


def world_uses(path: Path, tree: ast.AST) -> Iterator[str]:
    for line, module in imported_modules(tree, package_of(path)):
        if module.split(".")[0] in WORLD and module not in IN_MEMORY:
            yield f"{name_of(path)}:{line} imports {module}"
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WORLD_CALLS:
            yield f"{name_of(path)}:{node.lineno} calls {node.func.id}()"


def beside_the_seams(path: Path, tree: ast.AST) -> Iterator[str]:
    for line, module in imported_modules(tree, package_of(path)):
        if module.split(".")[0] in BESIDE_THE_SEAMS or module.startswith(("os.", "time.")):
            yield f"{name_of(path)}:{line} imports {module}"
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            yield f"{name_of(path)}:{node.lineno} calls open()"
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr not in HARMLESS.get(owner, {node.attr}):
                yield f"{name_of(path)}:{node.lineno} uses {owner}.{node.attr}"


def unix_only(path: Path, tree: ast.AST) -> Iterator[str]:
    beside_windows = {
        line
        for node in nodes_of(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "sys.platform == 'win32'"
        for each in node.orelse
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }
    for line, module in imported_modules(tree, package_of(path)):
        owner, _, name = module.partition(".")
        if line in beside_windows:
            continue
        if owner in UNIX_MODULES or name in UNIX_NAMES.get(owner, ()):
            yield f"{name_of(path)}:{line} imports {module}"
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in UNIX_NAMES[""] or (owner and node.attr in UNIX_NAMES.get(owner, ())):
                yield f"{name_of(path)}:{node.lineno} uses {owner}.{node.attr}"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle() -> None:
    imported = {
        module_of(path): {dotted for _, dotted in imported_modules(parse(path), package_of(path))}
        for path in sources()
    }

    assert circles(among(imported)) == []


def test_every_room_is_in_the_plan() -> None:
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")}

    assert rooms - ALLOWED.keys() == set()


@pytest.mark.parametrize(
    "rule", [forbidden_room_imports, forbidden_sub_room_imports, imports_past_the_front_door]
)
def test_imports_follow_the_plan(rule: Callable[[Path, ast.AST], Iterator[str]]) -> None:
    assert [found for path in PACKAGE.rglob("*.py") for found in rule(path, parse(path))] == []


def test_every_sub_room_has_its_place_in_the_order() -> None:
    found = {
        room: {path.parent.name for path in (PACKAGE / room).glob("*/__init__.py")} for room in SUB_ROOMS
    }

    assert found == {room: set(order) for room, order in SUB_ROOMS.items()}


def test_spark_short_name_modules_import_only_the_pipeline() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in short_names()
        for line, module in imported_modules(parse(path), package_of(path))
        if module.startswith("cometmq.") and not module.startswith(("cometmq.pipeline", "cometmq.errors"))
    ]

    assert wrong == []


def test_protocol_and_decision_cores_touch_no_clock_socket_or_file() -> None:
    missing = [name for name in SANS_IO_MODULES if not (PACKAGE / name).exists()]
    cores = [PACKAGE / name for name in SANS_IO_MODULES]
    for package in SANS_IO_PACKAGES:
        cores += sorted((PACKAGE / package).rglob("*.py"))

    assert missing == []
    assert [found for path in cores for found in world_uses(path, parse(path))] == []


def test_the_store_reaches_files_and_time_through_its_seams_only() -> None:
    paths = [path for path in sorted((PACKAGE / "store").rglob("*.py")) if name_of(path) not in STORE_SEAMS]

    assert len(paths) > 30
    assert [found for path in paths for found in beside_the_seams(path, parse(path))] == []


def test_the_client_uses_nothing_that_only_unix_has() -> None:
    paths = [path for path in sources() if name_of(path).startswith(PORTABLE)]

    assert len(paths) > 100
    assert [
        found for path in paths if name_of(path) not in SERVERS_ONLY for found in unix_only(path, parse(path))
    ] == []


def test_heavy_and_optional_packages_stay_in_their_rooms() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in sources()
        for line, module in imported_modules(parse(path), package_of(path))
        if (homes := ONLY_IN.get(module.split(".")[0])) and not name_of(path).startswith(homes)
    ]

    assert wrong == []


def test_every_logger_makes_its_lines_harmless() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in nodes_of(parse(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) == "logging.getLogger"
        and name_of(path) != "logs.py"
    ]

    assert wrong == []


def test_every_module_has_its_tests_by_name_or_in_the_table() -> None:
    """If this fails, run `python -m tests.tested_by`."""
    right = wanted()
    add = [f'"{module}": "{right[module]}",' for module in right if TESTED_BY.get(module) != right[module]]
    remove = [f'"{module}": "{test}",' for module, test in TESTED_BY.items() if right.get(module) != test]

    assert not add, "\n".join(["to add to tests/tested_by.py:", *add])
    assert not remove, "\n".join(["to remove from tests/tested_by.py:", *remove])
    assert [test for test in TESTED_BY.values() if len(found(test)) != 1] == []


def docstring_lines(node: ast.AST) -> int:
    """Return the number of lines of a node's own docstring, which do not count as code."""
    body = getattr(node, "body", [])
    first = body[0] if isinstance(body, list) and body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def test_modules_fit_on_a_few_screens() -> None:
    lines = {
        path.relative_to(ROOT).as_posix(): count - sum(map(docstring_lines, nodes_of(parse(path))))
        for base in ("src", "tests", "examples", "benchmarks")
        for path in (ROOT / base).rglob("*.py")
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MODULE_LINES_MAX
    }
    assert {name: count for name, count in lines.items() if count > MODULE_LINES_MAX} == {}


def test_folders_hold_a_few_modules() -> None:
    counts = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    large = {folder for folder, count in counts.items() if count > FOLDER_MODULES_MAX}

    assert {folder.relative_to(PACKAGE).as_posix() for folder in large} == set()


def test_functions_fit_on_one_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for base in ("src", "examples")
        for path in (ROOT / base).rglob("*.py")
        for node in nodes_of(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node))
        > FUNCTION_LINES_MAX
    ]

    assert long == []


class TestTheChecksThemselves:
    """Each rule must be able to fail: it reports a source that breaks it."""

    def check(self, room_file: str, source: str) -> list[str]:
        return list(forbidden_room_imports(PACKAGE / room_file, ast.parse(source)))

    @pytest.mark.parametrize(
        ("room_file", "source"),
        [
            ("admin/groups.py", "from cometmq.store import message_store"),
            ("pipeline/jobs/archive.py", "import cometmq.broker.server"),
            ("store/base/disk.py", "from cometmq import remoting"),
            ("protocol/frame.py", "from cometmq.client import BrokerApi"),
            ("client/producer/producer.py", "def f():\n    from cometmq.broker import server"),
            ("remoting/server.py", "from ..broker import server"),
            ("store/base/disk.py", "from cometmq import Producer"),
        ],
    )
    def test_a_forbidden_import_is_found(self, room_file: str, source: str) -> None:
        assert len(self.check(room_file, source)) == 1

    @pytest.mark.parametrize(
        ("room_file", "source", "wrong"),
        [
            ("store/log/flush.py", "from cometmq.store.base import disk", 0),
            ("store/log/flush.py", "from cometmq.store.log.recent import RecentBytes", 0),
            ("store/log/flush.py", "from cometmq.store.writing.appender import Appender", 1),
            ("store/log/flush.py", "from cometmq.store.message_store import MessageStore", 1),
            ("store/log/flush.py", "from cometmq.store import MessageStore", 1),
            ("store/message_store.py", "from cometmq.store.background.retention import Retention", 0),
        ],
    )
    def test_a_step_back_between_sub_rooms_is_found(self, room_file: str, source: str, wrong: int) -> None:
        assert len(list(forbidden_sub_room_imports(PACKAGE / room_file, ast.parse(source)))) == wrong

    @pytest.mark.parametrize(
        ("room_file", "source", "wrong"),
        [
            ("broker/send/send.py", "from cometmq.store import MessageStore", 0),
            ("broker/send/send.py", "from cometmq.store import message_store", 1),
            ("broker/send/send.py", "from cometmq.store import inspect", 1),
            ("broker/send/send.py", "from cometmq.store.base.disk import Disk", 1),
            ("broker/send/send.py", "def f():\n    import cometmq.store.base", 1),
            ("cli/store.py", "from cometmq.store.inspect import verify", 0),
            ("cli/store.py", "from cometmq.store.inspect.verify import verify", 1),
            ("standalone.py", "from cometmq.store.inspect import verify", 1),
            ("pipeline/jobs/rebuild.py", "from cometmq.store.inspect import verify", 0),
            ("pipeline/jobs/archive.py", "from cometmq.store.base.disk import Disk", 1),
            ("store/base/files.py", "from cometmq.store.base.disk import Disk", 0),
        ],
    )
    def test_a_way_past_the_front_door_is_found(self, room_file: str, source: str, wrong: int) -> None:
        assert len(list(imports_past_the_front_door(PACKAGE / room_file, ast.parse(source)))) == wrong

    def test_circles_of_any_length_are_found_once(self) -> None:
        imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"a"}}

        assert circles(imports) == [["a", "b", "c"], ["d", "e"]]

    @pytest.mark.parametrize(
        ("room_file", "source"),
        [
            ("broker/send/send.py", "from cometmq.store import MessageStore"),
            ("store/base/disk.py", "from cometmq.protocol import record"),
            ("store/base/disk.py", "from . import clock"),
            ("client/producer/producer.py", "from cometmq.message import Message"),
            ("testing/cluster.py", "from cometmq.broker import server"),
        ],
    )
    def test_an_allowed_import_passes(self, room_file: str, source: str) -> None:
        assert self.check(room_file, source) == []

    @pytest.mark.parametrize(
        ("source", "wrong"),
        [
            ("import fcntl", 1),
            ("from os import fork", 1),
            ("import os\nos.O_NOFOLLOW", 1),
            ("import signal\nsignal.SIGKILL", 1),
            ("loop.add_signal_handler(15, stop)", 1),
            ("if sys.platform == 'win32':\n  import msvcrt\nelse:\n  import fcntl", 0),
            ("if sys.platform != 'win32':\n  import msvcrt\nelse:\n  import fcntl", 1),
            ("import os, signal\ngetattr(os, 'O_NOFOLLOW', 0)\nsignal.SIGTERM\nself.wait()", 0),
        ],
    )
    def test_what_only_unix_has_is_found(self, source: str, wrong: int) -> None:
        assert len(list(unix_only(PACKAGE / "client/signals.py", ast.parse(source)))) == wrong

    @pytest.mark.parametrize(
        "source", ["import time", "from os import path", "open('x')", "def f():\n  import socket"]
    )
    def test_a_core_that_reaches_for_the_world_is_found(self, source: str) -> None:
        assert len(list(world_uses(PACKAGE / "protocol/frame.py", ast.parse(source)))) == 1

    @pytest.mark.parametrize(
        "source",
        [
            "import shutil", "from os import unlink", "from time import monotonic", "open('x')",
            "import os\nos.unlink('x')", "import os\nos.path.exists('x')", "import time\ntime.time()",
            "import time\nNOW = time.time_ns",
        ],
    )  # fmt: skip
    def test_a_way_around_the_seams_is_found(self, source: str) -> None:
        assert len(list(beside_the_seams(PACKAGE / "store/log/commit_log.py", ast.parse(source)))) == 1

    def test_names_that_only_look_like_it_pass(self) -> None:
        source = "import os\nos.path.join(path.stem, self.time.now, disk.open(x), time.strftime('x'))"
        source = source.replace("path.stem", "file.path.stem")
        assert list(beside_the_seams(PACKAGE / "store/log/commit_log.py", ast.parse(source))) == []
