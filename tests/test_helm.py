"""The chart of conf/helm: Helm and Kubernetes' schemas accept it, and its resources match each other."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.helm import helm

from cometmq.broker.access.accounts import read_acl
from cometmq.broker.base.address import ports_of
from cometmq.broker.base.config import BrokerConfig
from cometmq.broker.base.members import check_member, peers_of
from cometmq.cli.app import cometmq
from cometmq.namesrv.config import NamesrvConfig
from cometmq.protocol.java_properties import parse_properties

CHART = Path(__file__).parents[1] / "src" / "cometmq" / "conf" / "helm" / "cometmq"
KUBERNETES = ("1.25.0", "1.33.0")
"""The oldest version that the chart supports, and a newer one."""
pytestmark = [
    pytest.mark.thorough("the chart is rendered many times"),
    pytest.mark.xdist_group("helm"),
]

Manifest = dict[str, Any]
ADMIN = {"accessKey": "operator", "secretKey": "12345678", "admin": True}
VALUES: dict[str, Manifest] = {
    "defaults": {},
    "all": {
        "broker": {
            "groups": ["broker-a", "broker-b"],
            "replicas": 5,
            "grpc": {"enabled": True},
            "settings": {"flushDiskType": "ASYNC_FLUSH", "messageDelayLevel": "1s 5s"},
            "persistence": {"size": "10Gi", "storageClass": "fast"},
            "nodeSelector": {"disk": "nvme"},
            "tolerations": [{"key": "queue", "operator": "Exists"}],
        },
        "namesrv": {"replicas": 3, "settings": {"returnOrderTopicConfigToBroker": "true"}},
        "auth": {"enabled": True, "accounts": [ADMIN, {"accessKey": "program", "secretKey": "abcdefgh"}]},
        "console": {"hosts": ["console.example.com"], "extraArgs": ["--proxy=10.0.0.5"]},
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "networkPolicy": {"enabled": True, "clients": [{"podSelector": {"matchLabels": {"team": "shop"}}}]},
        "imagePullSecrets": [{"name": "registry"}],
    },
    "least": {
        "broker": {"replicas": 1},
        "namesrv": {"replicas": 1},
        "auth": {"enabled": True, "existingSecret": "accounts-of-mine"},
        "console": {"enabled": False},
        "metrics": {"annotations": False},
    },
}  # fmt: skip
each_values = pytest.mark.parametrize("values", VALUES)


def run(
    command: str, values: Manifest, *words: str, version: str = KUBERNETES[1]
) -> subprocess.CompletedProcess[str]:
    """Run a command of Helm on the chart; values are given as standard input."""
    options = ["--kube-version", version, "--values", "-", *words]
    return subprocess.run(
        [str(helm()), *command.split(), str(CHART), *options],
        input=json.dumps(values), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@functools.cache
def rendered(values: str, version: str = KUBERNETES[1]) -> list[Manifest]:
    done = run("template demo --namespace queues", VALUES[values], version=version)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(values: str, *kinds: str) -> list[Manifest]:
    return [each for each in rendered(values) if each["kind"] in kinds]


def named(values: str, kind: str, name: str) -> Manifest:
    (found,) = (each for each in of_kind(values, kind) if each["metadata"]["name"] == name)
    return found


def pods(values: str) -> dict[str, Manifest]:
    """Return the pods of each set and deployment, and the pod of `helm test`, by name."""
    found = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in of_kind(values, "StatefulSet", "Deployment")
    }
    return found | {each["metadata"]["name"]: each for each in of_kind(values, "Pod")}


def selected(values: str, selector: Manifest) -> set[str]:
    """Return the names of the pods whose labels match."""
    return {
        name for name, pod in pods(values).items() if selector.items() <= pod["metadata"]["labels"].items()
    }


@each_values
def test_helm_finds_no_fault(values: str) -> None:
    done = run("lint --strict", VALUES[values])

    assert done.returncode == 0, done.stdout + done.stderr


@each_values
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_knows_every_field(values: str, version: str) -> None:
    import kubernetes_validate

    for each in rendered(values, version):
        if each["kind"] != "ServiceMonitor":  # of Prometheus' operator
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"broker": {"replicas": 2}}, "replicas"),
        ({"broker": {"settings": {"brokerPermission": 6}}}, "brokerPermission"),
        ({"broker": {"groups": ["namesrv"]}}, "groups"),
        ({"broker": {"group": "broker-a"}}, "group"),
        ({"auth": {"enabled": True}}, "auth.existingSecret or auth.accounts"),
        ({"auth": {"enabled": True, "accounts": [{**ADMIN, "admin": False}]}}, "must be an admin"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_refused(values: Manifest, problem: str) -> None:
    done = run("template demo", values)

    assert done.returncode != 0
    assert problem in done.stderr


def started(values: str, statefulset: Manifest, number: int, tmp_path: Path) -> str:
    """Run the start script of a pod, with a server that prints its settings file. Return the settings."""
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    maps, run_dir, programs = tmp_path / "map", tmp_path / "run", tmp_path / "bin"
    for path in (maps, run_dir, programs):
        path.mkdir(exist_ok=True)
    (config,) = of_kind(values, "ConfigMap")
    for name, text in config["data"].items():
        (maps / name).write_text(text)
    for name in ("mqbroker", "mqnamesrv"):
        (programs / name).write_text('#!/bin/sh\ntest "$1" = -c && cat "$2"\n')
        (programs / name).chmod(0o755)
    script = (
        container["command"][2].replace("/etc/cometmq-map", str(maps)).replace("/run/cometmq", str(run_dir))
    )
    env = {"PATH": f"{programs}:/usr/bin:/bin", "POD_NAME": f"{statefulset['metadata']['name']}-{number}"}
    return subprocess.run(["sh", "-ec", script], env=env, capture_output=True, text=True, check=True).stdout


@each_values
def test_every_member_has_the_settings_of_its_group(
    values: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    namesrv = named(values, "StatefulSet", "demo-cometmq-namesrv")
    names = {
        f"demo-cometmq-namesrv-{n}.demo-cometmq-namesrv.queues.svc.cluster.local:9876"
        for n in range(namesrv["spec"]["replicas"])
    }
    groups = VALUES[values].get("broker", {}).get("groups", ["broker-a"])
    for group in groups:
        broker = named(values, "StatefulSet", f"demo-cometmq-{group}")
        peers = set()
        for number in range(broker["spec"]["replicas"]):
            properties = parse_properties(started(values, broker, number, tmp_path))
            config = BrokerConfig.from_properties(properties)
            store = config.store
            check_member(store.d_leger_self_id, store.d_leger_peers, "")
            peer = dict(peers_of(store.d_leger_peers))[store.d_leger_self_id]
            assert peer.rpartition(":")[0] == config.broker_ip1
            assert config.broker_ip1 == (
                f"demo-cometmq-{group}-{number}.demo-cometmq-{group}.queues.svc.cluster.local"
            )
            assert (config.broker_name, store.d_leger_group) == (group, group)
            assert set(config.namesrv_addr.split(";")) == names
            assert config.acl_enable == VALUES[values].get("auth", {}).get("enabled", False)
            peers.add(peer)
            given = VALUES[values].get("broker", {}).get("settings", {"flushDiskType": "SYNC_FLUSH"})
            assert given.items() <= properties.items()
        assert len(peers) == broker["spec"]["replicas"]
        assert len(peers_of(store.d_leger_peers)) == broker["spec"]["replicas"]
    NamesrvConfig.from_properties(parse_properties(started(values, namesrv, 0, tmp_path)))
    assert caplog.messages == []


@each_values
def test_ports_of_settings_containers_services_and_probes_are_the_same(values: str, tmp_path: Path) -> None:
    for workload in of_kind(values, "StatefulSet", "Deployment"):
        name = workload["metadata"]["name"]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [probe["httpGet"]["port"] for key, probe in container.items() if key.endswith("Probe")]
        assert len(probes) >= 2
        assert set(probes) <= ports.keys()
        service = named(values, "Service", name)
        assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys()
        if workload["kind"] == "Deployment":
            continue
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]} == ports
        properties = parse_properties(started(values, workload, 0, tmp_path))
        if name.endswith("namesrv"):
            config = NamesrvConfig.from_properties(properties)
            assert ports == {"remoting": config.listen_port, "metrics": config.metrics_prom_exporter_port}
            continue
        broker = BrokerConfig.from_properties(properties)
        listened = {port for _, _, port in ports_of(broker)} | {broker.grpc_port} - {-1}
        assert set(ports.values()) == listened
        assert ports["metrics"] == broker.metrics_prom_exporter_port


@each_values
def test_selectors_match_the_pods_that_they_mean(values: str) -> None:
    for each in of_kind(values, "StatefulSet", "Deployment", "PodDisruptionBudget"):
        assert selected(values, each["spec"]["selector"]["matchLabels"]) == {each["metadata"]["name"]}
    for each in of_kind(values, "Service"):
        assert selected(values, each["spec"]["selector"]) == {each["metadata"]["name"]}
    for each in of_kind(values, "StatefulSet"):
        (term,) = each["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        found = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selected(values, found) == {each["metadata"]["name"]}
        service = named(values, "Service", each["spec"]["serviceName"])
        assert service["spec"]["clusterIP"] == "None"


def test_a_network_policy_lets_only_members_reach_the_port_of_raft() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("all", "NetworkPolicy")}
    assert policies.keys() == {
        each["metadata"]["name"] for each in of_kind("all", "StatefulSet", "Deployment")
    }
    for name, policy in policies.items():
        assert selected("all", policy["podSelector"]["matchLabels"]) == {name}
        (container,) = pods("all")[name]["spec"]["containers"]
        opened = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert sorted(opened) == sorted(port["name"] for port in container["ports"])
    (raft,) = (
        rule for rule in policies["demo-cometmq-broker-a"]["ingress"] if rule["ports"] == [{"port": "raft"}]
    )
    (peer,) = raft["from"]
    assert selected("all", peer["podSelector"]["matchLabels"]) == {"demo-cometmq-broker-a"}


@each_values
def test_pods_have_no_rights(values: str) -> None:
    for pod in pods(values).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts in (volumes, volumes | {"data"})


@each_values
def test_commands_have_these_options(values: str) -> None:
    for pod in pods(values).values():
        command = pod["spec"]["containers"][0]["command"]
        if command[0] == "cometmq":
            found = cometmq.get_command(click.Context(cometmq), command[1])
            assert found is not None
            found.make_context(command[1], command[2:])
        else:
            assert re.search(r"exec (mqbroker|mqnamesrv) -c", command[2])


def test_accounts_are_those_of_a_broker_and_its_tools() -> None:
    secret = named("all", "Secret", "demo-cometmq-accounts")["stringData"]
    accounts = read_acl("plain_acl.yml", secret["plain_acl.yml"].encode()).accounts
    assert [(each.access_key, each.admin) for each in accounts] == [("operator", True), ("program", False)]
    assert (secret["accessKey"], secret["secretKey"]) == ("operator", "12345678")
    for values, name in (("all", "demo-cometmq-accounts"), ("least", "accounts-of-mine")):
        for pod in pods(values).values():
            (container,) = pod["spec"]["containers"]
            refs = [
                each["valueFrom"].get("secretKeyRef", {}).get("name") for each in container.get("env", [])
            ]
            mounts = [
                each["secret"]["secretName"] for each in pod["spec"].get("volumes", []) if "secret" in each
            ]
            expected = {"namesrv": [], "broker": [name], "console": [name] * 2, "doctor": [name] * 2}
            assert [each for each in refs if each] + mounts == expected[container["name"]]
    assert of_kind("defaults", "Secret") == of_kind("least", "Secret") == []


def test_prometheus_finds_the_ports_of_metrics() -> None:
    (monitor,) = of_kind("all", "ServiceMonitor")
    selector = monitor["spec"]["selector"]
    (parts,) = selector["matchExpressions"]
    found = [
        each for each in of_kind("all", "Service")
        if selector["matchLabels"].items() <= each["metadata"]["labels"].items()
        and each["metadata"]["labels"][parts["key"]] in parts["values"]
    ]  # fmt: skip
    assert [each["metadata"]["name"] for each in found] == [
        each["metadata"]["name"] for each in of_kind("all", "StatefulSet")
    ]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert all(endpoint["port"] in {port["name"] for port in each["spec"]["ports"]} for each in found)
