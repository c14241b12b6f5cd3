"""``lmcache config``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmcache_core import config as settings
from lmcache_core.cli.output import print_json, print_table, remark

File = Annotated[Path | None, typer.Option("--config", help="Instead of LMCACHE_CONFIG_FILE.")]
Change = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over everything else.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def parse_changes(written: list[str], /) -> dict[str, str]:
    """Read ``KEY=VALUE`` flags."""
    for text in written:
        if "=" not in text:
            raise typer.BadParameter(f"not KEY=VALUE: {text!r} (example: tiers.disk.size=1TiB)")
    return {key.strip(): value for key, _, value in (text.partition("=") for text in written)}


@app.command(help="Show every effective setting and where it came from; secrets are never shown.")
def config(file: File = None, change: Change = None, as_json: Json = False) -> int:
    effective = settings.load(file, flags=parse_changes(change or []))
    if as_json:
        rows = [{"key": s.path, "value": s.value, "source": s.source} for s in effective.settings]
        print_json({"settings": rows, "notes": effective.notes})
        return 0
    for note in effective.notes:
        remark(note)
    print_table(
        ("key", "value", "source"), [(s.path, _text(s.value), s.source) for s in effective.settings]
    )
    return 0


def _text(value: object) -> str:
    if value is None or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
