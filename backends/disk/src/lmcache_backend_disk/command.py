"""``lmcache check PATH``: verify the files of a disk tier that no process is using."""

# No postponed annotations: the command line is made from the types.

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from lmcache_backend_disk.checking import Report, check
from lmcache_backend_disk.folder import reason
from lmcache_core.cli.output import print_json, print_table, remark
from lmcache_core.files import OsFiles
from lmcache_core.spi import ConfigError, Unavailable

app = typer.Typer(add_completion=False, rich_markup_mode=None)
SHOWN = 20


@app.command()
def main(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Folders of a tier.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Delete what is damaged or left behind.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Verify every value of a disk or fs tier; `check` calls it. Deletes nothing unless asked to; never what is foreign."""
    reports: dict[str, Report] = {}
    status = 0
    for path in paths:  # the others matter, too
        try:
            reports[path] = _check(path, repair=repair)
        except ConfigError as error:
            status = max(status, 2)
            remark(str(error))
        except Unavailable as error:
            status = 3
            remark(str(error))
        except OSError as error:
            status = 3
            remark(f"{path}: cannot be looked through: {reason(error)}")
    if as_json:
        print_json({path: asdict(report) for path, report in reports.items()})
    elif reports:
        for report in reports.values():
            _remark(report)
        print_table(
            ("path", "good", "bytes", "damaged", "orphaned", "foreign", "removed"),
            [
                (p, r.good, r.nbytes, len(r.damaged), len(r.orphaned), len(r.foreign), r.removed)
                for p, r in reports.items()
            ],
        )
    return max(status, int(not all(report.clean for report in reports.values())))


def _check(path: str, *, repair: bool) -> Report:
    def watch(shards: list[str]) -> Iterable[str]:
        if not sys.stderr.isatty():
            yield from shards
            return
        with typer.progressbar(shards, label=path, file=sys.stderr) as bar:
            yield from bar

    return check(path.rstrip("/") or "/", files=OsFiles(), repair=repair, watch=watch)


def _remark(report: Report) -> None:
    lines = [f"damaged: {path}: {what}" for path, what in report.damaged.items()]
    lines += [f"orphaned: {path}" for path in report.orphaned]
    lines += [f"foreign: {path}" for path in report.foreign]
    for line in lines[:SHOWN]:
        remark(line)
    if len(lines) > SHOWN:
        remark(f"and {len(lines) - SHOWN} more; --json shows all")
