"""The codec of remoting frames (docs/reference/remoting.md, Frame, JSON header).

    4 bytes  N: number of bytes that follow
    4 bytes  high byte: serialisation of the header (0 JSON, 1 binary), low 24 bits: its length H
    H bytes  header
    rest     body

The decoder reads both serialisations. The high byte before a header shows which one the header has. JSON
headers are read as tolerantly as by Apache's server: a header that msgspec's strict JSON reader refuses goes
to the lenient reader. If the lenient reader refuses it, too, FrameError is raised.

Budget: decoding a send of the Java client (code 310, about 400 header bytes) takes at most 2.2 µs, including
its typed header. The headers of sends, pulls and ends of transactions, nine tenths of all frames, are decoded
from JSON directly into a typed struct without an ext dict: 1.8 µs, against 3.0 µs with a dict.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import structs

from cometmq.errors import FrameError
from cometmq.protocol import binary_header
from cometmq.protocol.codes import (
    LANGUAGE_ORDINALS,
    LANGUAGES,
    MAX_FRAME_LENGTH,
    VERSION_4_9_7,
    language_name,
)
from cometmq.protocol.headers import (
    EndTransactionRequestHeader,
    Header,
    PullMessageRequestHeader,
    SendMessageRequestHeader,
    SendMessageRequestHeaderV2,
    decode_ext,
    encode_ext,
)
from cometmq.protocol.lenient import LenientError, ObjectKey, read_lenient

json_encode = msgspec.json.encode

JSON = 0
BINARY = 1

RESPONSE_FLAG = 1
ONEWAY_FLAG = 2

MAX_EXT_FIELDS = 256
LENGTH_MASK = 0xFFFFFF
MAX_LENIENT_HEADER = 256 << 10
"""The maximum size in bytes of a header that is not standard JSON, which takes up to 1 µs per byte to read.

A header with the largest property string fits, even if each of its characters is escaped.
"""

_LETTER_CODES = frozenset({310, 320, 325})

_word_at = struct.Struct(">I").unpack_from
_word_and_prefix_at = struct.Struct(">I12s").unpack_from
_two_words = struct.Struct(">II").pack

H = TypeVar("H", bound=Header)
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Bytes = bytes | memoryview


_json = msgspec.json.encode
# The encoded form of names is cached, because a producer uses few groups and topics.
_name = lru_cache(maxsize=256)(_json)
_BOOL = (b"false", b"true")
_TEMPLATE = (
    b'{"a":%b,"b":%b,"c":%b,"d":"%d","e":"%d","f":"%d","g":"%d","h":"%d",'
    b'"i":%b,"j":"%d","k":"%b",%b"m":"%b"%b}'
)


def send_ext(header: SendMessageRequestHeaderV2) -> bytes | None:
    """Return the JSON object of a send's ext fields in Java's order, or None if a usual field is missing.

    A producer writes this object for each message, so it is formatted in one step. Encoding a whole frame
    then takes 2.0 µs; with a dict of the fields it would take 4.2 µs.
    """
    group = header.producer_group
    default_topic = header.default_topic
    default_queues = header.default_topic_queue_nums
    properties = header.properties
    reconsume_times = header.reconsume_times
    unit_mode = header.unit_mode
    batch = header.batch
    if (
        group is None
        or default_topic is None
        or default_queues is None
        or properties is None
        or reconsume_times is None
        or unit_mode is None
        or batch is None
    ):
        return None
    maximum = header.max_reconsume_times
    bname = header.bname
    return _TEMPLATE % (
        _name(group),
        _name(header.topic),
        _name(default_topic),
        default_queues,
        header.queue_id,
        header.sys_flag,
        header.born_timestamp,
        header.flag,
        _json(properties),
        reconsume_times,
        _BOOL[unit_mode],
        b"" if maximum is None else b'"l":"%d",' % maximum,
        _BOOL[batch],
        b"" if bname is None else b',"n":' + _name(bname),
    )


class Frame(msgspec.Struct, gc=False, kw_only=True):
    """One command: a request or a response.

    The ext fields are stored either as text in `ext_fields` or as a typed header in `typed`. The methods
    `ext` and `header` work for both forms.

    Attributes:
        opaque: The 32-bit number that links a response to its request.
        flag: Bits: 1 marks a response, 2 a one-way request.
        body: The raw bytes. In a frame decoded from a receive buffer the body is a view, valid until the
            handler returns.
        serialize_type: The serialisation of the header: 0 for JSON, 1 for binary.
    """

    code: I32
    opaque: I32 = 0
    flag: I32 = 0
    language: str = "PYTHON"
    version: I32 = VERSION_4_9_7
    remark: str | None = None
    body: Bytes = b""
    serialize_type: int = JSON
    ext_fields: dict[str, str] | None = None
    typed: Header | None = None
    raw_header: bytes = b""
    """The header's JSON text if it was decoded into `typed`, which has only the fields that it declares."""

    # -- creation

    @staticmethod
    def request(
        code: int,
        header: Header | None = None,
        body: Bytes = b"",
        *,
        ext: dict[str, str] | None = None,
        remark: str | None = None,
        oneway: bool = False,
        opaque: int = 0,
        language: str = "PYTHON",
        version: int = VERSION_4_9_7,
    ) -> Frame:
        """Create a request. `ext` holds ext fields that are added to the fields of `header`."""
        fields = ext if header is None else {**encode_ext(header), **ext} if ext else None
        return Frame(
            code=code,
            opaque=opaque,
            flag=ONEWAY_FLAG if oneway else 0,
            language=language,
            version=version,
            remark=remark,
            body=body,
            ext_fields=fields,
            typed=header if fields is None else None,
        )

    def response(
        self,
        code: int = 0,
        remark: str | None = None,
        *,
        header: Header | None = None,
        ext: dict[str, str] | None = None,
        body: Bytes = b"",
    ) -> Frame:
        """Create the response to this request, in the request's serialisation.

        With ext={} the response has an empty ext object; with ext=None it has no ext object.
        """
        fields = ext if header is None else {**encode_ext(header), **ext} if ext else None
        return Frame(
            code=code,
            opaque=self.opaque,
            flag=RESPONSE_FLAG,
            # Clients in languages other than Java check the language of a response. They expect Java, which
            # Apache's servers send.
            language="JAVA",
            remark=remark,
            body=body,
            serialize_type=self.serialize_type,
            ext_fields=fields,
            typed=header if fields is None else None,
        )

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        remark = "" if self.remark is None else f", remark {self.remark!r}"
        fields = self.typed if self.typed is not None else self.ext_fields
        return f"<{kind} {self.code}, opaque {self.opaque}, {fields}{remark}, body of {len(self.body)} bytes>"

    # -- reading

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    @property
    def ext(self) -> dict[str, str] | None:
        """All ext fields as text, or None if the header has none. The dict must not be changed."""
        if self.ext_fields is None and self.typed is not None:
            if self.raw_header:
                self.ext_fields = _decode_json(self.raw_header).ext_fields
            else:
                self.ext_fields = encode_ext(self.typed)
        return self.ext_fields

    def header(self, cls: type[H]) -> H:
        """Return the ext fields as a typed header. Raises HeaderError, which names the invalid field."""
        typed = self.typed
        if isinstance(typed, cls):
            return typed
        if cls is SendMessageRequestHeader and self.code in _LETTER_CODES:
            return cast(H, decode_ext(SendMessageRequestHeaderV2, self.ext))
        return decode_ext(cls, self.ext)


# -- typed decoding of the frequent headers

# The names of languages as Java, C++ and Go write them. With a closed set of names, decoding creates no
# string per frame. A frame with another name goes to the slow decoder.
if TYPE_CHECKING:
    _Language = str
else:
    _Language = Literal[LANGUAGES]
# The following structs are decoded from the header's JSON. A field of the frame that this JSON does not
# contain, such as the body, gets a JSON key that no client uses ("#b" and others). A hostile sender can set
# the body ("#b") and the header text ("#r") by these keys, but the decoder overwrites both afterwards. The
# types of "#s" and "#e" permit only the default.


class _TypedFrame(Frame, gc=False, kw_only=True):
    body: Any = msgspec.field(name="#b", default=b"")
    serialize_type: Literal[0] = msgspec.field(name="#s", default=0)
    ext_fields: None = msgspec.field(name="#e", default=None)
    raw_header: Any = msgspec.field(name="#r", default=b"")
    language: _Language = "OTHER"
    version: I32 = 0


class _SendFrame(_TypedFrame, gc=False, kw_only=True):
    typed: SendMessageRequestHeader = msgspec.field(name="extFields")


class _SendFrameV2(_TypedFrame, gc=False, kw_only=True):
    typed: SendMessageRequestHeaderV2 = msgspec.field(name="extFields")


class _PullFrame(_TypedFrame, gc=False, kw_only=True):
    typed: PullMessageRequestHeader = msgspec.field(name="extFields")


class _EndFrame(_TypedFrame, gc=False, kw_only=True):
    typed: EndTransactionRequestHeader = msgspec.field(name="extFields")


class _ExtFrame(_TypedFrame, gc=False, kw_only=True):
    ext_fields: dict[str, str] | None = msgspec.field(name="extFields", default=None)  # type: ignore[assignment]
    typed: None = msgspec.field(name="#t", default=None)


_send = msgspec.json.Decoder(_SendFrame, strict=False).decode
_send_v2 = msgspec.json.Decoder(_SendFrameV2, strict=False).decode
_pull = msgspec.json.Decoder(_PullFrame, strict=False).decode
_end = msgspec.json.Decoder(_EndFrame, strict=False).decode
_plain = msgspec.json.Decoder(_ExtFrame, strict=False).decode

# The decoders of frequent headers, by the first bytes of the header's JSON. Java, C++ and Go write the keys
# in alphabetical order, so these bytes hold the request code.
_PREFIX = len(b'{"code":310,')
_TYPED: dict[bytes, Callable[[bytes], Frame]] = {
    b'{"code":310,': _send_v2,
    b'{"code":320,': _send_v2,
    b'{"code":361,': _pull,
    b'{"code":11,"': _pull,
    b'{"code":37,"': _end,
    b'{"code":10,"': _send,
}
# All exceptions that hostile input can cause in a decoder.
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_frame(payload: Bytes) -> Frame:
    """Decode the bytes after a frame's length field. If they are a memoryview, the body is a slice of it.

    Raises FrameError if the frame is invalid. The caller must close the connection.
    """
    return decode_frame_at(payload, 0, len(payload))


def decode_frame_at(buffer: Bytes, start: int, stop: int) -> Frame:
    """Decode the frame whose bytes after the length field are buffer[start:stop]. Raises FrameError."""
    if stop - start < 4 + _PREFIX:
        return _decode_rest(buffer, start, stop)
    word: int
    prefix: bytes
    word, prefix = _word_and_prefix_at(buffer, start)
    decode = _TYPED.get(prefix)
    # The low 24 bits of `word` are the header's length. For a binary header, the high byte is 1, so that
    # `end` is larger than `stop` and `_decode_rest` decodes the frame.
    end = start + 4 + word
    if decode is None or end > stop:
        return _decode_rest(buffer, start, stop)
    header = bytes(buffer[start + 4 : end])
    try:
        frame = decode(header)
    except _REFUSED:
        return _decode_rest(buffer, start, stop)
    frame.raw_header = header
    frame.body = buffer[end:stop] if end < stop else b""
    return frame


def _decode_rest(buffer: Bytes, start: int, stop: int) -> Frame:
    """Decode a frame of any kind. Frequent kinds of headers have a faster decoder."""
    length = stop - start
    if length < 4:
        raise FrameError(f"frame has {length} bytes, at least 4 are needed")
    word: int = _word_at(buffer, start)[0]
    end = start + 4 + (word & LENGTH_MASK)
    if end > stop:
        beyond = end - start - 4
        raise FrameError(f"the header length is {beyond}, but the frame has only {length - 4} bytes left")
    header = bytes(buffer[start + 4 : end])
    if word <= LENGTH_MASK:
        frame = _decode_json(header)
    elif word >> 24 == BINARY:
        code, language, version, opaque, flag, remark, ext = binary_header.decode(header)
        frame = Frame(
            code=code,
            language=language,
            version=version,
            opaque=opaque,
            flag=flag,
            remark=remark,
            ext_fields=ext,
            serialize_type=BINARY,
        )
    else:
        raise FrameError(f"serialisation type {word >> 24} is unknown (0 is JSON, 1 is binary)")
    frame.body = buffer[end:stop] if end < stop else b""
    return frame


def _decode_json(header: bytes) -> Frame:
    try:
        frame = _plain(header)
    except _REFUSED:
        return _decode_lenient(header)
    if frame.ext_fields is not None and len(frame.ext_fields) > MAX_EXT_FIELDS:
        raise FrameError(f"{len(frame.ext_fields)} ext fields, at most {MAX_EXT_FIELDS} are allowed")
    frame.raw_header = b""
    return frame


def _decode_lenient(header: bytes) -> Frame:
    if len(header) > MAX_LENIENT_HEADER:
        raise FrameError(f"JSON header of {len(header)} bytes is not standard JSON")
    try:
        fields = read_lenient(header)
    except LenientError as error:
        raise FrameError(f"JSON header: {error}") from None
    if not isinstance(fields, dict):
        raise FrameError("JSON header is not an object")
    remark = fields.get("remark")
    return Frame(
        code=_int_of(fields, "code"),
        opaque=_int_of(fields, "opaque"),
        flag=_int_of(fields, "flag"),
        language=_language_of(fields.get("language")),
        version=_int_of(fields, "version"),
        remark=None if remark is None else _text_of(remark),
        ext_fields=_ext_of(fields.get("extFields")),
    )


def _int_of(fields: dict[Any, Any], name: str) -> int:
    """Return a field of the header as an int, by Java's rules.

    If the field is absent, null or an empty text, the result is 0. Any other text is parsed as a number.
    """
    value = fields.get(name, 0)
    if value is None or value == "":
        return 0
    if isinstance(value, bool):
        return int(value)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise FrameError(f"JSON header: {name} is not a number") from None
    if not -(2**31) <= number < 2**31:
        raise FrameError(f"JSON header: {name} is out of range for a 32-bit number")
    return number


def _language_of(value: object) -> str:
    """Return the name of a language given by name or ordinal, or OTHER if it is unknown."""
    if isinstance(value, int):
        return language_name(value)
    return value if isinstance(value, str) and value in LANGUAGE_ORDINALS else "OTHER"


def _ext_of(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FrameError("JSON header: extFields is not an object")
    if len(value) > MAX_EXT_FIELDS:
        raise FrameError(f"{len(value)} ext fields, at most {MAX_EXT_FIELDS} are allowed")
    return {_text_of(key): _text_of(item) for key, item in value.items() if item is not None}


def _text_of(value: object) -> str:
    """Return a JSON value as text, as Java does when it reads a map of strings."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ObjectKey):
        value = value.as_dict()
    return json_encode(value).decode() if isinstance(value, dict | list) else str(value)


# -- writing

_LANGUAGE_BYTES = {name: name.encode() for name in LANGUAGE_ORDINALS}
_HEADER = (
    b'{"code":%d,%b"flag":%d,"language":"%b","opaque":%d,%b"serializeTypeCurrentRPC":"JSON","version":%d}'
)


def encode_frame(frame: Frame) -> bytes:
    """Encode a frame, including its length field, with the keys in Java's order. Raises FrameError."""
    header = _encode_header(frame)
    length = len(header)
    if length > LENGTH_MASK:
        raise FrameError(f"the header has {length} bytes, at most {LENGTH_MASK} are allowed")
    body = frame.body
    size = 8 + length + len(body)
    if size > MAX_FRAME_LENGTH:
        # A longer frame is not sent, because its receiver would close the connection. All other requests on
        # the connection would then fail, too.
        raise FrameError(f"the frame has {size} bytes, at most {MAX_FRAME_LENGTH} are allowed")
    head = _two_words(size - 4, frame.serialize_type << 24 | length) + header
    return head + body if body else head


def _encode_header(frame: Frame) -> bytes:
    if frame.serialize_type == BINARY:
        return binary_header.encode(
            frame.code, frame.language, frame.version, frame.opaque, frame.flag, frame.remark, frame.ext
        )
    try:
        ext = _ext_json(frame)
        ext_text = b"" if ext is None else b'"extFields":%b,' % ext
        remark = b"" if frame.remark is None else b'"remark":%b,' % json_encode(frame.remark)
    except UnicodeEncodeError:
        return _encode_header(_encodable(frame))
    language = _LANGUAGE_BYTES.get(frame.language, b"OTHER")
    return _HEADER % (frame.code, ext_text, frame.flag, language, frame.opaque, remark, frame.version)


def _ext_json(frame: Frame) -> bytes | None:
    typed = frame.typed
    if isinstance(typed, SendMessageRequestHeaderV2) and frame.ext_fields is None and not frame.raw_header:
        text = send_ext(typed)
        if text is not None:
            return text
    ext = frame.ext
    return None if ext is None else json_encode(ext)


def _encodable(frame: Frame) -> Frame:
    """Return the frame with unpaired surrogates replaced by question marks, as Java's encoder does."""
    ext = frame.ext
    remark = None if frame.remark is None else _utf8(frame.remark)
    fields = None if ext is None else {_utf8(key): _utf8(text) for key, text in ext.items()}
    return structs.replace(frame, remark=remark, ext_fields=fields, typed=None, raw_header=b"")


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
