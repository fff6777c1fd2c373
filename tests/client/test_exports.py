"""What `import cometmq` offers."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cometmq
import cometmq.client


@pytest.mark.parametrize("name", cometmq.__all__)
def test_every_public_name_can_be_had(name: str) -> None:
    assert getattr(cometmq, name).__name__ == name
    assert name in dir(cometmq)


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
            cometmq.ClientInstance,
            cometmq.Admin,
        ),
        *(cometmq.SyncProducer, cometmq.SyncPushConsumer, cometmq.SyncPullConsumer),
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
