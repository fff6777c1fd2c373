"""The pipeline's blocking connections sign requests and use TLS; their credentials are never shown."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from tests.broker.access.test_files import write
from tests.broker.access.test_guard import ACL
from tests.certificates import Certificates

from cometmq.errors import ConfigError, ConnectError
from cometmq.pipeline.base.options import read_options, write_options
from cometmq.pipeline.base.wire import PLAIN, Access, Wire
from cometmq.protocol.acl import Credentials
from cometmq.protocol.codes import RequestCode
from cometmq.protocol.frame import Frame
from cometmq.standalone import Standalone

PROGRAM = Credentials("program", "secret-of-program")
TOPIC = {"topic": "Orders", "queueId": "0"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Standalone]:
    home = tmp_path_factory.mktemp("home")
    write(home / "conf" / "plain_acl.yml", ACL)
    settings = {"aclEnable": "true", "rocketmqHome": str(home), "tls.config.file": str(certificates.file)}
    with Standalone(home / "data", 0, 0, settings=settings).run_in_thread() as running:
        yield running


def asked(cluster: Standalone, access: Access) -> list[int]:
    """Return the response codes of three requests; the last one uses a connection that was idle."""
    wire = Wire(cluster.broker_addrs["broker-a"], 10.0, access)
    try:
        frames = [Frame.request(RequestCode.GET_MAX_OFFSET, None, ext=dict(TOPIC)) for _ in range(2)]
        codes = [answer.code for answer in wire.call_many(frames)]
        assert wire.usable()
        frames = [Frame.request(RequestCode.GET_MAX_OFFSET, None, ext=dict(TOPIC))]
        return [*codes, wire.call_many(frames)[0].code]
    finally:
        wire.close()


def test_requests_are_signed_over_both_kinds_of_connections(
    cluster: Standalone, certificates: Certificates
) -> None:
    for tls in (False, str(certificates.file)):
        assert asked(cluster, Access(PROGRAM, tls)) == [0, 0, 0]
        assert asked(cluster, Access(None, tls)) == [1, 1, 1]


def test_a_server_that_is_not_believed_is_no_connection(cluster: Standalone) -> None:
    with pytest.raises(ConnectError, match="verify failed"):
        asked(cluster, Access(PROGRAM, True))


def test_options_and_environment_name_the_account(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"namesrv": "n:1", "topic": "T"}
    keys = {"accessKey": "program", "secretKey": "secret-of-program", "tls": "/tls.properties"}
    wanted = Access(PROGRAM, "/tls.properties")

    assert read_options(given, streaming=False).access == PLAIN
    assert read_options({**given, **keys}, streaming=False).access == wanted
    assert write_options({**given, **keys}).access == wanted
    monkeypatch.setenv("COMETMQ_ACCESS_KEY", "program")
    monkeypatch.setenv("COMETMQ_SECRET_KEY", "secret-of-program")
    assert write_options(given).access == Access(PROGRAM)
    assert pickle.loads(pickle.dumps(write_options(given))).access == Access(PROGRAM)
    with pytest.raises(ConfigError, match="secret_key"):
        write_options({**given, "accessKey": "program"})


def test_a_secret_is_shown_nowhere() -> None:
    keys = {"accessKey": "program", "secretKey": "secret-of-program", "securityToken": "token-of-program"}
    given = {"namesrv": "n:1", "topic": "T"}
    shown = [repr(write_options({**given, **keys})), repr(read_options({**given, **keys}, streaming=True))]
    for wrong in ({"secretKeys": "secret-of-program"}, {"SECRETKEY": "secret-of-another"}):
        with pytest.raises(ConfigError) as caught:
            write_options({**given, **keys, **wrong})
        shown.append(str(caught.value))

    assert "program" in shown[0]
    assert not any("secret-of" in text or "token-of" in text for text in shown)
