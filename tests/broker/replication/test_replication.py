"""A master and a slave in one process, over sockets (docs/reference/storage.md, Replication)."""

from __future__ import annotations

from tests.broker.conftest import records


async def test_a_slave_has_what_its_master_has_answered(group):
    await group.master()
    await group.slave()
    await group.known()
    peer = group.peers["master"]
    for number in range(20):
        assert (await peer.send(body=b"%d" % number)).code == 0
    await group.equal()
    assert group.log_bytes("slave") == group.log_bytes("master")
    await group.brokers["slave"].parts.replication.sync.sync()
    found = records(await group.peers["slave"].pull())
    assert [m.body for m in found] == [b"%d" % number for number in range(20)]
