"""The filter server: it filters a consumer's pulls with the group's filter class.

It handles two requests: the upload of a filter class (302) and the pull (11). It forwards a pull to the
broker with a subscription to all messages and removes the messages that the class rejects. While no message
matches, it pulls again until the pull's timeout. If the class fails, the pull fails, because otherwise the
consumer would skip messages that the class has not examined.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

import msgspec

from cometmq import logs
from cometmq.errors import CometError, CommandError
from cometmq.filtersrv.filters import Filter
from cometmq.periodic import Periodic
from cometmq.protocol import codes, headers
from cometmq.protocol.codes import PullSysFlag, RequestCode, ResponseCode, handlers_of, handles
from cometmq.protocol.frame import Frame
from cometmq.protocol.headers import PullMessageRequestHeader
from cometmq.protocol.record.one import record_starts
from cometmq.remoting import Connection, Limits, RemotingClient, RemotingServer

log = logs.logger(__name__)

REGISTER_S = 10.0
MAX_FILTERS = 32  # maximum number of classes; each class has a process, which takes about 25 MiB
MAX_SOURCE_BYTES = 256 << 10  # maximum size of a filter class's source, in bytes
IDLE_TIMEOUT_S = 120.0  # time in seconds after which an unused filter class is removed
MAX_PULLS_PER_CONNECTION = 4_096  # maximum concurrent pulls of one connection; most of them wait for messages
HELD_MOST_S = 30.0
BROKER_TIMEOUT_S = 10.0  # maximum time for the broker's answer after the pull's suspend time, in seconds
MAX_FILTERED_BYTES = 64 << 20  # maximum size of all messages that wait for a filter, in bytes
MAX_FILTERED_BYTES_PER_CLASS = 8 << 20  # maximum size of messages that wait for one filter class, in bytes


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a broker passes to the filter server that it starts."""

    broker: str  # The address at which the filter server reaches the broker
    host: str  # The host that consumers connect to
    interface: str  # The local address to listen on
    token: str  # A secret that proves to the broker that it has started this filter server


@dataclass(eq=False)
class FilterServer:
    """A filter server with `start()` and `stop()`. It must be created in a running event loop."""

    settings: Settings

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.filters: dict[tuple[str, str], Filter] = {}  # filter classes by group and topic
        self._loading = 0
        self._judged = 0  # total size of the messages that wait for a filter, in bytes
        self._client = RemotingClient()
        self._server = RemotingServer(handlers_of(self), limits=Limits(handlers=MAX_PULLS_PER_CONNECTION))
        self._timer = Periodic(self._loop, REGISTER_S, self.look_round, name="registration with the broker")
        self.addr = ""

    async def start(self) -> None:
        """Listen, then register with the broker. Raises OSError."""
        port = await self._server.start(self.settings.interface, 0)
        host = self.settings.host
        self.addr = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await self.look_round()
        self._timer.start()

    async def stop(self) -> None:
        """Close the connections and end the worker processes."""
        self._timer.cancel()
        await self._server.stop(0)
        await asyncio.gather(*(each.close() for each in self.filters.values()))
        await self._client.close()

    async def look_round(self) -> None:
        """Remove filter classes unused for IDLE_TIMEOUT_S and register this filter server with the broker."""
        for key, each in list(self.filters.items()):
            if self._loop.time() - each.used_at > IDLE_TIMEOUT_S and self.filters.get(key) is each:
                del self.filters[key]
                await each.close()
        header = headers.RegisterFilterServerRequestHeader(
            filter_server_addr=self.addr, token=self.settings.token
        )
        request = Frame.request(RequestCode.REGISTER_FILTER_SERVER, header)
        try:
            answer = await self._client.call(self.settings.broker, request)
        except CometError as error:
            log.warning("could not register with the broker: %s", error)
            return
        if answer.code != ResponseCode.SUCCESS:
            log.warning("broker %s refused the registration: %s", self.settings.broker, answer.remark)

    # -- classes

    @handles(RequestCode.REGISTER_MESSAGE_FILTER_CLASS)
    async def register_message_filter_class(self, _connection: Connection, frame: Frame) -> Frame:
        """Load the uploaded class of a group and topic. If it loads, it replaces the previous one."""
        header = frame.header(headers.RegisterMessageFilterClassRequestHeader)
        source = self._checked(header, bytes(frame.body))
        key = header.consumer_group, header.topic
        known = self.filters.get(key)
        if known is not None and (known.name, known.source) == (header.class_name, source):
            return frame.response()
        if len(self.filters.keys() | {key}) + self._loading > MAX_FILTERS:
            raise CommandError(
                ResponseCode.SYSTEM_BUSY, f"the limit of {MAX_FILTERS} filter classes is reached"
            )
        loaded = Filter(header.class_name, source, self._loop.time())
        self._loading += 1
        try:
            await loaded.load()
        finally:
            self._loading -= 1
        known, self.filters[key] = self.filters.get(key), loaded
        if known is not None:
            log.warning("group %s on topic %s: a new filter source now applies to all members", *key)
            await known.close()
        log.info("filter class %s now serves group %s on topic %s", header.class_name, *key)
        return frame.response()

    @staticmethod
    def _checked(header: headers.RegisterMessageFilterClassRequestHeader, source: bytes) -> str:
        """Return the source of an uploaded filter class as text. Raises CommandError if it is invalid."""
        problem = ""
        if not codes.is_legal_name(header.consumer_group, codes.MAX_GROUP_LENGTH):
            problem = "consumerGroup is no name of a group"
        elif not codes.is_legal_name(header.topic, codes.MAX_TOPIC_LENGTH):
            problem = "topic is no name of a topic"
        elif not header.class_name.isidentifier() or len(header.class_name) > codes.MAX_GROUP_LENGTH:
            problem = "className is no name of a Python class"
        elif len(source) > MAX_SOURCE_BYTES:
            problem = f"the source has {len(source)} bytes, at most {MAX_SOURCE_BYTES} are allowed"
        elif header.class_crc != zlib.crc32(source) & 0x7FFFFFFF:
            problem = f"classCRC {header.class_crc} is not that of the source"
        try:
            text = source.decode()
        except UnicodeDecodeError as error:
            problem = problem or f"the source is no UTF-8: {error.reason} at byte {error.start}"
        if problem:
            raise CommandError.failed(problem)
        return text

    # -- pulls

    @handles(RequestCode.PULL_MESSAGE)
    async def pull_message(self, connection: Connection, frame: Frame) -> Frame:
        """Return the messages that match the group's filter class, beginning at the requested offset."""
        header = frame.header(PullMessageRequestHeader)
        held_s = 0.0
        if header.sys_flag & PullSysFlag.SUSPEND:
            held_s = min(max(0, header.suspend_timeout_millis or 0) / 1000, HELD_MOST_S)
        until = self._loop.time() + held_s
        flags = (header.sys_flag | PullSysFlag.SUBSCRIPTION) & ~PullSysFlag.CLASS_FILTER
        header = msgspec.structs.replace(header, sys_flag=flags, subscription="*", expression_type="TAG")
        nothing: Frame | None = None  # the answer if no message matches in time
        while nothing is None or (self._loop.time() < until and not connection.closed):
            try:
                answer = await self._ask_broker(frame.version, header, until - self._loop.time())
                found = answer.code == ResponseCode.SUCCESS
                matching = await self._matching(self._filter(header), bytes(answer.body)) if found else b""
            except CommandError:
                if nothing is None:
                    raise
                # Return no messages. The consumer's next pull begins at the offset of the failed pull and
                # reports the error.
                break
            if matching or not found:
                return frame.response(answer.code, answer.remark, ext=answer.ext, body=matching)
            nothing = frame.response(
                ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", ext=answer.ext
            )
            # Only the first forwarded pull commits the consumer's offset: by the time of the later pulls, the
            # consumer may have stored a later offset.
            flags &= ~PullSysFlag.COMMIT_OFFSET
            offset = answer.header(headers.PullMessageResponseHeader).next_begin_offset
            header = msgspec.structs.replace(header, sys_flag=flags, queue_offset=offset)
        return nothing

    def _filter(self, header: PullMessageRequestHeader) -> Filter:
        """Return the filter class that applies to a pull. Raises CommandError if no class was uploaded."""
        found = self.filters.get((header.consumer_group, header.topic))
        if found is None:
            raise CommandError(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                f"no filter class of group {header.consumer_group} for topic {header.topic} was uploaded",
            )
        found.used_at = self._loop.time()
        return found

    async def _ask_broker(self, version: int, header: PullMessageRequestHeader, held_s: float) -> Frame:
        """Return the broker's response to a pull, held for up to `held_s` seconds. Raises CommandError."""
        self._filter(header)
        flags = header.sys_flag
        forwarded = msgspec.structs.replace(
            header,
            sys_flag=int(flags if held_s > 0 else flags & ~PullSysFlag.SUSPEND),
            suspend_timeout_millis=max(0, int(held_s * 1000)),
        )
        request = Frame.request(RequestCode.PULL_MESSAGE, forwarded, version=version)
        try:
            return await self._client.call(self.settings.broker, request, max(0.0, held_s) + BROKER_TIMEOUT_S)
        except CometError as error:
            raise CommandError.failed(f"the pull failed: {error}") from error

    async def _matching(self, found: Filter, records: bytes) -> bytes:
        """Return the stored records that match the group's filter class. Raises CommandError."""
        size = len(records)
        for taken, most in ((self._judged, MAX_FILTERED_BYTES), (found.judged, MAX_FILTERED_BYTES_PER_CLASS)):
            if taken and taken + size > most:
                raise CommandError(ResponseCode.FLOW_CONTROL, "too many messages are waiting to be filtered")
        starts, end = record_starts(records)
        self._judged += size
        found.judged += size
        try:
            verdicts = await found.judge(records[:end], len(starts))
        finally:
            self._judged -= size
            found.judged -= size
        bounds = zip(starts, [*starts[1:], end], verdicts, strict=True)
        return b"".join(records[start:stop] for start, stop, matches in bounds if matches)
