"""JSON bodies: an object whose fields become columns, exactly or not at all.

A field that is not in the schema, or whose value is not wholly of its type there, goes to `body_rest` as it
was written: {"its name": its text}. pyarrow's JSON reader is not used: it takes text by lines, fails for
all of them at the first bad one, and has no place for what does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pyarrow as pa

from cometmq.errors import ConfigError
from cometmq.pipeline.table.bodies import MOST_BYTES, Parsed, check_names

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
_MOST_FIELDS = 500
_MOST_DEPTH = 8


class JsonParser:
    """Parses bodies by the fields of a struct type."""

    def __init__(self, fields: pa.StructType) -> None:
        self._whole = msgspec.json.Decoder(_python_type(fields, "body"))
        self._parts = msgspec.json.Decoder(dict[str, msgspec.Raw])
        types = ((field.name, _python_type(field.type, field.name)) for field in fields)
        self._fields = {name: msgspec.json.Decoder(kind | None) for name, kind in types}
        self._encoder = msgspec.json.Encoder(decimal_format="number")
        # Numbers are not made: one of a million digits would take minutes.
        self._names = json.JSONDecoder(object_pairs_hook=_once, parse_int=len, parse_float=len)

    def parse(self, body: bytes) -> Parsed:
        try:
            try:
                found = self._whole.decode(body)
            except (msgspec.ValidationError, UnicodeDecodeError):
                return self._by_parts(body)
            # Each name and text has two quotes: if as many come out as went in, no name was there twice.
            if b"\\" in body or body.count(b'"') != self._encoder.encode(found).count(b'"'):
                self._names.decode(body.decode())
            return Parsed(msgspec.to_builtins(found, builtin_types=_KEPT_AS_THEY_ARE))
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
                if decoder is None:
                    rest[name] = text
                else:
                    value[name] = msgspec.to_builtins(decoder.decode(text), builtin_types=_KEPT_AS_THEY_ARE)
            except msgspec.DecodeError:
                rest[name] = text
        return Parsed(value, msgspec.json.encode(rest) if rest else None)


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name is there twice in one object")


def _python_type(kind: pa.DataType, path: str) -> Any:
    """What msgspec decodes into this type. Raises ConfigError for types that JSON bodies cannot have."""
    for arrow, python in _PLAIN:
        if kind == arrow:
            return python
    if pa.types.is_decimal128(kind):
        return Decimal
    if pa.types.is_list(kind):
        return list[_python_type(kind.value_type, f"{path}[]") | None]  # type: ignore[misc]
    if pa.types.is_map(kind) and kind.key_type == pa.string():
        return dict[str, _python_type(kind.item_type, f"{path}{{}}") | None]  # type: ignore[misc]
    if not pa.types.is_struct(kind):
        raise ConfigError("body_schema", f"{path} {kind}", f"for JSON, types among {_TYPES}")
    check_names(kind, f"{path}.")
    types = [
        (f"f{number}", _python_type(field.type, f"{path}.{field.name}") | None, None)
        for number, field in enumerate(kind)
    ]
    names = {f"f{number}": field.name for number, field in enumerate(kind)}
    return msgspec.defstruct("Body", types, rename=names, forbid_unknown_fields=True, omit_defaults=True)


def inferred(bodies: Iterable[bytes]) -> pa.StructType:
    """The fields that these bodies have in common use: integers are bigint, other numbers double. What has
    different types in different bodies, no value at all, or a name that differs from another in case only, is
    left out. Raises ConfigError if nothing is left."""
    kinds: list[Any] = []
    for body in bodies:
        try:
            kinds.append(_kind(msgspec.json.decode(body) if len(body) <= MOST_BYTES else None, 0))
        except _NOT_JSON:
            continue
    found = _arrow(_common([kind for kind in kinds if isinstance(kind, dict)]))
    if found is None:
        raise ConfigError("body_schema", "", f"a schema: no fields are in the first {len(kinds)} JSON bodies")
    return found


class _List(msgspec.Struct):
    """Of arrays: what their items are, as `_kind` has it."""

    items: Any


def _kind(value: Any, depth: int) -> Any:
    """What a value is: an Arrow type, a `_List`, a dict of its fields, "mixed" for no common type, or None
    while that is not known."""
    if isinstance(value, dict):
        inner = list(value.items())[:_MOST_FIELDS] if depth < _MOST_DEPTH else []
        return {name: _kind(item, depth + 1) for name, item in inner}
    if isinstance(value, list):
        return _List(_common([_kind(item, depth + 1) for item in value]) if depth < _MOST_DEPTH else "mixed")
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(2**63) <= value < 2**63 else "mixed"
    return pa.float64() if isinstance(value, float) else pa.string() if isinstance(value, str) else None


def _common(kinds: list[Any]) -> Any:
    known = [kind for kind in kinds if kind is not None]
    if not known:
        return None
    if all(isinstance(kind, dict) for kind in known):
        names = list(dict.fromkeys(name for kind in known for name in kind))[:_MOST_FIELDS]
        return {name: _common([kind.get(name) for kind in known]) for name in names}
    if all(isinstance(kind, _List) for kind in known):
        return _List(_common([kind.items for kind in known]))
    if not all(isinstance(kind, pa.DataType) for kind in known):
        return "mixed"
    different = set(known)
    if different == {pa.int64(), pa.float64()}:
        return pa.float64()
    return known[0] if len(different) == 1 else "mixed"


def _arrow(kind: Any) -> pa.DataType | None:
    if isinstance(kind, _List):
        items = _arrow(kind.items)
        return None if items is None else pa.list_(items)
    if isinstance(kind, dict):
        fields: dict[str, tuple[str, pa.DataType]] = {}
        for name, inner in kind.items():
            arrow = _arrow(inner)
            if arrow is not None and name:
                fields.setdefault(name.lower(), (name, arrow))
        return pa.struct(list(fields.values())) if fields else None
    return kind if isinstance(kind, pa.DataType) else None
