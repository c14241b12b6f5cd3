"""``lmcache bench``: how fast configured tiers are, as the manager would use them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lmcache_core import config as settings
from lmcache_core.cli.config import Change, File, Json, parse_changes
from lmcache_core.cli.output import print_records, progress, remark
from lmcache_core.cli.roundtrip import judged, measure, opened, within
from lmcache_core.config import Effective, TierConfig
from lmcache_core.registry import Registry
from lmcache_core.spi import ByteSize, ConfigError


class Benches(TyperGroup):
    """The core's own, and ``NAME`` for each command ``bench-NAME`` of a distribution."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = entry_points(group="lmcache_core.commands")
        others = {each.name[6:] for each in found if each.name.startswith("bench-")}
        return sorted({*super().list_commands(ctx), *others})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if cmd_name not in self.list_commands(ctx):
            return None
        found = typer.main.get_command(Registry().load("commands", f"bench-{cmd_name}"))
        found.name = cmd_name
        return found


app = typer.Typer(
    cls=Benches, add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Measure configured tiers.",
)  # fmt: skip
SIZES = "1MiB,4MiB,16MiB"
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Rate:
    """Medians of the laps of one tier and one value size; CPU is that of this process, all threads."""

    tier: str
    value_kib: int
    values: int
    store_mb_s: float
    load_mb_s: float
    lookup_ms: float
    store_cpu_s_gib: float
    load_cpu_s_gib: float


@app.callback()
def bench() -> None:
    """Measure configured tiers."""


@app.command(short_help="Move real values of several sizes through tiers.")
def tier(
    name: Annotated[list[str] | None, typer.Argument(help="Tiers; all when none is named.")] = None,
    file: File = None,
    change: Change = None,
    size: Annotated[str, typer.Option(help="Lengths of values, with commas.")] = SIZES,
    total: Annotated[str, typer.Option(help="Bytes of one lap.")] = "64MiB",
    laps: Annotated[int, typer.Option(min=1, max=1000, help="The median counts.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds for one tier.")] = 120.0,
    as_json: Json = False,
) -> int:
    """Store, look up, load, compare and delete real values of several sizes, through all wrappers."""
    effective = settings.load(file, flags=parse_changes(change or []))
    try:
        sizes = [int(ByteSize.parse(part)) for part in size.split(",")]
        most = int(ByteSize.parse(total))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found: list[Rate] = []
    states: set[str] = set()
    for each in chosen(effective, name or []):
        try:
            found += _bench(each, effective, sizes, most, laps, timeout)
        except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other tiers matter too
            state, what, remedy = judged(error, each)
            states.add(state)
            remark(f"tier {each.name}: {state}: {what}; {remedy}")
    print_records(found, as_json=as_json)
    return 3 if "unreachable" in states else int(bool(states))


def chosen(effective: Effective, names: Sequence[str]) -> list[TierConfig]:
    """Configured tiers by name, all when none is named.

    Raises:
        ConfigError: there is no tier of that name.
    """
    tiers = {each.name: each for each in effective.config.tiers}
    for each in names:
        if each not in tiers:
            known = ", ".join(tiers) or "none"
            raise ConfigError(f"no tier {each!r} is configured; there are: {known}")
    return [tiers[each] for each in names or tiers]


def _bench(
    tier: TierConfig, effective: Effective, sizes: list[int], total: int, laps: int, timeout: float
) -> list[Rate]:
    async def run() -> list[Rate]:
        found = []
        room = max(total, *sizes) * 4
        async with opened(tier, effective, room=room) as backend:
            await measure(backend, tier, count=2, nbytes=min(sizes))  # connections, first touches
            with progress(f"tier {tier.name}", len(sizes) * laps) as advance:
                for nbytes in sizes:
                    count = max(2, total // nbytes)
                    runs = []
                    for _ in range(laps):
                        length, times = await measure(backend, tier, count=count, nbytes=nbytes)
                        runs.append(times)
                        advance(1)
                    store, lookup, load, *cpu = (
                        statistics.median(c) for c in zip(*runs, strict=True)
                    )
                    moved = count * length
                    found.append(
                        Rate(
                            tier.name, length >> 10, count, round(moved / store / 1e6, 1),
                            round(moved / load / 1e6, 1), round(lookup * 1000, 3),
                            *(round(each * GIB / moved, 3) for each in cpu),
                        )
                    )  # fmt: skip
        return found

    return within(timeout, f"bench-{tier.name}", run)
