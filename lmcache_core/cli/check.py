"""``lmcache check``: verify every value of a store, whatever engines are doing; delete only what is damaged."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from lmcache_core import config as settings
from lmcache_core import frame
from lmcache_core.cli.bench import chosen
from lmcache_core.cli.config import Change, File, Json, parse_changes
from lmcache_core.cli.output import print_json, print_table, progress, remark
from lmcache_core.cli.roundtrip import judged, opened, within
from lmcache_core.config import Effective, TierConfig
from lmcache_core.config.names import by_scheme
from lmcache_core.registry import Registry
from lmcache_core.spi import (
    AbstractBackend,
    BufferTooSmall,
    Capabilities,
    ConfigError,
    Corrupt,
    Key,
    Load,
    LoadStatus,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
SHOWN = 20
ROOM = 64 << 20
MANY = 64


@dataclass(slots=True)
class Report:
    """What a check of a store found.

    Attributes:
        good, nbytes: whole values and their bytes.
        damaged: key and what is wrong with it.
        foreign: what is not ours; never touched.
        gone: values that left between the listing and the look at them.
        removed: damaged values deleted.
    """

    good: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)
    gone: int = 0
    removed: int = 0


@app.command()
def check(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH | URL | TIER]...", help="All configured tiers when none is given."
        ),
    ] = None,
    file: File = None,
    change: Change = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is damaged or left behind.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="Most seconds for one store.")] = 86_400.0,
    as_json: Json = False,
) -> int:
    """Verify every value of folders, stores or configured tiers. Deletes nothing unless asked to; never what is foreign."""
    paths = [each for each in targets or [] if "://" not in each and "/" in each]
    if paths and len(paths) == len(targets or []):
        return _folders(paths, repair=repair, as_json=as_json)
    if paths:
        raise ConfigError(f"folders are checked by themselves: leave out {paths[0]} or the others")
    reports: dict[str, Report] = {}
    status = 0
    for name, tier, effective in _tiers(targets or [], file, change or []):
        try:
            reports[name] = within(timeout, f"check-{name}", lambda t=tier, e=effective: _check(t, e, repair))  # type: ignore[misc]  # fmt: skip
        except Exception as error:  # noqa: BLE001  named boundary: plugin code, and the other stores matter too
            state, what, remedy = judged(error, tier)
            status = max(status, 3 if state == "unreachable" else 2)
            remark(f"{name}: {state}: {what}; {remedy}")
    _print(reports, as_json=as_json)
    return max(status, int(any(report.damaged for report in reports.values())))


def _folders(paths: Sequence[str], *, repair: bool, as_json: bool) -> int:
    found = typer.main.get_command(Registry().load("commands", "check-disk"))
    flags = ["--repair"] * repair + ["--json"] * as_json
    return int(found.main([*flags, "--", *paths], prog_name="lmcache check", standalone_mode=False))


def _tiers(
    targets: Sequence[str], file: Any, change: Sequence[str]
) -> list[tuple[str, TierConfig, Effective]]:
    flags: dict[str, Any] = dict(parse_changes([*change]))
    urls = [each for each in targets if "://" in each]
    found: list[tuple[str, TierConfig, Effective]] = []
    for url in urls:
        scheme, _, place = url.partition("://")
        try:
            plugin, option = by_scheme(scheme)
        except LookupError as error:
            raise ConfigError(str(error)) from None
        given = {plugin: {option: place if option == "path" else url}}
        effective = settings.load(file, flags=flags | {"tiers": [given]})
        found.append((url.rpartition("@")[2], effective.config.tiers[0], effective))
    if len(urls) < len(targets) or not targets:
        effective = settings.load(file, flags=flags)
        names = [each for each in targets if each not in urls]
        for tier in chosen(effective, names):
            made = effective.registry.load("backends", tier.plugin)
            if not getattr(made, "capabilities", Capabilities()).resident:
                found.append((tier.name, tier, effective))
        if not found:
            raise ConfigError("nothing to check outside of memory: name a folder, a URL or a tier")
    return found


async def _check(tier: TierConfig, effective: Effective, repair: bool) -> Report:
    async with opened(tier, effective, room=ROOM, wrapped=False) as backend:
        if not backend.capabilities.scan:
            raise ConfigError(f"tier {tier.name!r} cannot list its values; nothing was looked at")
        checker = _Checker(backend, repair=repair)
        values = (await backend.usage()).values if backend.capabilities.usage else 0
        with progress(tier.name, values) as advance:
            after: str | None = None
            while True:
                page = await backend.scan(after)
                checker.report.foreign += page.foreign
                await checker.look([(key, found.nbytes) for key, found in page.values])
                advance(len(page.values))
                if (after := page.after) is None:
                    return checker.report


class _Checker:
    def __init__(self, backend: AbstractBackend, *, repair: bool) -> None:
        self.report = Report()
        self._backend = backend
        self._repair = repair
        self._buffer = memoryview(mmap.mmap(-1, ROOM))

    async def look(self, listed: Sequence[tuple[Key, int]]) -> None:
        """Load and verify listed values, as many at once as there is room for."""
        loads: list[Load] = []
        at = 0
        for key, nbytes in listed:
            if loads and (len(loads) == MANY or at + nbytes > ROOM):
                await self._verify(loads)
                loads, at = [], 0
            if nbytes > len(self._buffer):
                self._buffer = memoryview(mmap.mmap(-1, nbytes))
            loads.append(Load(key, (self._buffer[at : at + nbytes],)))
            at += nbytes
        if loads:
            await self._verify(loads)

    async def _verify(self, loads: Sequence[Load]) -> None:
        report, bad = self.report, []
        for load, loaded in zip(loads, await self._backend.load(loads), strict=True):
            if loaded.status is LoadStatus.MISSED or isinstance(loaded.error, BufferTooSmall):
                report.gone += 1  # or another has taken its place
                continue
            if loaded.error is not None and not isinstance(loaded.error, Corrupt):
                raise loaded.error
            what = str(loaded.error or "") or _wrong(load.key, load.into[0][: loaded.nbytes])
            if what:
                report.damaged[load.key.text] = what
                bad.append(load.key)
            else:
                report.good, report.nbytes = report.good + 1, report.nbytes + loaded.nbytes
        if self._repair and bad:
            report.removed += await self._backend.delete(bad)


def _wrong(key: Key, whole: memoryview) -> str:
    """What is wrong with a value, or nothing."""
    try:
        header = frame.open_header(whole, key)
        if len(whole) != header.nbytes + header.stored_nbytes:
            return f"has {len(whole)} bytes, its header says {header.nbytes + header.stored_nbytes}"
        frame.verify(header, whole[header.nbytes :])
    except Corrupt as error:
        return str(error)
    return ""


def _print(reports: dict[str, Report], *, as_json: bool) -> None:
    if as_json:
        print_json({name: asdict(report) for name, report in reports.items()})
        return
    for report in reports.values():
        lines = [f"damaged: {key}: {what}" for key, what in report.damaged.items()]
        lines += [f"foreign: {name}" for name in report.foreign]
        for line in lines[:SHOWN]:
            remark(line)
        if len(lines) > SHOWN:
            remark(f"and {len(lines) - SHOWN} more; --json shows all")
    print_table(
        ("store", "good", "bytes", "damaged", "foreign", "gone", "removed"),
        [
            (n, r.good, r.nbytes, len(r.damaged), len(r.foreign), r.gone, r.removed)
            for n, r in reports.items()
        ],
    )
