"""The Java driver with Apache's own servers: basic assumptions of the other tests here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.interop.apache import ApacheCluster
from tests.interop.driver import Driver, JavaError, body_of, message
from tests.long_form import LONG


@pytest.mark.parametrize(
    ("client", "server"), [("4.9.8", "4.9.7"), ("5.5.0", "5.5.0")][: None if LONG else 1]
)
def test_driver_sends_and_consumes_with_apaches_servers(
    client: str,
    server: str,
    java_clients: Callable[[str], Driver],
    apache_clusters: Callable[[str], ApacheCluster],
) -> None:
    java, cluster = java_clients(client), apache_clusters(server)
    java.call("producer_start", name="harness", namesrv=cluster.namesrv)
    sent = java.send("harness", [message("Harness", b"body %d" % n, keys=f"k{n}") for n in range(8)])
    java.call("push_start", name="harness", group="harness", namesrv=cluster.namesrv, topics={"Harness": "*"})
    got = java.wait_delivered("harness", 8)
    assert sorted(map(body_of, got)) == [b"body %d" % n for n in range(8)]
    assert {each["msgId"] for each in got} == {each["msgId"] for each in sent}
    java.call("push_stop", name="harness")
    java.call("producer_stop", name="harness")


def test_driver_passes_errors_on(java_clients: Callable[[str], Driver], apache_4: ApacheCluster) -> None:
    java = java_clients("4.9.8")
    java.call("producer_start", name="refused", namesrv=apache_4.namesrv)
    with pytest.raises(JavaError) as caught:
        java.send("refused", [message("no such name!", b"x")])
    assert "illegal characters" in caught.value.message
    java.call("producer_stop", name="refused")
