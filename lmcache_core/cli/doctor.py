"""``lmcache doctor``: this machine, the plugins, the configuration, and a round trip through every tier."""

from __future__ import annotations

import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated

import typer

from lmcache_core import config as settings
from lmcache_core.cli import machine
from lmcache_core.cli.config import Change, File, Json, parse_changes
from lmcache_core.cli.finding import Finding, State
from lmcache_core.cli.installed import conflicts
from lmcache_core.cli.output import print_records, remark
from lmcache_core.cli.plugins import FAULTS, listing
from lmcache_core.cli.roundtrip import round_trip
from lmcache_core.config import Effective
from lmcache_core.config.binding import shown
from lmcache_core.spi import ByteSize

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Check this machine, the plugins and every configured tier; write and read real bytes."
)
def doctor(
    file: File = None,
    change: Change = None,
    as_json: Json = False,
    timeout: Annotated[float, typer.Option(help="Most seconds for one tier.")] = 30.0,
) -> int:
    effective = settings.load(file, flags=parse_changes(change or []))
    remark("looking at the machine")
    findings = [*machine.system(), machine.native(), machine.torch()]
    remark("asking the plugins")
    findings += conflicts()
    for line in listing(effective.registry, probe=True):
        if line.state in (*FAULTS, "unavailable"):
            state: State = "fault" if line.state in FAULTS else "warning"
            findings.append(Finding(f"{line.kind} {line.name}", state, line.state, line.reason))
    findings += [Finding("configuration", "note", note) for note in effective.notes]
    findings += [*memory(effective, machine.memory_limit()), *room(effective)]
    for tier in effective.config.tiers:
        remark(f"writing to and reading from tier {tier.name}")
        findings.append(round_trip(tier, effective, timeout=timeout))
    if not effective.config.tiers:
        findings.append(Finding("tiers", "warning", "none is configured: every lookup is a miss"))
    print_records(findings, as_json=as_json)
    states = {finding.state for finding in findings}
    return 3 if "unreachable" in states else int(bool(states & {"warning", "fault"}))


def memory(effective: Effective, limit: int, /) -> list[Finding]:
    """Compare what tiers in this process may take to what the process may still have."""
    wanted = 0
    for tier in effective.config.tiers:
        found = effective.registry.load("backends", tier.plugin, anyway=True)
        capabilities = getattr(found, "capabilities", None)
        if capabilities is not None and not (capabilities.shared or capabilities.persistent):
            wanted += tier.size or 0
    if wanted <= limit:
        return []
    text = f"tiers may take {wanted >> 20} MiB, and {limit >> 20} MiB are to be had"
    return [Finding("memory", "warning", text, "lower their sizes or raise the limit")]


def room(effective: Effective, /) -> list[Finding]:
    """Compare the limits of tiers with folders to what their file systems have left."""
    found = []
    for tier in effective.config.tiers:
        written = getattr(tier.options, "path", None) if is_dataclass(tier.options) else None
        paths = [written] if isinstance(written, (str, Path)) else list(written or ())
        for path in paths:
            share, free = (tier.size or 0) // len(paths), _free(Path(path))
            text = f"{path}: {shown(ByteSize(free >> 20 << 20))} free"
            if free < share:
                text += f", less than its limit of {shown(ByteSize(share))}"
            remedy = f"free space or lower tiers.{tier.name}.size (what is cached there already counts as used)"
            found.append(
                Finding.judged(free >= share, f"tier {tier.name}", text, "warning", remedy)
            )
    return found


def _free(path: Path) -> int:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
