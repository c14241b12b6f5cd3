"""``lmcache query --tokens``: how much of a prompt is cached, and where."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lmcache_core.identity import Unkeyable, chunk_digests, keys
from lmcache_core.spi import ConfigError, Reuse
from lmcache_server.client.operator import Operator

Document = dict[str, Any]


def read_ids(written: str, /) -> list[int]:
    """Token ids: ``1,2,3``, ``@FILE`` or ``-`` for standard input; separated by commas or blanks, or a JSON list.

    Raises:
        ConfigError: they are none, or the file cannot be read.
    """
    text = written
    try:
        if written == "-":
            text = sys.stdin.read()
        elif written.startswith("@"):
            text = Path(written[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokens {written}: it cannot be read: {error}") from error
    parts = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    try:
        return [int(part) for part in parts if part]
    except ValueError:
        bad = next(part for part in parts if not part.isdecimal())
        raise ConfigError(
            f"--tokens: not a token id: {bad[:40]!r} (such as 1,2,3, or @FILE, or - for standard input)"
        ) from None


def choose(engines: Mapping[str, Document], name: str, model: str, /) -> tuple[str, Document]:
    """The engine of this name, or of this model, or the only one there is.

    Raises:
        ConfigError: none, or several that do not share a key space.
    """
    found = {
        each: about
        for each, about in engines.items()
        if about["space"] and name in ("", each) and model in ("", about.get("model"))
    }
    if not found:
        known = ", ".join(f"{n} ({e.get('model', 'unknown model')})" for n, e in engines.items())
        raise ConfigError(f"no such engine is registered; there are: {known or 'none'}")
    if len({about["space"] for about in found.values()}) > 1:
        raise ConfigError(
            f"several engines are registered; --engine NAME is one of: {', '.join(found)}"
        )
    return next(iter(found.items()))


def prompt(operator: Operator, ids: Sequence[int], /, *, engine: str, model: str) -> Document:
    """Where the chunks of a prompt are; ``cached`` counts the tokens that a request would not compute.

    Raises:
        ConfigError: no engine, or ids that cannot be tokens.
    """
    name, about = choose(operator.describe()["engines"], engine, model)
    root, space = bytes.fromhex(about["root"]), bytes.fromhex(about["space"])
    runs: list[Document] = []
    leading: list[int] = []
    for group, chunk in enumerate(about["chunk_tokens"]):
        try:
            digests = chunk_digests(root, ids, chunk)
        except Unkeyable as error:
            raise ConfigError(str(error)) from error
        found = operator.find(keys(space, digests, group))
        at = 0
        for tier, part in groupby(found.tiers[w] if w >= 0 else "" for w in found.where):
            end = at + chunk * len(list(part))
            runs.append({"group": group, "from": at, "to": end, "tier": tier})
            at = end
        if _prefix_counts(about, group):
            first = next((i for i, where in enumerate(found.where) if where < 0), len(found.where))
            leading.append(first * chunk)
    return {
        "engine": name,
        "model": about.get("model", ""),
        "space": about["space"],
        "tokens": len(ids),
        "cached": min(leading, default=0),
        "chunks": runs,
    }


def _prefix_counts(about: Document, group: int) -> bool:
    """Whether a hit needs every chunk of the group from the first on."""
    layouts = about.get("layouts", [])
    return group >= len(layouts) or layouts[group]["reuse"] == Reuse.ALL.value
