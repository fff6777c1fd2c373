"""JSON bodies: an object whose fields become columns, without any loss of information.

If a field is not in the schema, or its column cannot represent the value completely, the field goes to
`body_rest` exactly as it was written: {"its name": its text}. A float or double represents a number
completely if the shortest text of the column's value is the same number: this holds for 0.1, but not for 2^53
+ 1 and 1e-400.

pyarrow's JSON reader is not used, because it splits text into lines, fails for all lines at the first invalid
line, and cannot return the remaining content.
"""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from cometmq import logs
from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import (
    MOST_BYTES,
    MOST_VALUES,
    Parsed,
    check_names,
    too_many_values,
    value_width,
)  # fmt: skip

log = logs.logger(__name__)

_PLAIN: list[tuple[pa.DataType, Any]] = [
    (pa.bool_(), bool),
    (pa.int32(), Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]),
    (pa.int64(), Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]),
    (pa.float32(), float),
    (pa.float64(), float),
    (pa.string(), str),
    (pa.binary(), bytes),
    (pa.date32(), date),
    (pa.timestamp("us", "UTC"), Annotated[datetime, msgspec.Meta(tz=True)]),
]
_TYPES = "boolean, int, bigint, float, double, decimal, string, binary, date, timestamp, array, map, struct"
_KEPT_AS_THEY_ARE = (bytes, date, datetime, Decimal)
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError, ValueError)
_MOST_FIELDS = 1000  # Maximum number of fields with a column of their own, at all nesting depths
_MOST_PLACES = 10 * _MOST_FIELDS  # Maximum number of candidates for columns, including structs and arrays
_MOST_DEPTH = 8
_MOST_NAME = 128  # Maximum length of a field's name, in characters
_MOST_EXPONENT = 1000
_SAMPLE_BODIES = 10_000
_SAMPLE_BYTES = 4 * 1024 * 1024
_SAMPLE_ITEMS = 100  # Maximum number of items of an array from which a type is inferred

_DIGITS = bytes.maketrans(b"123456789.E", b"0000000000e")
"""A translation that changes every digit of a number to 0, so that only its length and exponent remain."""


class _Lossy(NamedTuple):
    """The means to detect values that a column's type cannot represent completely.

    Attributes:
        words: Byte strings that are searched for in a body, and in its translation by `_DIGITS`. A body in
            which none is found has no such value.
        exact: The Python type that represents the value completely.
        same: Returns whether a value of the column's type equals the exact value.
    """

    words: tuple[bytes, ...]
    exact: Any
    same: Callable[[Any, Any], bool]


def _same_float(made: float, exact: Decimal) -> bool:
    with np.errstate(over="ignore"):
        return Decimal(str(np.float32(made))) == exact


def _same_time(made: datetime, exact: str) -> bool:
    made.astimezone(UTC)  # Raises OverflowError if the time is outside Python's range of years
    finer = re.search(r"\.[0-9]{6}([0-9]+)", exact)
    return finer is None or not finer[1].strip("0")


def _is_usual(made: Decimal, _: Decimal) -> bool:
    exponent = made.as_tuple().exponent
    return isinstance(exponent, int) and abs(exponent) <= _MOST_EXPONENT


_LOSSY = {
    # A double is exact for numbers with at most 15 digits and no exponent, a float for at most 6 digits, so
    # only longer numbers need the comparison.
    pa.float64(): _Lossy((b"0" * 16, b"0e"), Decimal, lambda made, exact: Decimal(repr(made)) == exact),
    pa.float32(): _Lossy((b"0" * 7, b"0e"), Decimal, _same_float),
    pa.timestamp("us", "UTC"): _Lossy(  # The type stores microseconds, so it truncates 00.1234567 seconds
        (b"0" * 10, b'"0001-01-01', b'"9999-12-31', b"\\"), str, _same_time
    ),
    pa.binary(): _Lossy(
        (b'="', b"\\"), str, lambda made, exact: binascii.b2a_base64(made, newline=False).decode() == exact
    ),
}
# Every decimal is checked, because pyarrow 26 reads beyond its table of powers for 1e-99999999 and may crash
# the process.
_LOSSY_DECIMAL = _Lossy((b"",), Decimal, _is_usual)


def _lossy(kind: pa.DataType) -> _Lossy | None:
    return _LOSSY_DECIMAL if pa.types.is_decimal128(kind) else _LOSSY.get(kind)


class JsonParser:
    """A parser of JSON bodies into a struct type, whose fields are the object's fields of these names."""

    def __init__(self, fields: pa.StructType) -> None:
        self._whole = msgspec.json.Decoder(_python_type(fields, "body"))
        self._parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
        types = ((field.name, _python_type(field.type, field.name)) for field in fields)
        self._fields = {name: msgspec.json.Decoder(kind | None) for name, kind in types}
        self._widest = _widest(fields)
        self._suspects = _words(fields)
        self._whole_exact = _exact_reader(fields, "body")
        self._exact = {field.name: _exact_reader(field.type, field.name) for field in fields}
        self._encoder = msgspec.json.Encoder(decimal_format="number")
        # Only the names are needed here. `len` replaces each number by its length, because the conversion of
        # a number with a million digits would take minutes.
        self._names = json.JSONDecoder(object_pairs_hook=_once, parse_int=len, parse_float=len)

    def parse(self, body: bytes) -> Parsed:
        # The number of `{` is limited, because each may begin a struct, and a struct takes memory for all of
        # its fields even if it is `{}`.
        if self._widest > 1 and body.count(b"{") * self._widest > MOST_VALUES:
            return Parsed(None, error=too_many_values())
        try:
            try:
                found = self._whole.decode(body)
            except (msgspec.ValidationError, UnicodeDecodeError):
                return self._by_parts(body)
            value = msgspec.to_builtins(found, builtin_types=_KEPT_AS_THEY_ARE)
            if self._whole_exact is not None:
                both = body.translate(_DIGITS) + body
                suspect = any(word in both for word in self._suspects)
                if suspect and not self._whole_exact(value, body):
                    return self._by_parts(body)
            # If a name occurs twice in an object, the decoder keeps only one of the two values. The decoded
            # body, encoded again, then has fewer quotation marks than the original. So the slow check for
            # repeated names is necessary only if these numbers of quotation marks differ, or if the body has
            # backslashes, which may escape quotation marks.
            if b"\\" in body or body.count(b'"') != self._encoder.encode(found).count(b'"'):
                self._names.decode(body.decode())
            return Parsed(value)
        except _NOT_JSON as error:
            return Parsed(None, error=f"{type(error).__name__}: {error}")

    def _by_parts(self, body: bytes) -> Parsed:
        parts = self._parts.decode(body)
        self._names.decode(body.decode())
        value: dict[str, Any] = {}
        rest: dict[str, msgspec.Raw] = {}
        for name, text in parts.items():
            decoder = self._fields.get(name)
            try:
                found = None if decoder is None else decoder.decode(text)
            except msgspec.DecodeError:
                decoder = found = None
            made = msgspec.to_builtins(found, builtin_types=_KEPT_AS_THEY_ARE)
            exact = self._exact.get(name)
            if decoder is None or (exact is not None and not exact(made, text)):
                rest[name] = text
            else:
                value[name] = made
        return Parsed(value, msgspec.json.encode(rest) if rest else None)


def _exact_reader(kind: pa.DataType, path: str) -> Callable[[Any, bytes | msgspec.Raw], bool] | None:
    """Return a function that tells whether a value has all of its JSON text. None: it always has."""
    same = _comparing(kind)
    if same is None:
        return None
    decoder = msgspec.json.Decoder(_python_type(kind, path, exact=True) | None)

    def is_whole(made: Any, text: bytes | msgspec.Raw) -> bool:
        try:
            return made is None or same(
                made, msgspec.to_builtins(decoder.decode(text), builtin_types=(Decimal,))
            )
        except (msgspec.DecodeError, ArithmeticError):
            return False

    return is_whole


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice in one object")


def _widest(kind: pa.DataType, *, many: bool = False) -> int:
    """Return the number of columns of the widest struct that is inside an array or a map."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    many_inner = many or not pa.types.is_struct(kind)
    return max([value_width(kind) if many else 1, *(_widest(one, many=many_inner) for one in inner)])


def _words(kind: pa.DataType) -> set[bytes]:
    """Return the byte strings without which a body has only exact values of this type (`_Lossy.words`)."""
    if kind.num_fields:
        return {word for number in range(kind.num_fields) for word in _words(kind.field(number).type)}
    lossy = _lossy(kind)
    return set() if lossy is None else set(lossy.words)


def _comparing(kind: pa.DataType) -> Callable[[Any, Any], bool] | None:
    """Return a function that compares a value with the exact one, or None if all values are exact."""
    if pa.types.is_struct(kind):
        parts = [(field.name, same) for field in kind if (same := _comparing(field.type))]
        if not parts:
            return None
        return lambda made, exact: all(
            made.get(name) is None or same(made[name], exact[name]) for name, same in parts
        )
    if pa.types.is_list(kind):
        if (of_item := _comparing(kind.value_type)) is None:
            return None
        return lambda made, exact: all(
            one is None or of_item(one, other) for one, other in zip(made, exact, strict=True)
        )
    if pa.types.is_map(kind):
        if (of_value := _comparing(kind.item_type)) is None:
            return None
        return lambda made, exact: all(made[key] is None or of_value(made[key], exact[key]) for key in made)
    lossy = _lossy(kind)
    return None if lossy is None else lossy.same


def _python_type(kind: pa.DataType, path: str, *, exact: bool = False) -> Any:
    """Return the type to decode into, with `exact` one without any loss. Raises ConfigError."""
    for arrow, python in _PLAIN:
        if kind == arrow:
            lossy = _lossy(kind) if exact else None
            return python if lossy is None else lossy.exact
    if pa.types.is_decimal128(kind):
        return Decimal
    if pa.types.is_list(kind):
        return list[_python_type(kind.value_type, f"{path}[]", exact=exact) | None]  # type: ignore[misc]
    if pa.types.is_map(kind) and kind.key_type == pa.string():
        return dict[str, _python_type(kind.item_type, f"{path}{{}}", exact=exact) | None]  # type: ignore[misc]
    if not pa.types.is_struct(kind):
        raise ConfigError("body_schema", f"{path} {kind}", f"for JSON, types among {_TYPES}")
    check_names(kind, f"{path}.")
    types = [
        (f"f{number}", _python_type(field.type, f"{path}.{field.name}", exact=exact) | None, None)
        for number, field in enumerate(kind)
    ]
    names = {f"f{number}": field.name for number, field in enumerate(kind)}
    return msgspec.defstruct("Body", types, rename=names, forbid_unknown_fields=True, omit_defaults=True)


def inferred(bodies: Iterable[bytes | None]) -> pa.StructType:
    """Return the fields that bodies have in common. Integers become bigint, other numbers double.

    A field is omitted if its values have different types, if it never has a value, if its name differs from
    another name only in case, or if its name is invalid. If more than `_MOST_FIELDS` remain, the rarest
    fields are omitted with a warning. At most `_SAMPLE_BODIES` bodies and `_SAMPLE_BYTES` bytes are read.
    Raises ConfigError if no field remains.
    """
    root, room = _Place(), _Room(_MOST_PLACES)
    count = size = 0
    for body in islice(bodies, _SAMPLE_BODIES):
        if body is None or len(body) > min(MOST_BYTES, _SAMPLE_BYTES - size):
            continue
        size += len(body)
        count += 1
        try:
            value = msgspec.json.decode(body)
        except _NOT_JSON:
            continue
        if isinstance(value, dict):
            root.add(value, room)
    leaves = sorted(root.leaves(), key=lambda place: -place.seen)
    if len(leaves) > _MOST_FIELDS or not room.left:
        text = "the first %d JSON bodies have more than %d fields: the rarest get no columns"
        log.warning(text, count, _MOST_FIELDS)
    found = root.arrow({id(place) for place in leaves[:_MOST_FIELDS]})
    if found is None:
        raise ConfigError("body_schema", "", f"a schema: no fields are in the first {count} bodies")
    return found


class _Room(msgspec.Struct):
    """The number of candidate columns that may still be added before the memory limit is reached."""

    left: int


class _Place(msgspec.Struct, eq=False):
    """The values that were observed at one path of the bodies.

    Attributes:
        kind: An Arrow type, `dict`, `list`, "mixed" for no common type, or None while unknown.
        inner: The paths below this path, by name. The path of an array's items has the name "".
    """

    kind: Any = None
    seen: int = 0
    inner: dict[str, _Place] = {}

    def add(self, value: Any, room: _Room, depth: int = 0) -> None:
        kind = _kind(value) if depth <= _MOST_DEPTH else "mixed"
        if kind is None:
            return
        self.seen += 1
        if {self.kind, kind} == {pa.int64(), pa.float64()}:
            self.kind = pa.float64()
        elif self.kind != kind:
            self.kind = kind if self.kind is None else "mixed"
        if self.kind not in (dict, list):
            self.inner.clear()
            return
        for name, item in value.items() if kind is dict else (("", item) for item in value[:_SAMPLE_ITEMS]):
            place = self.inner.get(name)
            if place is None:
                if item is None or not room.left or (kind is dict and not _is_column(name)):
                    continue
                room.left -= 1
                place = self.inner[name] = _Place()
            place.add(item, room, depth + 1)

    def leaves(self) -> Iterator[_Place]:
        """Yield this path and the paths below it, but only those whose values have a single Arrow type."""
        if isinstance(self.kind, pa.DataType):
            yield self
        for place in self.inner.values():
            yield from place.leaves()

    def arrow(self, kept: set[int]) -> pa.DataType | None:
        """Return the type at this path, with fields for the paths whose ids are in `kept`, or None."""
        if isinstance(self.kind, pa.DataType):
            return self.kind if id(self) in kept else None
        fields: dict[str, tuple[str, pa.DataType]] = {}
        for name, place in self.inner.items():
            if (inner := place.arrow(kept)) is not None:
                fields.setdefault(name.lower(), (name, inner))
        if not fields:
            return None
        return pa.list_(fields[""][1]) if self.kind is list else pa.struct(list(fields.values()))


def _kind(value: Any) -> Any:
    if isinstance(value, dict | list):
        return type(value)
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else "mixed"
    return pa.float64() if isinstance(value, float) else pa.string() if isinstance(value, str) else None


def _is_column(name: str) -> bool:
    return 0 < len(name) <= _MOST_NAME and name.isprintable()
