"""The units, manifests and container files in conf/ match docs/deploy.md and refer to existing things."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from packaging.requirements import Requirement

from cometmq.broker.base.address import ports_of
from cometmq.broker.base.config import BrokerConfig
from cometmq.namesrv.config import NamesrvConfig
from cometmq.protocol.java_properties import parse_properties

ROOT = Path(__file__).parents[1]
CONF = ROOT / "src" / "cometmq" / "conf"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHARED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"]
COMMANDS = {*PROJECT["project"]["scripts"], *SHARED.values()}
CONTAINER = (CONF / "container" / "Containerfile").read_text()
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((CONF / "kubernetes" / "cometmq.yaml").read_text()))
SETS = [each for each in MANIFESTS if each["kind"] == "StatefulSet"]


def read(name: str, text: str, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Return the settings, which the server must accept without a warning."""
    properties = parse_properties(text)
    kind = NamesrvConfig if name.startswith("namesrv") else BrokerConfig
    kind.from_properties(properties)
    assert caplog.messages == []
    return properties


@pytest.mark.parametrize("path", sorted((CONF / "systemd").iterdir()), ids=lambda path: path.stem)
def test_a_unit(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    service = unit["Service"]
    assert service["User"] != "root"
    command = shlex.split(service["ExecStart"])
    assert Path(command[0]).name in COMMANDS
    assert (CONF / Path(command[-1]).name).exists()
    assert service["ReadWritePaths"] == str(Path(command[-1]).parent)
    assert service["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("path", sorted((CONF / "systemd").iterdir()), ids=lambda path: path.stem)
def test_systemd_understands_a_unit(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", path.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert [line for line in done.stderr.splitlines() if path.name in line] == []


def test_the_image_is_not_root_and_checks_its_health() -> None:
    assert re.search(r"^USER (?!0)\d+:(?!0)\d+$", CONTAINER, re.MULTILINE)
    check = re.search(r"HEALTHCHECK.*\n.*http://127.0.0.1:(\d+)(/\w+)", CONTAINER)
    assert check is not None
    assert check.groups() == ("5557", "/healthz")
    (command,) = re.findall(r"^CMD \[(.*)\]$", CONTAINER, re.MULTILINE)
    assert command.split(",")[0].strip('"') in COMMANDS


def test_the_image_has_the_ports_of_both_servers() -> None:
    broker = BrokerConfig.from_properties(parse_properties((CONF / "container" / "broker.conf").read_text()))
    namesrv = NamesrvConfig.from_properties(
        parse_properties((CONF / "container" / "namesrv.conf").read_text())
    )
    ports = {*(port for _, _, port in ports_of(broker)), broker.grpc_port, broker.listen_port - 2}
    ports |= {namesrv.listen_port, *(port for _, _, port in namesrv.metrics_ports(""))}
    assert {
        int(port) for line in re.findall("^EXPOSE (.*)$", CONTAINER, re.MULTILINE) for port in line.split()
    } == ports


def required(package: str, extras: frozenset[str], found: dict[str, int]) -> dict[str, int]:
    """Add the packages that a package needs to `found`, with the bytes that each one brings into an image."""
    for text in metadata.requires(package) or []:
        wanted = Requirement(text)
        if wanted.name in found or not any(
            wanted.marker is None or wanted.marker.evaluate({"extra": each}) for each in extras | {""}
        ):
            continue
        files = [Path(str(file.locate())) for file in metadata.files(wanted.name) or []]
        found[wanted.name] = sum(
            file.stat().st_size for file in files
            if file.is_file() and file.suffix not in (".pyc", ".pyi", ".a") and "tests" not in file.parts
        )  # fmt: skip
        required(wanted.name, frozenset(wanted.extras), found)
    return found


def test_packages_of_the_image_are_small() -> None:
    """Where no image can be built (tests/testing/test_containers.py), too. Python and libraries add 50 MB.

    `strip` makes the packages 35 MB smaller.
    """
    (extras,) = re.findall("^ARG EXTRAS=(.*)$", CONTAINER, re.MULTILINE)
    found = required("cometmq", frozenset(extras.split(",")), {"cometmq": 0})
    assert {"numpy", "prometheus-client", "cryptography", "zstandard", "h11"} <= found.keys()
    assert sum(found.values()) < 130_000_000, found


@pytest.mark.parametrize("name", ["broker.conf", "namesrv.conf"])
def test_settings_of_the_image(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = read(name, (CONF / "container" / name).read_text(), caplog)
    assert found["metricsExporterType"] == "PROM"  # the health check needs the metrics port


@pytest.mark.parametrize("name", ["broker.conf", "namesrv.conf"])
def test_settings_in_kubernetes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (conf,) = (each for each in MANIFESTS if each["kind"] == "ConfigMap")
    found = read(name, conf["data"][name], caplog)
    assert found["metricsExporterType"] == "PROM"
    servers = found.get("namesrvAddr", "")
    replicas = {each["metadata"]["name"]: each["spec"]["replicas"] for each in SETS}
    if servers:
        assert servers.split(";") == [f"namesrv-{n}.namesrv:9876" for n in range(replicas["namesrv"])]


@pytest.mark.parametrize("found", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_kubernetes_knows_every_field_of_a_manifest(found: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(found, "1.33.0", strict=True)


@pytest.mark.parametrize("found", SETS, ids=lambda each: each["metadata"]["name"])
def test_a_stateful_set(found: dict[str, Any]) -> None:
    spec = found["spec"]
    service = next(
        each for each in MANIFESTS
        if each["kind"] == "Service" and each["metadata"]["name"] == spec["serviceName"]
    )  # fmt: skip
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"]
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    assert mounted == volumes | claims
    assert re.search(r"exec (\w+) ", container["command"][-1]).group(1) in COMMANDS  # type: ignore[union-attr]


def without_loss(given: Any, kept: Any) -> bool:
    """Return whether a JSON value contains all parts of another value."""
    if isinstance(given, dict):
        return isinstance(kept, dict) and all(
            without_loss(each, kept.get(key)) for key, each in given.items()
        )
    if isinstance(given, list):
        return isinstance(kept, list) and len(given) == len(kept) and all(map(without_loss, given, kept))
    return bool(given == kept)


def test_grafana_knows_all_that_the_dashboard_says() -> None:
    """Grafana's own types of dashboards, panels and queries drop unknown fields, so none may be lost."""
    register_default_plugins()
    board = json.loads((CONF / "grafana" / "cometmq.json").read_text())

    def kept(given: dict[str, Any]) -> Any:
        return json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))

    assert board["panels"]
    assert without_loss(board, kept(board))
    for part in (board["panels"][0], board["panels"][0]["targets"][0], board["templating"]["list"][0]):
        part["noSuchKey"] = 1
        assert not without_loss(board, kept(board))
        del part["noSuchKey"]
