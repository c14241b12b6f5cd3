"""``lmcache pin`` and ``unpin``: values that stay in memory for a while."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_core.cli.config import Json
from lmcache_core.memory.limits import text
from lmcache_core.spi import ConfigError
from lmcache_server.client.commands import (
    HERE,
    Address,
    Keys,
    Seconds,
    TokenFile,
    command,
    operating,
    show,
)
from lmcache_server.client.operator import parse_keys


@command
def pin(
    key: Keys,
    lasts: Annotated[
        float, typer.Option("--for", min=1, max=604800, help="Seconds that they stay.")
    ] = 300,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 60,
    as_json: Json = False,
) -> int:
    """Keep values in memory for a while, a quarter of it at most; exit status 1 when not all of them stay."""
    keys = parse_keys(key)
    with operating(daemon, token_file, timeout) as operator:
        found = operator.pin(keys, lasts, seconds=timeout)
    asked = len(set(keys))
    said = f"{found.count} of {asked} values stay for {lasts:g} s; {text(found.nbytes)} are pinned"
    document = {"pinned": found.count, "asked": asked, "bytes": found.nbytes, "seconds": lasts}
    show(document, as_json, said=said)
    return int(found.count < asked)


@command
def unpin(
    key: Annotated[list[str] | None, typer.Argument(metavar="KEY...")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Whatever is pinned.")] = False,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Keep values no longer; exit status 1 when not all of them were pinned."""
    if bool(key) == everything:
        raise ConfigError("say what to unpin: keys, or --all")
    keys = parse_keys(key or [])
    with operating(daemon, token_file, timeout) as operator:
        found = operator.pin(keys, 0.0, seconds=timeout)
    said = f"{found.count} values may leave; {text(found.nbytes)} are pinned"
    show({"unpinned": found.count, "bytes": found.nbytes}, as_json, said=said)
    return int(found.count < len(set(keys)))
