"""Names that `import cometmq` exports."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cometmq
import cometmq.client
import cometmq.errors
import cometmq.message
from cometmq.testing import LocalBroker


@pytest.mark.parametrize("name", cometmq.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(cometmq, name).__name__ == name
    assert name in dir(cometmq)


def test_type_checkers_find_every_public_name() -> None:
    """To type checkers, the package imports all names of these modules; others would have the type Any."""
    modules = (cometmq.client, cometmq.errors, cometmq.message)
    assert set(cometmq.__all__) - {"Admin"} <= {name for module in modules for name in module.__all__}


CLIENT_PAGE = Path(__file__).parents[2] / "docs/client.md"


def test_every_error_of_the_clients_page_is_there_with_its_attributes() -> None:
    section = CLIENT_PAGE.read_text("utf-8").partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\w+) \| .* \| ([\w, ]+) \|$", section, re.MULTILINE)
    errors = {name: attributes.split(", ") for name, attributes in rows if name != "error"}
    assert {"ClientStateError", "ConfigError", "BodyTooLarge"} <= errors.keys()
    for name, attributes in errors.items():
        taken = set(inspect.signature(getattr(cometmq, name)).parameters) | {"code"}
        assert set(attributes) <= taken, name


@pytest.mark.parametrize(
    "kind",
    [
        *(
            cometmq.Producer,
            cometmq.PushConsumer,
            cometmq.PullConsumer,
            cometmq.SimpleConsumer,
            cometmq.LiteConsumer,
            cometmq.ClientInstance,
            cometmq.Admin,
        ),
        *(
            cometmq.SyncProducer,
            cometmq.SyncPushConsumer,
            cometmq.SyncPullConsumer,
            cometmq.SyncSimpleConsumer,
            cometmq.SyncLiteConsumer,
        ),
        *(cometmq.client.BrokerApi, cometmq.client.NamesrvApi),
    ],
)
def test_every_public_method_says_what_it_does(kind: type) -> None:
    public = {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}
    silent = [
        name
        for name, member in public.items()
        if (inspect.isfunction(member) or isinstance(member, property)) and not inspect.getdoc(member)
    ]
    assert silent == []


def test_everything_the_client_exports_exists() -> None:
    assert [name for name in cometmq.client.__all__ if not hasattr(cometmq.client, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = cometmq.nonsense  # type: ignore[attr-defined]


def test_importing_the_package_loads_no_client_yet() -> None:
    heavy = ("cometmq.client", "cometmq.admin", "numpy")
    code = f"import sys, cometmq; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"


# -- The client without the packages that only make it faster, or that only servers need


ABSENT = ("uvloop", "numpy", "isal", "lark", "click", "rich", "zstandard", "lz4", "redis", "opentelemetry")
PROGRAM = """
import asyncio, sys
for name in {absent}:
    sys.modules[name] = None  # importing it raises ImportError
from cometmq import *

async def main(namesrv):
    async with Producer("p", namesrv=namesrv) as producer:
        await producer.send(Message("Bare", b"plain"))
        await producer.send(Message("Bare", b"x" * 5000))
    options = PushOptions(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with MessageStream("g-bare", "Bare", namesrv=namesrv, options=options) as stream:
        for _ in range(2):
            message = await anext(stream)
            await stream.ack(message)
            print(len(message.body))
    print(type(asyncio.get_running_loop()).__module__)

asyncio.run(main({namesrv!r}))
with SyncProducer("p", namesrv={namesrv!r}) as producer:
    print(producer.send(Message("Bare", b"blocking")).status.name)
"""


def test_the_client_works_without_what_it_can_do_without(local: LocalBroker) -> None:
    program = PROGRAM.format(absent=ABSENT, namesrv=local.namesrv)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split()
    assert sorted(lines[:2]) == ["5", "5000"]
    assert lines[2:] == ["asyncio.unix_events", "SEND_OK"]


def test_a_name_that_needs_an_extra_says_which(local: LocalBroker) -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from cometmq import *
try:
    Telemetry()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "pip install 'cometmq[otel]'" in done.stdout, done.stderr
