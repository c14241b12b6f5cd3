"""``lmcache kvcache``: the commands on cached values, under the name LMCache users know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import typer

from lmcache_core.cli.config import Json
from lmcache_server.client import commands, keeping
from lmcache_server.client.operator import parse_keys

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Look at cached values, clear, move, pin and prefetch them.",
)  # fmt: skip


def first_words(function: Callable[..., object]) -> str:
    """What a command does, without its exit status: one line of a list."""
    return (function.__doc__ or "").split("\n", 1)[0].split(";", 1)[0].rstrip(".") + "."


@app.command(short_help="Load and verify values and print SHA-256 of their bytes.")
def checksum(
    key: commands.Keys,
    daemon: commands.Address = commands.HERE,
    token_file: commands.TokenFile = None,
    timeout: commands.Seconds = 10,
    as_json: Json = False,
) -> int:
    """Load and verify values and print SHA-256 of their bytes; exit status 1 when one is nowhere."""
    keys = parse_keys(key)
    with commands.operating(daemon, token_file, timeout) as operator:
        rows = [asdict(operator.checksum(each)) for each in keys]
    commands.show_rows(("key", "nbytes", "sha256"), [tuple(row.values()) for row in rows], as_json)
    return int(not all(row["sha256"] for row in rows))


for _name, _app in (
    ("info", commands.describe), ("ls", commands.ls), ("query", commands.query),
    ("clear", commands.clear), ("move", commands.move), ("prefetch", commands.prefetch),
    ("flush", commands.flush), ("pin", keeping.pin), ("unpin", keeping.unpin),
):  # fmt: skip
    (_command,) = _app.registered_commands
    assert _command.callback is not None
    app.command(_name, short_help=first_words(_command.callback))(_command.callback)
