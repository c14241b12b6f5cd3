"""One byte string for one record, the same in every process, release and locale.

Format: ``item = tag (1 byte) || u32le(length of body) || body``. Tags and bodies:

====  =====================  ===================================================================
tag   value                  body
====  =====================  ===================================================================
``n`` ``None``               empty
``b`` ``bool``               one byte, 0 or 1
``i`` integral number        decimal digits in ASCII, ``-`` in front when negative
``f`` other finite number    IEEE 754 double, little-endian
``s`` ``str``                UTF-8, no normalisation
``y`` ``bytes``              as they are
``t`` ``tuple``              the items, in order
``r`` record (a dataclass)   for each init field, sorted by name: item of the name, of the value
====  =====================  ===================================================================

An ``Enum`` member counts as its value. Numbers that compare equal encode equally, so that equal
records have equal bytes (``10000`` and ``10000.0`` are one rope base). Everything is tagged and
length-prefixed: no two different values share a byte string.
"""

from __future__ import annotations

import itertools
import math
import struct
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from lmcache_core.spi.errors import LMCacheError

Scalar = str | int | float | bool | bytes | None
"""What a tagged identity field may hold."""


class Unkeyable(LMCacheError, ValueError):
    """An input whose effect on the KV cannot be named: it is neither looked up nor stored."""


def canonical(value: Any, /) -> bytes:
    """Encode a value as described above.

    Raises:
        Unkeyable: a type outside the table, a number that is not finite, or text that is not
            Unicode.
    """
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return _item(b"n", b"")
    if isinstance(value, bool):
        return _item(b"b", bytes([value]))
    if isinstance(value, int | float):
        if not math.isfinite(value):
            raise Unkeyable(f"cannot name the number {value}: it is not finite")
        if value == int(value):
            return _item(b"i", int.__repr__(int(value)).encode("ascii"))
        return _item(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        try:
            return _item(b"s", str.encode(value, "utf-8"))
        except UnicodeEncodeError:
            raise Unkeyable(f"cannot name the text {value[:40]!r}: not Unicode") from None
    if isinstance(value, bytes):
        return _item(b"y", value)
    if isinstance(value, tuple):
        return _item(b"t", b"".join(map(canonical, value)))
    if is_dataclass(value) and not isinstance(value, type):
        names = sorted(field.name for field in fields(value) if field.init)
        return _item(b"r", b"".join(canonical(n) + canonical(getattr(value, n)) for n in names))
    raise Unkeyable(f"cannot name a {type(value).__name__} (use str, numbers, bytes, tuples)")


def check_types(record: Any, /) -> None:
    """Refuse a record with a field that is not of its declared type, as an absent salt would be.

    Raises:
        Unkeyable: names the record, the field and the type expected.
    """
    for name, hint in get_type_hints(type(record)).items():
        if not _fits(getattr(record, name), hint):
            got = type(getattr(record, name)).__name__
            wanted = getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
            raise Unkeyable(f"{type(record).__name__}.{name} is a {got}, expected {wanted}")


def pairs(record: str, items: tuple[tuple[str, Scalar], ...], /) -> tuple[tuple[str, Scalar], ...]:
    """Sort tagged fields by name and refuse a name that is there twice."""
    ordered = tuple(sorted(items, key=lambda item: item[0]))
    for (name, _), (following, _) in itertools.pairwise(ordered):
        if name == following:
            raise Unkeyable(f"{record} names {name!r} twice")
    return ordered


def _item(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<I", len(body)) + body


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is not Ellipsis:
            return len(value) == len(arguments) and all(map(_fits, value, arguments))
        return all(_fits(each, arguments[0]) for each in value)
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else hint)
