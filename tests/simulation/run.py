"""A run: the cluster and clients of a seed, a time with faults, a time without, and the final checks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.simulation.clients import GROUP, TOPIC, TRIES, Clients, name_of
from tests.simulation.cluster import BrokerMachine, Cluster
from tests.simulation.groups import RaftGroup
from tests.simulation.pops import LeaseWatch, PopMembers

from cometmq.broker.tables.durable import DurableTables
from cometmq.client.cluster.decoding import decode_messages
from cometmq.errors import CometError, RecordError
from cometmq.message import MessageExt, MessageQueue, SendResult
from cometmq.protocol.bodies import SubscriptionGroupConfig
from cometmq.protocol.codes import DLQ_PREFIX, RequestCode, ResponseCode
from cometmq.protocol.frame import Frame
from cometmq.protocol.ids import decode_offset_id
from cometmq.protocol.pop import TopicKind
from cometmq.remoting import RemotingClient
from cometmq.store import WAITING, MessageStore
from cometmq.testing.checker import RULES, Expected, Problem, check_history

TOPICS = 5  # created in a raft group during the run
FAULT_S = 5.0
"""Duration of the faults, in seconds."""
HEALED_S = 120.0
"""Limit, in seconds, until a healthy cluster has delivered and replicated everything."""
_SETTLED_S = 2.5
"""Time, in seconds, in which queue owners are watched: enough for a rebalance and an offset commit."""
_QUIET_S = 6.0
"""Time, in seconds, for which each queue must have had a single owner before it counts as settled.

It is longer than clients need to find a newly registered broker and to rebalance.
"""
_OFFSETS_S = 0.2
"""Interval, in seconds, between two records of the group's offsets."""
_SETTLES = 0.4
"""Share of runs that watch settled owners: an idle cluster costs as much as a busy one."""
_ROTTEN_S = 6.0
"""Time, in seconds, to watch a cluster with a damaged disk, whose lost messages never arrive."""
POPS, ORDERED_POPS = "pops", "ordered pops"
KINDS = ("plain", "orderly", "transactions", "timers", "retries", POPS, ORDERED_POPS)
SHAPES = ("one", "two", "pair", "pair", "raft", "raft", "raft")
"""A broker, two brokers, a master with its slave, or a raft group of three or five."""
FAULTS = (
    "loss", "slow network", "cut", "one-way cut", "reset", "pause", "kill", "power", "clock", "slow disk",
    "full", "io error", "members", "move", "rot", "change", "wipe", "stop",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The parameters of a run: shape of the cluster, kind of messages, faults."""

    shape: str
    kind: str
    faults: frozenset[str]
    sync_flush: bool

    def __str__(self) -> str:
        flush = "SYNC_FLUSH" if self.sync_flush else "ASYNC_FLUSH"
        return f"{self.shape}, {flush}, {self.kind}, {', '.join(sorted(self.faults)) or 'no faults'}"


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed. It has only some of the faults, so that rare pairs of faults meet."""
    chance = random.Random(f"plan {seed}")
    sync_flush = chance.random() < 0.7
    share = chance.choice((0.1, 0.3, 0.5))
    faults = {fault for fault in FAULTS if chance.random() < share}
    if not sync_flush:
        faults.discard("power")
    shape = chance.choice(SHAPES)
    faults -= {"pair": {"move", "rot", "change", "wipe"}, "raft": {"move"}}.get(shape, {"change", "wipe"})
    if "wipe" in faults:  # a group need not survive it while it shrinks or while another log is damaged
        faults -= {"change", "rot"}
    return Plan(shape, chance.choice(KINDS), frozenset(faults), sync_flush)


@dataclass
class Outcome:
    """The result of a run. `seen` counts the faults, and `digest` is a checksum of all events."""

    seed: int
    plan: Plan
    problems: list[Problem]
    seen: Counter[str]
    sent: int = 0
    events: int = 0
    simulated_s: float = 0.0
    digest: int = 0
    history: list[bytes] = field(default_factory=list)


class Run:
    """The run of a seed."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed = seed
        self.plan = plan if plan is not None else plan_of(seed)
        self.chance = random.Random(f"faults {seed}")
        self.cluster = cluster = Cluster(seed)
        self.scheduler = cluster.scheduler
        self.clients = Clients(cluster, self.plan.kind)
        self.clients.on_ack = self._check_ack
        self.pops: PopMembers | None = None
        if self.plan.kind in (POPS, ORDERED_POPS):
            ordered = self.plan.kind == ORDERED_POPS
            watch = LeaseWatch(self.scheduler.time, self._epochs, self._problem, ordered)
            watch.log_is_whole = "rot" not in self.plan.faults
            self.pops = PopMembers(self.clients, watch, ordered)
        self.problems: list[Problem] = []
        flush = "SYNC_FLUSH" if self.plan.sync_flush else "ASYNC_FLUSH"
        cluster.add_name_server()
        self.group: RaftGroup | None = None
        if self.plan.shape == "raft":
            count = self.chance.choice((3, 3, 3, 5))
            self.group = RaftGroup(cluster, count, TOPIC, self._problem, flushDiskType=flush)
            self.group.logs_are_whole = "rot" not in self.plan.faults
            self.masters: list[BrokerMachine] = []
            self.slaves: list[BrokerMachine] = []
            return
        replicated = self.plan.shape == "pair"
        role = "SYNC_MASTER" if replicated else "ASYNC_MASTER"
        for name in ("a", "b") if self.plan.shape == "two" else ("a",):
            cluster.add_broker(name, flushDiskType=flush, brokerRole=role)
            if replicated:
                cluster.add_broker(name, flushDiskType=flush, brokerRole="SLAVE", brokerId="1")
        self.masters = [each for each in cluster.brokers if not each.slave]
        self.slaves = [each for each in cluster.brokers if each.slave]

    def __call__(self) -> Outcome:
        """Execute the run."""
        listening = contextlib.nullcontext() if self.group is None else self.group.listening()
        with self.cluster.world(), listening:
            self._start()
            self._disturb()
            self._heal()
            self._read_everything()
            self._compare_replicas()
        report = check_history(
            lines := list(self.clients.history.lines()), Expected(tries=TRIES, check_s=HEALED_S, late_s=10.0)
        )
        self.problems += [each for each in report.problems if each.rule not in self._forgiven()]
        self.problems += [Problem("no errors", repr(each)) for each in self.scheduler.failures]
        outcome = Outcome(
            seed=self.seed, plan=self.plan, problems=self.problems, seen=self.cluster.seen, sent=report.sent,
            events=self.scheduler.events, simulated_s=self.scheduler.now, digest=self.scheduler.digest,
            history=lines,
        )  # fmt: skip
        self.scheduler.forget()
        return outcome

    def _forgiven(self) -> set[str]:
        """Rules that these faults may break: a crash repeats listener calls, and timers may be late."""
        if "rot" in self.plan.faults:
            return set(RULES) - {"nothing invented"}
        # A pop that comes too late for its message counts as a failure, and its member does not know that.
        forgiven = set() if self.pops is None else {"retries"}
        if self.plan.faults - {"clock", "slow disk", "slow network"}:
            forgiven |= {"retries", "timers"}
        if self.group is not None and "slow disk" in self.plan.faults:
            # A leader may not know in time whether a message is stored. Its client sends a second copy back.
            forgiven.add("retries")
        return forgiven

    def _start(self) -> None:
        cluster, clients = self.cluster, self.clients
        for machine in cluster.machines:
            machine.start()
            self.scheduler.run_for(0.02)
        cluster.scheduler.run_until(lambda: all(each.broker for each in cluster.brokers), 5)
        if self.group is not None:
            self.group.watch()
            self.scheduler.run_until(lambda: self.group is None or self.group.leader is not None, 10)
            cluster.client("admin").spawn(self.group.make_topics(TOPICS, FAULT_S / TOPICS))
        self.producers = [cluster.client("p1")]
        for process in self.producers:
            process.spawn(clients.produce(process, self.chance.randint(8, 16), FAULT_S / 14))
        if self.plan.kind == POPS:
            cluster.client("admin").spawn(self._limit_tries())
        for _ in range(self.chance.choice((1, 1, 2))):
            self._add_member()
        if self.plan.faults <= {"clock", "slow disk", "slow network"}:
            self._watch_offsets()

    def _add_member(self) -> None:
        self._members_made += 1
        process = self.cluster.client(f"c{self._members_made}")
        self.clients.members.append(process)
        if self.pops is not None:
            process.spawn(self.pops.consume(process))
        else:
            process.spawn(self.clients.consume(process, orderly=self.plan.kind == "orderly"))

    def _epochs(self) -> dict[str, object]:
        """Return a value for each broker name that changes if the broker may have lost its leases."""
        if self.group is not None:
            leading = [(each.host, self.group.status_of(each).term) for each in self.group.serving]
            return {"a": leading[0] if len(leading) == 1 else object()}
        return {each.name: each.starts for each in self.masters}

    async def _limit_tries(self) -> None:
        """Set the maximum number of redeliveries of the group at all masters."""
        settings = SubscriptionGroupConfig(GROUP, retry_max_times=TRIES)
        frame = Frame.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=settings.encode())
        client, left = RemotingClient(), {each.name for each in self.cluster.brokers}
        while left:
            await asyncio.sleep(0.2)
            masters = self.masters if self.group is None else self.group.serving
            for broker in [each.broker for each in masters if each.broker and each.name in left]:
                with contextlib.suppress(CometError):
                    if (await client.call(broker.addr, frame, 4.0)).code == ResponseCode.SUCCESS:
                        left.discard(broker.config.broker_name)

    def _check_ack(self, result: SendResult) -> None:
        """Check that an acknowledged message is stored on its master and a slave, or on a majority."""
        if self.group is not None:
            self.group.check_ack(result)
            return
        position = decode_offset_id(result.offset_msg_id).physical_offset
        name = result.queue.broker_name
        masters = [each for each in self.masters if each.name == name]
        for machines in (masters, [each for each in self.slaves if each.name == name]):
            if machines and "rot" not in self.plan.faults and all(each.safe <= position for each in machines):
                ends = ", ".join(f"{each.host} has {each.safe}" for each in machines)
                self._problem("acknowledged is stored", f"a message at {position} of {name}: {ends}")

    # -- faults

    def _disturb(self) -> None:
        end = self.scheduler.now + FAULT_S
        if self.plan.faults:
            actions = [
                getattr(self, "_" + fault.replace(" ", "_").replace("-", "_"))
                for fault in sorted(self.plan.faults)
            ]
            for _ in range(self.chance.randint(len(actions), 2 * len(actions) + 2)):
                at = self.scheduler.now + self.chance.uniform(0, FAULT_S)
                self.scheduler.call_at(at, self._strike, self.chance.choice(actions))
        self.scheduler.run_for(end - self.scheduler.now)

    def _strike(self, action: Callable[[], None]) -> None:
        if not self._healed:
            action()

    _healed = False
    _members_made = 0

    def _for_a_while(self, end: Callable[[], object], most_s: float = 2.5) -> None:
        self.scheduler.call_later(self.chance.uniform(0.05, most_s), end)

    def _broker(self) -> BrokerMachine:
        return self.chance.choice(self.cluster.brokers)

    def _hosts(self) -> list[str]:
        clients = [each.host for each in (*self.producers, *self.clients.members)]
        return [each.host for each in self.cluster.machines] + clients

    def _loss(self) -> None:
        self.cluster.network.loss = self.chance.choice((0.02, 0.2))

    def _slow_network(self) -> None:
        self.cluster.network.delay_s = self.chance.choice((0.01, 0.1))
        self.cluster.seen["slow network"] += 1

    def _cut(self) -> None:
        hosts = self._hosts()
        side = {host for host in hosts if self.chance.random() < self.chance.choice((0.3, 0.5))}
        pairs = [(a, b) for a in hosts for b in hosts if (a in side) != (b in side)]
        self.cluster.network.cut(*pairs)
        self._for_a_while(self.cluster.network.heal)

    def _one_way_cut(self) -> None:
        hosts = self._hosts()
        source, target = self.chance.sample(hosts, 2)
        self.cluster.network.cut((source, target))
        self._for_a_while(self.cluster.network.heal)

    def _reset(self) -> None:
        self.cluster.network.reset_some(self.chance.choice((0.2, 1.0)))

    def _pause(self) -> None:
        process = self.chance.choice([each.process for each in self.cluster.machines] + self.clients.members)
        if process is not None and process.alive:
            process.pause()
            self.cluster.seen["pause"] += 1
            self._for_a_while(process.resume)

    def _kill(self, *, power: bool = False) -> None:
        machine = self._broker() if power else self.chance.choice(self.cluster.machines)
        machine.kill(power=power)
        if not machine.up:
            self._for_a_while(lambda: machine.up or machine.start())

    def _power(self) -> None:
        self._kill(power=True)

    def _stop(self) -> None:
        machine = self._broker()
        machine.stop(lambda: self._for_a_while(lambda: machine.up or machine.start()))

    def _move(self) -> None:
        broker = self._broker()
        broker.kill()
        if not broker.up:
            broker.move()
            self._for_a_while(lambda: broker.up or broker.start())

    def _rot(self) -> None:
        if self.group is not None:  # of one member only: a majority must keep the acknowledged messages
            self.cluster.brokers[0].disk.rot("/data/")
        else:
            self._broker().disk.rot("/commitlog/")

    def _wipe(self) -> None:
        assert self.group is not None
        machine = self.group.may_lose_disk(self.chance.choice(sorted(self.group.members)))
        if machine is not None:
            machine.lose_disk()
            self._for_a_while(lambda: machine.up or machine.start())

    def _change(self) -> None:
        assert self.group is not None
        action = self.chance.choice(("transfer", "transfer", "remove", "back", "back"))
        if action == "back":
            self.group.put_back()
        else:
            self.group.ask(action, self.chance.choice(sorted(self.group.members)))

    def _clock(self) -> None:
        # A clock set back delays waiting messages, and a small step forward takes effect immediately.
        steps = (
            (30.0, 3600.0) if self.plan.kind in ("timers", "retries") else (-3600.0, -2.0, 0.5, 30.0, 3600.0)
        )
        step = self.chance.choice(steps)
        self.chance.choice(self.cluster.machines).step_clock(step)

    def _slow_disk(self) -> None:
        self._broker().disk.sync_s = self.chance.choice((0.05, 0.6))
        self.cluster.seen["slow disk"] += 1

    def _full(self) -> None:
        disk = self._broker().disk
        disk.full = True
        self._for_a_while(disk.heal)

    def _io_error(self) -> None:
        disk = self._broker().disk
        disk.write_errors, disk.sync_errors = self.chance.choice(((0.1, 0.0), (0.0, 0.1)))
        self._for_a_while(disk.heal, 1.0)

    def _members(self) -> None:
        if self.clients.members and self.chance.random() < 0.5:
            self.clients.kill_member(self.chance.choice(self.clients.members))
        self._add_member()

    # -- afterwards

    def _heal(self) -> None:
        self._healed = self.clients.patient = True
        self.cluster.heal()
        self.scheduler.run_until(lambda: not any(each.stopping for each in self.cluster.brokers), 30)
        self.cluster.heal()
        self.scheduler.run_until(lambda: all(each.broker or not each.up for each in self.cluster.brokers), 10)
        for broker in self.cluster.brokers:
            if broker.broker is None:
                self._problem("starts again", f"{broker.name}: {broker.failure!r}")
            elif not broker.store.flags.writeable or (self.group and "io error" in self.plan.faults):
                # A failed sync, and in a raft group a failed truncation, is permanent until the next start.
                broker.kill()
                broker.start()
        if self.group is not None:
            self._put_back(self.group)
        limit_s = _ROTTEN_S if "rot" in self.plan.faults else HEALED_S
        self.scheduler.run_until(self._all_arrived, limit_s)
        self.scheduler.run_for(1.0)
        end = self.scheduler.now + limit_s
        while self.scheduler.run_until(self._all_arrived, max(0.0, end - self.scheduler.now)):
            # A retry may be stored that is not visible yet.
            self.scheduler.run_for(0.1)
            if self.pops is None or self._all_arrived():
                break
        if "rot" in self.plan.faults:
            return
        if self.pops is not None:
            for left in self._unacked():
                self._problem("acked in the end", left)
        elif self.chance.random() < _SETTLES:
            self._settle()

    def _all_arrived(self) -> bool:
        return self._done and self._dead and self._caught_up()

    @property
    def _done(self) -> bool:
        """Whether the group has consumed everything."""
        if self.pops is None:
            return self.clients.done
        return not self.clients.sending and next(self._unacked(), None) is None

    def _unacked(self) -> Iterator[str]:
        """Describe the queues with messages that are neither acknowledged nor dead letters."""
        for broker in self.cluster.brokers if self.group is None else self.group.serving:
            if broker.broker is None or broker.slave:
                continue
            parts = broker.broker.parts
            for topic in (TOPIC, *(kind.topic(TOPIC, GROUP) for kind in TopicKind if kind)):
                for queue in broker.store.queues.of_topic(topic):
                    stored = parts.tables.offsets.query(GROUP, topic, queue.queue_id)
                    if queue.max_offset and stored != queue.max_offset:
                        yield f"{broker.host} {topic} {queue.queue_id}: {stored} of {queue.max_offset}"
            if len(parts.pops.leases) or len(parts.pops.revive):
                yield f"{broker.host}: {len(parts.pops.leases)} leases, {len(parts.pops.revive)} checkpoints"

    def _settle(self) -> None:
        """Check that without membership changes each queue keeps its owner and offsets do not decrease."""
        brokers = [each for each in self.cluster.brokers if each.broker and not each.store.slave]
        queues = {
            name_of(MessageQueue(TOPIC, each.name, queue_id))
            for each in brokers
            if (topic := tables_of(each).topics.get(TOPIC)) is not None
            for queue_id in range(topic.read_queue_nums)
        }
        since = self.scheduler.now

        def quiet() -> bool:
            nonlocal since
            if self.clients.owned != Counter(queues) or not self._registered():
                since = self.scheduler.now
            return self.scheduler.now - since >= _QUIET_S

        self.scheduler.run_until(quiet, HEALED_S)
        history = self.clients.history
        self._note_offsets()
        # A broker that lost its topic has no queues to own; other rules report its lost messages.
        settled = (
            history.begin("settled", group=GROUP, topic=TOPIC, queues=tuple(sorted(queues)))
            if queues
            else None
        )
        self.scheduler.run_for(_SETTLED_S)
        if settled is not None:
            history.ok(settled)
        self._note_offsets()

    def _registered(self) -> bool:
        """Return whether the name servers know all masters.

        A broker that could not register, and any broker after a restart of a name server, is unknown until
        its next registration 10 s later. Until then new members have no route and have not joined the group.
        """
        brokers = [each.broker for each in self.cluster.brokers if each.broker and not each.store.slave]
        return all(server.knows(broker) for server in self.cluster.name_servers for broker in brokers)

    def _watch_offsets(self) -> None:
        """Record the group's offsets at intervals. Without kills and lost queues they must not decrease."""
        if not self._healed:
            self._note_offsets()
            self.scheduler.call_later(_OFFSETS_S, self._watch_offsets)

    def _note_offsets(self) -> None:
        """Record the group's offsets on all brokers."""
        for broker in self.cluster.brokers:
            if broker.broker is None or broker.store.slave:
                continue
            for queue_id, offset in tables_of(broker).offsets.queues(GROUP, TOPIC).items():
                place = name_of(MessageQueue(TOPIC, broker.name, queue_id))
                self.clients.history.note("commit", group=GROUP, topic=TOPIC, queue=place, offset=offset)

    @property
    def _dead(self) -> bool:
        """Whether the expected dead letters are stored."""
        if not self.clients.hopeless or self.plan.shape == "two":
            return True
        brokers = [each for each in self.cluster.brokers if each.broker and not each.slave]
        dead = (stored(each.store, DLQ_PREFIX + GROUP, each.name) for each in brokers)
        return any(self.clients.hopeless <= set(map(body_of, messages)) for messages in dead)

    def _put_back(self, group: RaftGroup) -> None:
        if len(group.taking_part) < len(group.members) or not group.caught_up():
            group.put_back()
        self.scheduler.call_later(0.5, self._put_back, group)

    def _caught_up(self) -> bool:
        if self.group is not None:
            return self.group.caught_up()
        return all(
            slave.broker and master.broker and slave.store.log.end == master.store.log.end
            for slave in self.slaves
            for master in self.masters
        )

    def _problem(self, rule: str, what: str) -> None:
        self.problems.append(Problem(rule, what))

    def _read_everything(self) -> None:
        """Record the messages that the brokers hold in the end."""
        history = self.clients.history
        if self.group is not None and self.group.leader is not None:
            self.masters = [self.group.leader]
            self.slaves = self.group.followers
        for broker in self.masters:
            if broker.broker is None:
                continue
            store = broker.store
            for queue in sorted(store.queues.of_topic(TOPIC), key=lambda each: each.queue_id):
                place = name_of(MessageQueue(TOPIC, broker.name, queue.queue_id))
                bounds = {"min": queue.min_offset, "max": queue.max_offset}
                history.note("bounds", topic=TOPIC, queue=place, **bounds)
            for message in stored(store, TOPIC, broker.name):
                facts = {"topic": TOPIC, "queue": name_of(message.queue), "offset": message.queue_offset}
                history.note("read", message=body_of(message), **facts)
            for message in stored(store, DLQ_PREFIX + GROUP, broker.name):
                history.note("dead", message=body_of(message), group=GROUP)

    def _compare_with_group(self, group: RaftGroup) -> None:
        group.look()
        if not self.masters:
            self._problem("leads again", f"nobody leads {HEALED_S:g} s after the last fault")
            return
        group.check_topics(self.masters[0])
        invented = self.clients.handled - {
            body_of(each) for each in stored(self.masters[0].store, TOPIC, "a")
        }
        if invented:
            self._problem("only committed is read", f"handled, and not in the log: {sorted(invented)}")

    def _compare_replicas(self) -> None:
        """Check that each slave or follower has the same bytes as its master and serves the same messages."""
        if "rot" in self.plan.faults:
            return
        if self.group is not None:
            self._compare_with_group(self.group)
        for slave, master in zip(self.slaves, itertools.cycle(self.masters), strict=False):
            if master.broker is None or slave.broker is None:
                continue
            mine, its = master.store, slave.store
            if mine.log.end != its.log.end:
                state = slave.broker.parts.replication.facts()
                self._problem(
                    "replicas", f"the slave ends at {its.log.end}, the master at {mine.log.end}: {state}"
                )
            start, end = max(mine.log.min_position, its.log.min_position), min(mine.log.end, its.log.end)
            if log_bytes(mine, start, end) != log_bytes(its, start, end):
                self._problem("replicas", f"the logs differ between {start} and {end}")
            for queue in mine.queues.of_topic(TOPIC):
                if mine.log.end == its.log.end and its.max_offset(TOPIC, queue.queue_id) != queue.max_offset:
                    self._problem("replicas", f"queue {queue.queue_id} of the slave has another end")
            lost = self.clients.stored_for_sure - {body_of(each) for each in stored(its, TOPIC, slave.name)}
            if lost:
                self._problem("replicas", f"acknowledged, and not on the slave: {sorted(lost)}")


def tables_of(machine: BrokerMachine) -> DurableTables:
    """Return the tables of a running broker."""
    assert machine.broker is not None
    return machine.broker.parts.tables


def log_bytes(store: MessageStore, start: int, end: int) -> bytes:
    """Return the log from one position to another, across segments."""
    size = store.log.segment_size
    pieces = []
    while start < end:
        stop = min(end, start - start % size + size)
        data = store.log.read(start, stop - start, WAITING)
        pieces.append(b"" if data is None else bytes(data))
        start = stop
    return b"".join(pieces)


def body_of(message: MessageExt) -> str:
    return message.body.rstrip(b".").decode(errors="replace")


def stored(store: MessageStore, topic: str, broker: str) -> Iterator[MessageExt]:
    """Yield all messages of a topic after a check of their checksums."""
    for queue in sorted(store.queues.of_topic(topic), key=lambda each: each.queue_id):
        offset = queue.min_offset
        while offset < queue.max_offset:
            got = store.get_messages(topic, queue.queue_id, offset, 1024, bulk=True, reads=WAITING)
            for buffer in got.buffers:
                try:
                    yield from decode_messages(buffer, broker, [])
                except RecordError:  # the body's checksum does not cover this damage
                    continue
            offset = max(got.next_begin_offset, offset + 1)
