"""``lmcache tiers``: the lower tiers of a daemon, and what may change of them while it serves."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_json, print_table
from lmcache_core.memory.limits import text
from lmcache_core.wire import records, replies
from lmcache_server.client.commands import (
    HERE,
    Address,
    Seconds,
    TokenFile,
    operating,
    parse_size,
    show,
)

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show lower tiers, resize them, take them out of service and back.",
)  # fmt: skip
Name = Annotated[str, typer.Argument()]


@app.command("list")
def list_(daemon: Address = HERE, token_file: TokenFile = None, as_json: Json = False) -> int:
    """Show the configured lower tiers in lookup order."""
    with operating(daemon, token_file) as operator:
        found = operator.describe()["tiers"]
    if as_json:
        print_json(found)
        return 0
    rows = [
        (
            each["name"], each["plugin"], "yes" if each["enabled"] else "no", str(each["chunks"]),
            text(each["bytes"]), text(each["limit"]) if each["limit"] else "-",
        )
        for each in found
    ]  # fmt: skip
    print_table(("tier", "plugin", "enabled", "values", "bytes", "limit"), rows)
    return 0


@app.command()
def limit(
    name: Name,
    size: Annotated[str, typer.Argument(help="Such as 200GiB.")],
    daemon: Address = HERE,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Resize a tier until the daemon ends; a smaller one evicts at once."""
    nbytes = parse_size(size)
    with operating(daemon, token_file) as operator:
        operator.do(replies.Done, lambda id: records.Tier(id, name, "limit", nbytes))
    show({"name": name, "limit": nbytes}, as_json, said=f"{name}: {text(nbytes)}")
    return 0


@app.command()
def disable(
    name: Name,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Write what a tier still wants, then serve from it no more."""
    with operating(daemon, token_file, timeout) as operator:
        operator.do(
            replies.Done,
            lambda id: records.Tier(id, name, "remove", 0, timeout),
            seconds=timeout,
        )
    show({"name": name, "enabled": False}, as_json, said=f"{name}: out of service")
    return 0


@app.command()
def enable(
    name: Name, daemon: Address = HERE, token_file: TokenFile = None, as_json: Json = False
) -> int:
    """Serve again from a configured tier, where it stood."""
    with operating(daemon, token_file) as operator:
        operator.do(replies.Done, lambda id: records.Tier(id, name, "restore"))
    show({"name": name, "enabled": True}, as_json, said=f"{name}: in service")
    return 0
