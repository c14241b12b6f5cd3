"""``lmcache quota``: what tenants may take of memory."""

from __future__ import annotations

from typing import Annotated

import typer

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_json, print_table
from lmcache_core.memory.limits import text
from lmcache_core.spi import ConfigError
from lmcache_core.wire import records, replies
from lmcache_server.client.commands import HERE, Address, TokenFile, operating, parse_size, show

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Show and change what tenants may take of memory; `default` is everybody unnamed.",
)  # fmt: skip
Tenant = Annotated[str, typer.Argument()]


@app.command("list")
def list_(daemon: Address = HERE, token_file: TokenFile = None, as_json: Json = False) -> int:
    """Show quotas, and what tenants use now."""
    with operating(daemon, token_file) as operator:
        found = operator.describe()
    quotas, used = found["quotas"], found["tenants"]
    rows = [
        {"tenant": name, "quota": quotas.get(name), "used": used.get(name, 0)}
        for name in sorted({*quotas, *used})
    ]
    if as_json:
        print_json(rows)
        return 0
    shown = [
        (r["tenant"], "-" if r["quota"] is None else text(r["quota"]), text(r["used"]))
        for r in rows
    ]
    print_table(("tenant", "quota", "used"), shown)
    return 0


@app.command()
def get(
    tenant: Tenant, daemon: Address = HERE, token_file: TokenFile = None, as_json: Json = False
) -> int:
    """Show one quota; exit status 1 when there is none."""
    with operating(daemon, token_file) as operator:
        quota = operator.describe()["quotas"].get(tenant)
    said = "no quota" if quota is None else text(quota)
    show({"tenant": tenant, "quota": quota}, as_json, said=said)
    return int(quota is None)


@app.command("set")
def set_(
    tenant: Tenant,
    size: Annotated[str, typer.Argument(help="Such as 20GiB.")],
    daemon: Address = HERE,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Limit a tenant from now on; forgotten when the daemon ends (the configuration file keeps it)."""
    return _change(tenant, parse_size(size), daemon, token_file, as_json)


@app.command()
def delete(
    tenant: Tenant, daemon: Address = HERE, token_file: TokenFile = None, as_json: Json = False
) -> int:
    """Limit a tenant no longer."""
    return _change(tenant, None, daemon, token_file, as_json)


def _change(
    tenant: str, nbytes: int | None, daemon: str, token_file: str | None, as_json: bool
) -> int:
    if not 0 < len(tenant) < 256:
        raise ConfigError(f"not a tenant: {tenant[:80]!r} (1 to 255 characters)")
    with operating(daemon, token_file) as operator:
        operator.do(replies.Done, lambda id: records.Quota(id, tenant, nbytes))
    said = f"{tenant}: {'no quota' if nbytes is None else text(nbytes)}"
    show({"tenant": tenant, "quota": nbytes}, as_json, said=said)
    return 0
