"""Conversion between the ext fields of a command header, which are text, and typed structs.

As in Java, an optional field that cannot be parsed counts as absent, and a required one raises HeaderError
(docs/reference/remoting.md, JSON header, Missing fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from cometmq.errors import HeaderError

I32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Header(msgspec.Struct, gc=False, rename="camel"):
    """The base class of all headers. No code changes them, but decoding frozen structs is slower."""

    # For each field: its attribute, its wire name, its kind, and whether it is required. The tuple is
    # computed when it is first used.
    _plan: ClassVar[tuple[tuple[str, str, str, bool], ...]]


H = TypeVar("H", bound=Header)


# -- conversion between text and values

_RANGES = {"i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}


def _kind_of(type_: object) -> str:
    """Return the kind of a field's type: "s" (text), "b" (boolean), "i32" or "i64"."""
    info = msgspec.inspect.type_info(type_)
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    for member in members:
        if isinstance(member, msgspec.inspect.BoolType):
            return "b"
        if isinstance(member, msgspec.inspect.IntType):
            return "i32" if member.le == _RANGES["i32"][1] else "i64"
        if isinstance(member, msgspec.inspect.StrType):
            return "s"
    raise TypeError(f"headers have no fields of type {type_}")


def plan_of(cls: type[Header]) -> tuple[tuple[str, str, str, bool], ...]:
    """Return attribute, wire name, kind and "is required" of each field of a header class, by wire name."""
    plan = cls.__dict__.get("_plan")
    if plan is None:
        fields = sorted(msgspec.structs.fields(cls), key=lambda info: info.encode_name)
        plan = tuple((info.name, info.encode_name, _kind_of(info.type), info.required) for info in fields)
        cls._plan = plan
    return plan


def encode_ext(header: Header) -> dict[str, str]:
    """Convert a header to ext fields: a dict of texts by wire name. Fields that are None are omitted."""
    ext: dict[str, str] = {}
    for attribute, wire_name, _, _ in plan_of(type(header)):
        value = getattr(header, attribute)
        if value is None:
            continue
        if value.__class__ is str:
            ext[wire_name] = value
        elif value.__class__ is bool:
            ext[wire_name] = "true" if value else "false"
        else:
            ext[wire_name] = str(int(value))
    return ext


def decode_ext(cls: type[H], ext: Mapping[str, str] | None) -> H:
    """Create a header from ext fields, ignoring unknown fields. Raises HeaderError, which names the field."""
    if ext is None:
        ext = {}
    try:
        return msgspec.convert(ext, cls, strict=False)
    except (msgspec.ValidationError, UnicodeError):
        return _decode_as_java(cls, ext)


def _decode_as_java(cls: type[H], ext: Mapping[str, str]) -> H:
    values: dict[str, Any] = {}
    for attribute, wire_name, kind, required in plan_of(cls):
        text = ext.get(wire_name)
        if text is None:
            if required:
                raise HeaderError(wire_name, None, "missing")
            continue
        try:
            values[attribute] = parse_value(text, kind)
        except ValueError as error:
            if required:
                raise HeaderError(wire_name, text, str(error)) from None
    return cls(**values)


def parse_value(text: str, kind: str) -> str | int | bool:
    """Parse the text of an ext field as Java does. Raises ValueError with the reason."""
    if kind == "s":
        return text
    if kind == "b":
        return text.lower() == "true"
    digits = text[1:] if text[:1] in ("-", "+") else text
    # Java accepts decimal digits of any script, but no blanks and no underscores. The limit of 40 digits
    # suffices, because any long has at most 19 digits.
    if not digits.isdecimal() or len(digits) > 40:
        raise ValueError("not a whole number")
    value = int(text)
    low, high = _RANGES[kind]
    if not low <= value <= high:
        raise ValueError(f"the value is out of range for a {'32' if kind == 'i32' else '64'}-bit number")
    return value
