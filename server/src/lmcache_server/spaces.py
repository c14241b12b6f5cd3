"""What lies in each key space, and what the space is, as far as an engine has said so."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache_core.identity.space import ROOT_TAG, SPACE_TAG

if TYPE_CHECKING:
    from lmcache_server.daemon import Daemon

SHOWN = 64
"""Spaces that are told apart; what is in all others is told as one, named ``other``."""
OTHER = "other"
_ABOUT = ("model", "kv_dtype", "fidelity", "epoch")
_LAYOUT = (
    *("reuse", "window", "tokens_per_chunk", "heads", "head_dim", "planes", "dtype"),
    *("interior", "page_size", "engine"),
)

_DEEPEST = 16
"""Items around the innermost one; a key space has six."""


def decode(data: bytes, /) -> Any:
    """Read one canonical item (``lmcache_core.identity.canonical``); a record becomes a mapping.

    Raises:
        ValueError: it is none.
    """
    value, end = _item(memoryview(data), 0)
    if end != len(data):
        raise ValueError("bytes behind a canonical item")
    return value


def _item(data: memoryview, at: int, within: int = 0) -> tuple[Any, int]:
    if within > _DEEPEST:
        raise ValueError("canonical items within items without an end")
    if len(data) < at + 5:
        raise ValueError("a canonical item is cut off")
    tag, (nbytes,) = bytes(data[at : at + 1]), struct.unpack_from("<I", data, at + 1)
    begin, end = at + 5, at + 5 + nbytes
    if end > len(data):
        raise ValueError("a canonical item is cut off")
    if tag in (b"t", b"r"):
        parts = []
        while begin < end:
            part, begin = _item(data[:end], begin, within + 1)
            parts.append(part)
        return (dict(zip(parts[::2], parts[1::2], strict=True)) if tag == b"r" else parts), end
    body = bytes(data[begin:end])
    plain: dict[bytes, Any] = {
        b"n": lambda: None,
        b"b": lambda: body == b"\1",
        b"i": lambda: int(body),
        b"f": lambda: struct.unpack("<d", body)[0],
        b"s": body.decode,
        b"y": body.hex,
    }
    if tag not in plain:
        raise ValueError(f"no canonical item begins with {tag!r}")
    return plain[tag](), end


def about(canonical: bytes, /) -> dict[str, Any]:
    """What people want to know of a key space: no tenant's salt, no digest of weights."""
    try:
        space = decode(canonical)
        groups = [
            {"layers": len(group["layers"]), **{name: group[name] for name in _LAYOUT}}
            for group in space["groups"]
        ]
        return {**{name: space[name] for name in _ABOUT}, "layouts": groups}
    except (ValueError, KeyError, TypeError, struct.error):
        return {}  # of an engine that makes its spaces otherwise; nothing but its digest counts


def root_of(canonical: bytes, /) -> str:
    """Where chains of chunk digests begin, in hexadecimal."""
    return hashlib.sha256(ROOT_TAG + canonical).hexdigest()


def digest_of(canonical: bytes, /) -> str:
    """What keys of the space begin with, in hexadecimal."""
    return hashlib.sha256(SPACE_TAG + canonical).hexdigest()


def held(daemon: Daemon, /) -> dict[str, dict[str, list[list[int]]]]:
    """Space -> tier -> (group, values, bytes of values); tiers whose content is known here only."""
    manager = daemon.manager
    indexes = {manager.context.tier: manager.pool.index}
    indexes |= {t.name: t.holdings.index for t in manager.tiers if t.holdings is not None}
    found: dict[str, dict[str, list[list[int]]]] = {}
    for tier, index in indexes.items():
        for space, group, values, nbytes in list(index.tables()):
            rows = found.setdefault(space.hex(), {}).setdefault(tier, [])
            rows.append([group, values, nbytes])
    if len(found) <= SHOWN:
        return found
    ordered = sorted(found, key=lambda space: _nbytes(found[space]), reverse=True)
    kept = {space: found[space] for space in ordered[:SHOWN]}
    rest: dict[str, list[list[int]]] = {}
    for name in ordered[SHOWN:]:
        for tier, each in found[name].items():
            (total,) = rest.setdefault(tier, [[0, 0, 0]])
            for _, values, nbytes in each:
                total[1] += values
                total[2] += nbytes
    return {**kept, OTHER: rest}


def _nbytes(tiers: Mapping[str, list[list[int]]]) -> int:
    return sum(nbytes for rows in tiers.values() for _, _, nbytes in rows)


def document(daemon: Daemon, /) -> list[dict[str, Any]]:
    """Each key space that has values or an engine."""
    known: dict[str, dict[str, Any]] = {}
    for engine in daemon.engines.by_name.values():
        if engine.space:
            each = known.setdefault(digest_of(engine.space), {"engines": [], **about(engine.space)})
            each["engines"].append(engine.name)
    inside = held(daemon)
    return [
        {
            "space": space,
            **known.get(space, {"engines": []}),
            "tiers": {
                tier: [dict(zip(("group", "values", "bytes"), row, strict=True)) for row in rows]
                for tier, rows in inside.get(space, {}).items()
            },
        }
        for space in dict.fromkeys([*inside, *known])
    ]


def gauges(daemon: Daemon, /) -> None:
    """Bring the gauges of pins and spaces up to date; of a space its first digits name it."""
    metrics, manager = daemon.manager.metrics, daemon.manager
    metrics.set("lmcache_memory_pinned_bytes", daemon.pins.nbytes, tier=manager.context.tier)
    for name in ("lmcache_space_chunks", "lmcache_space_bytes"):
        metrics.forget(name)
    for space, tiers in held(daemon).items():
        for tier, rows in tiers.items():
            labels = {"tier": tier, "space": space[:12]}
            metrics.set("lmcache_space_chunks", sum(row[1] for row in rows), **labels)
            metrics.set("lmcache_space_bytes", sum(row[2] for row in rows), **labels)
