"""Diagnosis of a cluster: examines name servers, brokers, a topic and a group from a client's machine.

Each finding describes a problem, its location and a remedy. A finding that is unusual but not harmful is a
warning.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial

from cometmq.admin.admin import Admin
from cometmq.admin.errors import UnknownNameError
from cometmq.admin.values import BrokerStatus, Value
from cometmq.client.cluster.options import ClientOptions, environment_tls
from cometmq.errors import BrokerError, CometError, NoRouteError, RemotingError
from cometmq.protocol.addresses import parse_address
from cometmq.protocol.bodies import ClusterInfo
from cometmq.protocol.codes import MASTER_ID, Perm, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.text import shortened

CONNECT_TIMEOUT_S = 3.0
MAX_CLOCK_SKEW_MS = 5_000
"""Tolerated difference, in ms, between the clocks of a broker and of this machine. More is a finding.

A wrong broker clock shifts delivery times, the deletion of old messages, and searches by time.
"""
DISK_WARNING = 0.85
MAX_BROKERS = 1_000
"""Maximum number of brokers that are examined, because a name server may return any number of them."""
MAX_PROBLEM_CHARS = 2_000  # Maximum length of a server's error text; the rest is cut off
_RUNTIME = re.compile(r"([0-9]{1,7}) days, ([0-9]{1,2}) hours, ([0-9]{1,2}) minutes, ([0-9]{1,2}) seconds")
_TIME = re.compile(r"[0-9]{1,15}").fullmatch  # A time in ms since 1970, which has at most 15 digits


class Finding(Value, frozen=True, kw_only=True):
    """A problem of a cluster. `where` is an address, or the name of a topic, group or setting."""

    serious: bool
    where: str
    problem: str
    cure: str


async def examine(
    namesrv: Sequence[str], *, topic: str | None = None, group: str | None = None
) -> list[Finding]:
    """Return the problems of a cluster, the most serious first; [] if there are none."""
    findings = [each async for each in _examine(namesrv, topic, group)]
    return sorted(findings, key=lambda each: not each.serious)


async def _examine(namesrv: Sequence[str], topic: str | None, group: str | None) -> AsyncIterator[Finding]:
    known: dict[str, ClusterInfo] = {}
    for addr in namesrv:
        problem = await _name_server(addr, known)
        if problem is not None:
            yield problem
    if not known:
        return
    for each in _disagreement(known):
        yield each
    all_addrs = sorted(set().union(*map(_addresses, known.values())))
    async with Admin(list(known)) as admin:
        examinations = []
        if len(all_addrs) > MAX_BROKERS:
            yield _bad(
                ", ".join(known),
                f"{len(all_addrs)} brokers are registered; they are not examined, because the limit is "
                f"{MAX_BROKERS}",
                "are these the right name servers? Any program can register brokers there (docs/security.md)",
            )
        else:
            examinations += [_brokers(await admin.brokers()), _plain_connections([*known, *all_addrs])]
        if topic is not None:
            examinations.append(_topic(admin, topic))
        if group is not None:
            examinations.append(_group(admin, group))
        for examination in examinations:
            async for found in examination:
                yield found


def _bad(where: str, problem: str, cure: str, *, serious: bool = True) -> Finding:
    return Finding(serious=serious, where=where, problem=shortened(problem, MAX_PROBLEM_CHARS), cure=cure)


_odd = partial(_bad, serious=False)


# -- name servers


async def _name_server(addr: str, known: dict[str, ClusterInfo]) -> Finding | None:
    """Check a name server. Return a finding if it cannot be reached or does not respond as a name server.

    Otherwise put the cluster info that the name server returns into `known`, and return None.
    """
    problem = await connect_problem(addr)
    if problem:
        return _bad(
            addr,
            f"the name server cannot be reached: {problem}",
            "is it running there (mqnamesrv), on this port, and does a firewall let it through? Clients need "
            "one name server that answers",
        )
    try:
        async with Admin(addr, CONNECT_TIMEOUT_S) as admin:
            known[addr] = await admin.cluster_info()
    except CometError as error:
        return _bad(
            addr,
            f"the server does not respond as a name server: {error}",
            "is it the name server's port (9876), and not a broker's, a proxy's or the console's? One that "
            "requires TLS needs --tls. One that does not answer in time hangs, or is overloaded",
        )
    return None


async def connect_problem(addr: str) -> str:
    """Return why a connection to "host:port" fails; "" if it succeeds."""
    parsed = parse_address(addr)
    if parsed is None:
        return "this is not an address (host:port)"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*parsed)
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _disagreement(known: dict[str, ClusterInfo]) -> Iterator[Finding]:
    brokers = {addr: _addresses(info) for addr, info in known.items()}
    all_addrs = set().union(*brokers.values())
    if not all_addrs:
        yield _bad(
            ", ".join(known),
            "no broker is registered",
            "start one (mqbroker -n …), and look in its log for `not registered`: namesrvAddr of the broker "
            "must be the address of this name server as the broker sees it",
        )
    for addr, own in brokers.items():
        if own != all_addrs:
            yield _bad(
                addr,
                f"the name server does not know {', '.join(sorted(all_addrs - own))}, which others know",
                "namesrvAddr of each broker lists all name servers; its log reports those that are "
                "unreachable",
            )


def _addresses(info: ClusterInfo) -> set[str]:
    return {addr for data in info.broker_addr_table.values() for addr in data.broker_addrs.values()}


async def _plain_connections(addrs: Sequence[str]) -> AsyncIterator[Finding]:
    """If this program uses TLS, yield a finding for each server that also accepts plain connections."""
    if not environment_tls():
        return
    async with Admin(
        list(addrs), CONNECT_TIMEOUT_S, options=ClientOptions(tls=False, access_key="")
    ) as plain:

        async def answers(addr: str) -> bool:
            try:
                question = Frame.request(RequestCode.GET_BROKER_CLUSTER_INFO)
                await plain.client.remoting.call(addr, question, CONNECT_TIMEOUT_S)
            except RemotingError:
                return False
            return True

        found = await asyncio.gather(*map(answers, addrs))
    for addr, plainly in zip(addrs, found, strict=True):
        if plainly:
            yield _odd(
                addr,
                "it accepts plain connections in addition to TLS, without a certificate",
                "tls.server.mode=enforcing, once all clients use TLS; tls.server.need.client.auth only "
                "affects TLS connections",
            )


# -- brokers


async def _brokers(brokers: Sequence[BrokerStatus]) -> AsyncIterator[Finding]:
    problems = await asyncio.gather(*(connect_problem(each.broker_addr) for each in brokers))
    for each, problem in zip(brokers, problems, strict=True):
        for found in [_unreachable(each, problem)] if problem else _runtime_findings(each):
            yield found
    versions = {
        f"{each.runtime['brokerVersionDesc']} {each.runtime.get('cometmqVersion', '')}".strip()
        for each in brokers
        if "brokerVersionDesc" in each.runtime
    }
    if len(versions) > 1:
        yield _odd(
            "brokers",
            f"they have several versions: {', '.join(sorted(versions))}",
            "expected during an upgrade; otherwise brokers differ in their features",
        )
    masters = {(each.cluster_name, each.broker_name) for each in brokers if each.broker_id == MASTER_ID}
    for cluster, name in sorted({(each.cluster_name, each.broker_name) for each in brokers} - masters):
        yield _bad(
            name,
            f"no master of {name} in {cluster} is registered, so it accepts no messages",
            "start it again, or make a slave the master (docs/replication.md); a raft group needs a "
            "majority of its members (cometmq raft status)",
        )


def _unreachable(broker: BrokerStatus, problem: str) -> Finding:
    addr = broker.broker_addr
    parsed = parse_address(addr)
    host = parsed[0] if parsed else ""
    cure = "is it running, and does a firewall let its port through?"
    if _is_private(host):
        cure = (
            f"clients receive the address {addr} (brokerIP1, listenPort). From another machine or outside "
            "its container network that address is unreachable: set brokerIP1 to one that clients reach"
        )
    return _bad(addr, f"broker {broker.broker_name} cannot be reached: {problem}", cure)


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def _runtime_findings(broker: BrokerStatus) -> Iterator[Finding]:
    """Return the problems that the runtime table of a reachable broker shows."""
    addr, runtime = broker.broker_addr, broker.runtime
    if not runtime:
        if "AclException" in broker.problem or "admin permission" in broker.problem:
            cure = (
                "--access-key and --secret-key of an admin (docs/security.md); `cometmq acl explain` says why"
            )
            yield _bad(addr, f"the broker refuses this account: {broker.problem}", cure)
        else:
            yield _bad(addr, f"the broker does not answer: {broker.problem}", "look in its log")
        return
    if runtime.get("registrationProblem", "none") != "none":
        yield _bad(
            addr,
            f"its registration is contested: {runtime['registrationProblem']}",
            "stop one of them: messages are in two stores, and clients reach now one, now the other. Give it "
            "a name of its own (brokerName), or make it a slave (brokerId, brokerRole=SLAVE)",
        )
    if runtime.get("storeFlags", "ok") != "ok":
        yield _bad(
            addr,
            f"the broker accepts no messages: {runtime['storeFlags']}",
            "a full disk: free space or lower fileReservedTime; permissions: the store belongs to the "
            "broker's user; then it continues by itself, or after a restart",
        )
    if runtime.get("commitLogSpace", "ok") != "ok":
        yield _bad(
            addr,
            f"the log cannot grow: {runtime['commitLogSpace']} ({runtime.get('commitLogDirCapacity', '')})",
            "messages are refused once the present segment is full: free space on that disk, or lower "
            "fileReservedTime and run mqadmin deleteExpiredCommitLog; then it continues by itself",
        )
    ratio = broker.first_number("commitLogDiskRatio")
    if ratio is not None and ratio >= DISK_WARNING:
        yield _odd(
            addr,
            f"the disk of the log is {ratio:.0%} full",
            "from diskSpaceCleanForciblyRatio (85) on old segments are deleted whatever their age, from "
            "diskSpaceWarningLevelRatio (90) on messages are refused",
        )
    if runtime.get("flowControl", "none") != "none":
        yield _odd(
            addr,
            f"the broker refuses requests because it is busy: {runtime['flowControl']}",
            "docs/server.md, Back-pressure, has each reason and its setting",
        )
    yield from _replication(addr, runtime)
    skew = _skew_ms(broker)
    if skew is not None and abs(skew) > MAX_CLOCK_SKEW_MS:
        ahead = "ahead of" if skew > 0 else "behind"
        yield _odd(
            addr,
            f"the broker's clock is {abs(skew) / 1000:.0f} s {ahead} this machine's",
            "synchronise clocks (NTP): searches by time, delays and retention go by the broker's",
        )


def _replication(addr: str, runtime: dict[str, str]) -> Iterator[Finding]:
    """Return the problems of replication that the runtime table of a slave, master or raft member shows."""
    if (problem := runtime.get("haProblem", "none")) != "none":
        what, cure = (
            "the slave does not follow its master",
            "docs/replication.md; the log of the slave can be cut by cometmq store truncate",
        )
        if "raftRole" in runtime:
            what, cure = "the raft group does not start", "the same dLegerPeers in the files of all members"
        elif runtime.get("brokerRole") != "SLAVE":
            what, cure = "no slave can follow", "a free port (haListenPort; else listenPort + 1)"
        yield _bad(addr, f"{what}: {problem}", cure)
    if runtime.get("raftSuspect", "false") == "true":
        yield _odd(
            addr,
            "the member has an empty or damaged log, and has no vote in its group yet",
            "start the other members, or `cometmq raft remove` those that are gone (docs/replication.md)",
        )


def _skew_ms(broker: BrokerStatus) -> int | None:
    """Return by how many ms a broker's clock is ahead of this machine's. None: it reports no valid time."""
    now, runtime = broker.received_ms, broker.runtime
    if now is None:
        return None
    time_text = runtime.get("systemTimeMillis", "")
    if _TIME(time_text):
        return int(time_text) - now
    booted, since = runtime.get("bootTimestamp", ""), _RUNTIME.search(runtime.get("runtime", "")[:100])
    if not _TIME(booted) or since is None:
        return None
    days, hours, minutes, seconds = map(int, since.groups())
    return int(booted) + (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 - now


# -- a topic and a group


async def _topic(admin: Admin, topic: str) -> AsyncIterator[Finding]:
    try:
        route = await admin.route(topic)
    except NoRouteError:
        yield _bad(
            topic,
            "the topic has no route",
            "create it (mqadmin updateTopic), or let the first message do so: autoCreateTopicEnable of the "
            "brokers. A broker registers new topics at once, so a second of waiting suffices",
        )
        return
    except CometError as error:
        yield _bad(topic, f"the route cannot be read: {error}", "see the findings about name servers")
        return
    perms = [queue.perm for queue in route.queue_datas]
    for bit, verb, whom in ((Perm.WRITE, "be sent to", "Producers"), (Perm.READ, "be read", "Consumers")):
        if not any(perm & bit for perm in perms):
            yield _bad(
                topic,
                f"no queue of the topic can {verb}",
                f"{whom} need one: mqadmin updateTopicPerm, brokerPermission of the brokers, or addWritePerm "
                "after a wipeWritePerm",
            )


async def _group(admin: Admin, group: str) -> AsyncIterator[Finding]:
    try:
        found = await admin.subscriptions(group)
    except UnknownNameError as error:
        cure = "is the name right? A group exists with settings, stored offsets, a retry topic or members"
        yield _bad(group, str(error), cure)
    except CometError as error:
        if isinstance(error, BrokerError) and error.code == ResponseCode.CONSUMER_NOT_ONLINE:
            yield _bad(group, "the group has no member", "start a consumer; its backlog waits until then")
        else:
            problem = f"its members cannot be queried: {error}"
            yield _bad(group, problem, "see the findings about brokers")
    else:
        for subject, sides in {**found.differences, **found.setting_differences}.items():
            yield _bad(
                group,
                f"members differ in {subject}: {_sides(sides)}",
                "all members of a group subscribe the same topics with the same expressions and settings; "
                "else messages are lost at members without the subscription. Use separate groups for "
                "different ones",
            )
        for member in found.members:
            if member.blocked:
                seconds = max(member.blocked.values()) // 1000
                yield _odd(
                    group,
                    f"{member.client_id} has consumed none of its messages of "
                    f"{', '.join([*member.blocked][:5])} for {seconds} s",
                    "its listener hangs or is slow: `mqadmin consumerStatus -g GROUP -i CLIENT_ID -s` shows "
                    "its threads or tasks. If it is stopped, other members take over its queues",
                )


def _sides(sides: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{', '.join(ids[:5])} says {what or 'nothing'}" for what, ids in sorted(sides.items()))
