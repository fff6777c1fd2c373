"""The fast path for sends whose header equals an earlier header, except for three values.

The headers of a producer differ in the born time, the unique key and the request number; everything else
(group, topic, queue, flags, other properties, version) repeats. When such a header has arrived twice, the
result of parsing and checking it (protocol/frame.py, send.py) is cached under the bytes around the three
values. From then on, these bytes are only compared, not parsed, and the message goes directly to the store.
This reduces the CPU time of a 1 KiB send to two thirds, not counting the sockets. The headers of half
messages are cached, too.

The fast path assumes nothing about how clients write headers. Before a header is cached, this module creates
a twin with three other values, and checks that parsing produces the same result for both, except for these
values. The three values may consist only of digits and letters, which mean the same in JSON as they are
written. Every other frame takes the normal path, which parses the header.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from msgspec.structs import replace

from cometmq.broker.base import compat
from cometmq.broker.base.replies import Sender, transaction_field
from cometmq.broker.send.stored_form import StoredForm, StoredForms
from cometmq.errors import FrameError
from cometmq.protocol.codes import TRANS_HALF_TOPIC
from cometmq.protocol.frame import Frame, decode_frame
from cometmq.protocol.headers import SendMessageRequestHeader, SendMessageRequestHeaderV2
from cometmq.protocol.properties.values import UNIQUE_KEY, index_keys
from cometmq.remoting import Connection
from cometmq.store import Appender, ConsumeQueue, QueueTable, TickMessage, Traits

# The maximum number of cached send headers: enough for 2,000 topics of 10 queues.
MAX_TEMPLATES = 20_000
MAX_BYTES = 16 << 20  # maximum total size of cached send headers, in bytes; 20,000 usual headers take 9 MB
# The maximum number of layouts of equally long headers. A layout is the position and the length of the born
# time, the unique key and the request number.
MAX_CUTS = 8
# After MAX_MISSES headers that could not be cached, no attempts are made for PAUSE_HEADERS headers. Some
# producers set a different property value in each message, so caching their headers is useless. An attempt
# costs 2 µs per message, and the pause reduces this to 0.25 µs. A header is cached when it arrives for the
# second time, so a producer causes one miss for each queue that it uses. MAX_MISSES is so large that usual
# producers cause no pause in this way.
MAX_MISSES = 12_000
PAUSE_HEADERS = 100_000
MAX_HEADER_BYTES = 2_048  # maximum length of a send header that can be cached, in bytes
INT32_MAX = 2**31 - 1

BORN = b'"g":"'
NAMED_KEY = b"__transactionId__\x01"
# A number whose first digit is 0 is either 0 or invalid JSON. A header with such a number is not served from
# the cache.
ZERO = ord("0")
_word = struct.Struct(">I").pack
# Matches the bytes of a header that follow BORN, the key of the born time. The variable parts are the born
# time, the unique key and the request number; the constant parts are the bytes after each of them. The atomic
# group `(?>...)` ends at the first unique key. Otherwise the search would be repeated at each further key,
# and a hostile header could contain many of them.
PARTS = re.compile(
    rb'(?>(\d{1,18})(".*?UNIQ_KEY\\u0001)([0-9A-Za-z]+)(?=\\u0002|"))(.*"opaque":)(\d+)(.*)', re.DOTALL
)

Parts = tuple[bytes, bytes, bytes, bytes, bytes, bytes]
Cut = Callable[[bytes], Parts]


class Known(NamedTuple):
    """The result of parsing and checking a send header, cached for equal headers.

    `queue_id` is the queue id in the response. For a half message, it differs from that of `queue`.
    `names_key` tells whether the response and the end of the stored properties contain the unique key as
    transaction id, as they do for half messages of 5.x clients.
    """

    queue: ConsumeQueue
    form: StoredForm
    traits: Traits
    queue_id: int
    names_key: bool


HalfProperties = Callable[[Frame, SendMessageRequestHeader, int, bytes], bytes | None]
"""A function that returns the stored properties of a half message, or None for any other message.

Its arguments are the request, its header, the queue id, and the stored properties of a plain message.
"""


class SendTemplates:
    """A cache of send headers: a send with a cached header is stored without being parsed."""

    __slots__ = (
        "_bytes", "_cuts", "_enqueue", "_forms", "_half_properties", "_known", "_patience", "_queues",
        "_resting", "_seen", "_traits",
    )  # fmt: skip

    def __init__(
        self, appender: Appender, queues: QueueTable, forms: StoredForms, half_properties: HalfProperties
    ) -> None:
        self._half_properties = half_properties
        self._enqueue = appender.enqueue
        self._queues = queues
        self._forms = forms
        # Functions that split the part of a header after BORN, the key of the born time, into its variable
        # and constant parts. The dict's key is the length of that part of the header.
        self._cuts: dict[int, list[Cut]] = {}
        # The cached results of parsing. The key is the constant parts of a header, which surround the born
        # time, the unique key and the request number.
        self._known: dict[tuple[bytes, bytes, bytes, bytes], Known] = {}
        # The traits of the cached headers, each mapped to itself, so that equal ones share one object.
        self._traits: dict[Traits, Traits] = {}
        self._bytes = 0
        # The hashes of headers that have arrived once. A header is cached when its hash arrives again.
        self._seen: set[int] = set()
        self._patience = MAX_MISSES
        self._resting = 0

    def __len__(self) -> int:
        return len(self._known)

    def forget(self) -> None:
        """Clear the cache, because parsing the cached headers may have other results from now on."""
        self._cuts.clear()
        self._known.clear()
        self._traits.clear()
        self._bytes = 0

    def send(self, connection: Connection, buffer: memoryview, start: int, end: int, stop: int) -> bool:
        """Handle a send whose header is `buffer[start:end]` and whose body is `buffer[end:stop]`.

        Return False if the header is not cached: the caller must then parse and handle the send.
        """
        head, _, rest = buffer[start:end].tobytes().partition(BORN)
        for cut in self._cuts.get(len(rest), ()):
            born, first, unique, second, opaque, third = cut(rest)
            known = self._known.get((head, first, second, third))
            if known is not None:
                break
        else:
            return False
        queue, form, traits, queue_id, names_key = known
        if (
            not (unique.isalnum() and opaque.isdigit() and born.isdigit())
            or opaque[0] == ZERO
            or born[0] == ZERO
            or queue.deleted
            or (len(opaque) > 9 and int(opaque) > INT32_MAX)
        ):
            return False
        properties, more = form.before + unique + form.behind, b""
        if names_key:
            properties, more = properties + unique, transaction_field(unique)
        self._enqueue(
            TickMessage(
                Sender(connection, opaque, queue_id, form.waits, more), queue, buffer[end:stop], properties,
                int(born), connection.peer_host, unique if form.only_key else None, traits,
            )
        )  # fmt: skip
        return True

    # -- learning

    def look(self, frame: Frame, header: SendMessageRequestHeader, sys_flag: int) -> None:
        """Cache the header of a parsed plain send or half message, if an equal header has arrived before."""
        if not frame.raw_header:
            return
        if self._resting:
            self._resting -= 1
            return
        head, _, rest = frame.raw_header.partition(BORN)
        found = PARTS.fullmatch(rest) if len(frame.raw_header) <= MAX_HEADER_BYTES else None
        if found is not None and not frame.flag and header.queue_id >= 0:
            parts = cast(Parts, found.groups())
            key = hash((head, *parts[1::2]))
            if key not in self._seen:
                if len(self._seen) >= MAX_TEMPLATES:
                    self._seen.clear()
                self._seen.add(key)
            elif self._learn(head, rest, parts, sys_flag):
                self._seen.discard(key)
                return
        self._patience -= 1
        if self._patience == 0:
            self._patience = MAX_MISSES
            self._resting = PAUSE_HEADERS

    def _learn(self, head: bytes, rest: bytes, parts: Parts, sys_flag: int) -> bool:
        found = self._long_way(head, parts)
        if found is None or found != self._long_way(head, _twin(parts)):
            return False
        topic, stored_in, queue_id, form, traits, names_key = found
        queue = self._queues.find_queue(topic, stored_in)
        if queue is None:
            return False
        key = head, parts[1], parts[3], parts[5]
        new = key not in self._known
        if new and (len(self._known) >= MAX_TEMPLATES or self._bytes >= MAX_BYTES):
            self.forget()
        cuts = self._cuts.setdefault(len(rest), [])
        if all(cut(rest) != parts for cut in cuts):
            if len(cuts) >= MAX_CUTS:
                return False
            cuts.append(_divider(*parts).unpack)
        traits = replace(traits, sys_flag=sys_flag)
        traits = self._traits.setdefault(traits, traits)
        self._known[key] = Known(queue, form, traits, queue_id, names_key)
        if new:
            self._bytes += len(head) + len(rest)
        return True

    def _long_way(self, head: bytes, parts: Parts) -> tuple[str, int, int, StoredForm, Traits, bool] | None:
        """Parse and check a send header. Return the parts of the result that can be cached.

        These are the topic and the queue id in which the message is stored, the requested queue id, the
        stored form, the traits, and `Known.names_key`. The result is None if the parsed born time, unique key
        or request number differ from those in `parts`, or if this is not one plain message or half message.
        """
        born, _, unique, _, opaque, _ = parts
        header = head + BORN + b"".join(parts)
        try:
            frame = decode_frame(_word(len(header)) + header)
        except FrameError:
            return None
        send = frame.typed
        if (
            type(send) is not SendMessageRequestHeaderV2
            or (frame.opaque, frame.flag, send.born_timestamp) != (int(opaque), 0, int(born))
            or send.batch
        ):
            return None
        form, key = self._forms.find(send.properties, frame.version)
        stored = form.before + key + form.behind
        topic, queue_id, names_key = send.topic, send.queue_id, False
        if not form.plain:
            half = self._half_properties(frame, send, queue_id, stored)
            if half is None:
                return None
            topic, queue_id, stored, names_key = TRANS_HALF_TOPIC, 0, half, compat.is_5x(frame.version)
        before, name, behind = stored.partition(UNIQUE_KEY + unique)
        if not name or (names_key and not behind.endswith(NAMED_KEY + unique)):
            return None
        if names_key:
            behind = behind.removesuffix(unique)
        only_key = index_keys(stored) == [unique]
        form = replace(form, before=before + UNIQUE_KEY, behind=behind, only_key=only_key)
        traits = Traits(send.flag, send.sys_flag, send.reconsume_times or 0, form.tags_code)
        return topic, queue_id, send.queue_id, form, traits, names_key


def _divider(*parts: bytes) -> Any:
    return struct.Struct("".join(f"{len(part)}s" for part in parts))


def _twin(parts: Parts) -> Parts:
    """Return a header's parts with another born time, unique key and request number of the same lengths."""
    born, first, unique, second, opaque, third = parts
    return _other(born, b"12"), first, _other(unique, b"YZ"), second, _other(opaque, b"12"), third


def _other(value: bytes, letters: bytes) -> bytes:
    one, other = (bytes((letter,)) * len(value) for letter in letters)
    return other if value == one else one
