"""``lmcache ping``, ``describe``, ``query``, ``ls``, ``clear``, ``move``, ``prefetch``, ``flush``, ``freeze``, ``reload``.

Each is an application of its own, so that all of them stand beside the core's commands. Exit status: 0 good,
1 something asked for is not there or not done, 2 usage, 3 no daemon.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_json, print_table, progress
from lmcache_core.memory.limits import text
from lmcache_core.spi import ByteSize, ConfigError
from lmcache_core.wire import records, replies
from lmcache_server.client.operator import Operator, parse_keys, parse_space, read_token
from lmcache_server.client.tokens import prompt, read_ids
from lmcache_server.client.watching import following

Address = Annotated[
    str,
    typer.Option(
        "--daemon",
        envvar="LMCACHE_DAEMON",
        help="HOST:PORT, unix:///PATH, or tls://HOST:PORT?ca=FILE.",
    ),
]
TokenFile = Annotated[
    str | None, typer.Option(help="The daemon's token, where its socket is out of reach.")
]
Seconds = Annotated[float, typer.Option("--timeout", min=0.1, max=86400, help="Most seconds.")]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="As `lmcache ls` prints them.")]
TierName = Annotated[str, typer.Option(help="Only in this tier.")]
Space = Annotated[str, typer.Option(help="Only this key space: the first 64 digits of a key.")]
HERE = "localhost"
PART = 256
"""Values of one request, where a bar shows how far many are."""
KVCACHE = "kvcache"
Target = Annotated[str, typer.Argument(metavar="[kvcache]", help="What is asked; there is one.")]


def command(function: Callable[..., int]) -> typer.Typer:
    """An application of one command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    return app


@contextmanager
def operating(address: str, token_file: str | None, seconds: float = 10.0) -> Iterator[Operator]:
    """A connection for the length of one command."""
    operator = Operator(address, token=read_token(token_file), timeout=seconds)
    try:
        yield operator
    finally:
        operator.close()


def parse_size(written: str, /) -> int:
    """Bytes of a size as people write it.

    Raises:
        ConfigError: it is none.
    """
    try:
        return int(ByteSize.parse(written))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def show(document: dict[str, Any], as_json: bool, *, said: str) -> None:
    """Print the document, or one line for people."""
    if as_json:
        print_json(document)
    else:
        typer.echo(said)


@command
def ping(
    target: Target = KVCACHE,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 2,
    as_json: Json = False,
) -> int:
    """Ask whether the daemon answers, and how fast."""
    _only_kvcache(target)
    with operating(daemon, token_file, timeout) as operator:
        operator.do(replies.Done, records.Ping)
        begun = time.perf_counter()
        operator.do(replies.Done, records.Ping)
        took = time.perf_counter() - begun
        welcome = operator.welcome
        assert welcome is not None
        document = {"pid": welcome.pid, "version": welcome.release, "seconds": took}
    said = f"daemon {welcome.release} (pid {welcome.pid}) answered in {took * 1000:.3f} ms"
    show(document, as_json, said=said)
    return 0


@command
def describe(
    target: Target = KVCACHE,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Show the daemon: memory, tiers, key spaces, clients, engines."""
    _only_kvcache(target)
    with operating(daemon, token_file, timeout) as operator:
        found = operator.describe()
    if as_json:
        print_json(found)
        return 0
    memory = found["memory"]
    typer.echo(f"daemon {found['version']} (pid {found['pid']}) on {found['socket']}")
    frozen = ", frozen" if found["frozen"] else ""
    typer.echo(f"chunks of {found['chunk_size']} tokens, {found['fidelity']}{frozen}")
    used = memory["capacity"] - memory["free"]
    rows = [(memory["tier"], text(used), text(memory["capacity"]), memory["values"], "", "")]
    rows += [
        (
            t["name"],
            text(t["bytes"]),
            text(t["limit"]),
            t["chunks"],
            "+".join(t["serde"]),
            _state(t),
        )
        for t in found["tiers"]
    ]
    print_table(("tier", "used", "limit", "values", "serde", "state"), rows)
    if (pins := found["pins"])["values"]:
        most = f"{text(pins['bytes'])} of at most {text(pins['limit'])}"
        typer.echo(f"pinned: {pins['values']} values, {most}")
    for space in found["spaces"]:
        values = ", ".join(
            f"{sum(row['values'] for row in rows)} values in {tier}"
            for tier, rows in space["tiers"].items()
        )
        of = f" of {space['model']}" if space.get("model") else ""
        typer.echo(f"key space {space['space'][:12]}{of}: {values or 'nothing'}")
    for client in found["clients"]:
        typer.echo(f"client {client['name']}: {client['leases']} leases")
    for name, engine in found["engines"].items():
        missing = f", missing {engine['missing']}" if engine["missing"] else ""
        typer.echo(f"engine {name}: {engine['ranks']} ranks{missing}")
    return 0


@command
def query(
    key: Annotated[
        list[str] | None, typer.Argument(metavar="KEY...", help="As `lmcache ls` prints them.")
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Ids of a prompt instead: 1,2,3 or @FILE or - (standard input).")
    ] = "",
    engine: Annotated[str, typer.Option(help="Registered engine whose prompt it is.")] = "",
    model: Annotated[str, typer.Option(help="Model whose prompt it is.")] = "",
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Tell in which tier values are, or how much of a prompt; exit status 1 when one (or all of it) is nowhere."""
    if bool(key) == bool(tokens) or ((engine or model) and not tokens):
        raise ConfigError("say what to look for: keys, or --tokens with --engine or --model")
    if tokens:
        ids = read_ids(tokens)
        with operating(daemon, token_file, timeout) as operator:
            document = prompt(operator, ids, engine=engine, model=model)
        of = f"{document['cached']} of {document['tokens']} tokens are cached"
        show(document, as_json, said=f"{of} for engine {document['engine']}")
        if not as_json:
            print_table(
                ("group", "from", "to", "tier"), [tuple(r.values()) for r in document["chunks"]]
            )
        return int(not document["cached"])
    key = key or []
    keys = parse_keys(key)
    with operating(daemon, token_file, timeout) as operator:
        found = operator.find(keys)
    rows = [
        (text_, found.tiers[at] if at >= 0 else "", nbytes)
        for text_, at, nbytes in zip(key, found.where, found.nbytes, strict=True)
    ]
    show_rows(("key", "tier", "bytes"), rows, as_json)
    return int(any(at < 0 for at in found.where))


@command
def ls(
    tier: TierName = "",
    space: Space = "",
    limit: Annotated[int, typer.Option(min=1, help="Most values to name.")] = 1000,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Name the values of a tier (of memory, when none is named)."""
    rows: list[tuple[object, ...]] = []
    after: str | None = None
    with operating(daemon, token_file, timeout) as operator:
        while len(rows) < limit:
            most = min(limit - len(rows), 10_000)
            page = operator.list(tier, parse_space(space), after=after, limit=most)
            pinned = {page.keys[at] for at in page.pinned}
            rows += [
                (key, nbytes, "pinned" if key in pinned else "")
                for key, nbytes in zip(page.keys, page.nbytes, strict=True)
            ]
            if (after := page.after) is None:
                break
    show_rows(("key", "bytes", "state"), rows, as_json)
    return 0


@command
def clear(
    tier: TierName = "",
    space: Space = "",
    tag: Annotated[str, typer.Option(help="Only what was stored under this tag.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Forget all values.")] = False,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 60,
    as_json: Json = False,
) -> int:
    """Forget values."""
    if everything == bool(tier or space or tag):
        raise ConfigError("say what to clear: --tier, --space or --tag, or --all")
    if tag and (tier or space):
        raise ConfigError("--tag goes without --tier and --space: it is cleared everywhere")
    digest = parse_space(space)
    with operating(daemon, token_file, timeout) as operator:
        if tier and tier not in (known := operator.tiers()):
            raise ConfigError(f"there is no tier {tier!r}; there are: {', '.join(known)}")

        def make(id: int) -> records.Message:
            return records.Clear(id, timeout, tier, digest, tag)

        with following(operator, "clear", lambda now: _values(now, tier)):
            count = operator.do(replies.Count, make, seconds=timeout).count
    show({"cleared": count}, as_json, said=f"forgot {count} values")
    return 0


@command
def move(
    key: Keys,
    source: Annotated[str, typer.Option("--from", help="Tier they are in.")],
    target: Annotated[str, typer.Option("--to", help="Tier they go to.")],
    copy: Annotated[bool, typer.Option("--copy", help="Keep them where they are.")] = False,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 60,
    as_json: Json = False,
) -> int:
    """Move values between tiers; exit status 1 when not all of them arrived."""
    keys = parse_keys(key)
    with operating(daemon, token_file, timeout) as operator:
        count, until = 0, time.monotonic() + timeout
        with progress("move", len(keys)) as advance:
            for at in range(0, len(keys), PART):
                part, left = keys[at : at + PART], max(0.1, until - time.monotonic())
                count += operator.move(part, source, target, forget=not copy, seconds=left)
                advance(len(part))
    said = f"{count} of {len(keys)} values are in {target}"
    show({"moved": count, "asked": len(keys)}, as_json, said=said)
    return int(count < len(keys))


@command
def prefetch(
    key: Keys,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 60,
    as_json: Json = False,
) -> int:
    """Bring values up into memory and wait for it; exit status 1 when not all of them came."""
    keys = parse_keys(key)
    with operating(daemon, token_file, min(timeout, 10)) as operator:
        count, reason, until = 0, "", time.monotonic() + timeout
        with progress("prefetch", len(keys)) as advance:
            for at in range(0, len(keys), PART):
                part, left = keys[at : at + PART], max(0.1, until - time.monotonic())
                job = operator.job(operator.bring_up(part, seconds=left), wait=left + 1)
                assert job is not None
                advance(len(part))
                count, reason = count + job.count, job.reason or job.state
                if job.count < len(part):
                    break
    said = f"{count} of {len(keys)} values are in memory ({reason})"
    show({"resident": count, "asked": len(keys), "reason": reason}, as_json, said=said)
    return int(count < len(keys))


@command
def flush(
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 60,
    as_json: Json = False,
) -> int:
    """Have written what is only in memory; exit status 1 when something is left."""
    with (
        operating(daemon, token_file, timeout) as operator,
        following(operator, "flush", lambda now: int(now["memory"]["dirty"])),
    ):
        left = operator.do(replies.Count, lambda id: records.Flush(id, timeout), seconds=timeout)
    said = f"{left.count} values ({text(left.nbytes)}) are not written"
    show({"left": left.count, "left_bytes": left.nbytes}, as_json, said=said)
    return int(left.count > 0)


@command
def freeze(
    off: Annotated[bool, typer.Option("--off", help="Accept new values again.")] = False,
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Refuse new values; reads go on."""
    with operating(daemon, token_file, timeout) as operator:
        operator.do(replies.Done, lambda id: records.Freeze(id, not off))
    show({"frozen": not off}, as_json, said="accepts new values" if off else "frozen")
    return 0


def _only_kvcache(target: str) -> None:
    if target != KVCACHE:
        raise ConfigError(f"{target!r} is not asked here, only {KVCACHE}; an engine answers itself")


def _state(tier: dict[str, Any]) -> str:
    if not tier["enabled"]:
        return "disabled"
    return "" if tier["breaker"] == "closed" else f"breaker {tier['breaker']}"


@command
def reload(
    daemon: Address = HERE,
    token_file: TokenFile = None,
    timeout: Seconds = 10,
    as_json: Json = False,
) -> int:
    """Have the configuration read again: log level, quotas; lower tiers come, change and go."""
    with operating(daemon, token_file, timeout) as operator:
        operator.do(replies.Done, records.Reload)
    show({"reloaded": True}, as_json, said="reloaded")
    return 0


def _values(now: dict[str, Any], tier: str) -> int:
    """Values in a tier, or copies in all of them."""
    counts = {now["memory"]["tier"]: now["memory"]["values"]}
    counts |= {each["name"]: each["chunks"] for each in now["tiers"]}
    return int(counts[tier] if tier else sum(counts.values()))


def show_rows(head: Sequence[str], rows: Sequence[Sequence[object]], as_json: bool) -> None:
    """Print one record per row, or a table for people."""
    if as_json:
        print_json([dict(zip(head, row, strict=True)) for row in rows])
    else:
        print_table(head, rows)
