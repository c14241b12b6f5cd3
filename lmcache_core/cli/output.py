"""How commands print: tables for people, one JSON document for programs, remarks on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer


def print_json(document: object, /) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2, ensure_ascii=False, default=str))


def print_table(head: Sequence[str], rows: Sequence[Sequence[object]], /) -> None:
    """Print aligned columns; the last one is as wide as it needs to be, empty columns are left out."""
    texts = [[str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(head)) if any(row[i] for row in texts)]
    lines = [list(head), *texts] if texts else [list(head)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        print("  ".join(line[i].ljust(widths[i]) for i in used or range(len(head))).rstrip())


def print_records(rows: Sequence[Any], /, *, as_json: bool) -> None:
    """Print dataclass instances of one kind, as a document or a table of their fields."""
    plain = [asdict(row) for row in rows]
    if as_json:
        print_json(plain)
        return
    joined = [
        [", ".join(cell) if isinstance(cell, tuple) else cell for cell in row.values()]
        for row in plain
    ]
    print_table(list(plain[0]) if plain else [], joined)


def remark(text: str, /) -> None:
    """Say something that is not the result."""
    print(text, file=sys.stderr)


@contextmanager
def progress(text: str, total: int, /) -> Iterator[Callable[[int], object]]:
    """A bar on standard error, where that is a terminal; call it with what was done since."""
    if total < 2 or not sys.stderr.isatty():
        yield lambda count: None
        return
    with typer.progressbar(length=total, label=text, file=sys.stderr) as bar:
        yield bar.update
