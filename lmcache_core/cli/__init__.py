"""The ``lmcache`` command. A command is imported when it is chosen, never for ``--help``.

Results go to standard output (``--json``: one JSON document), everything else to standard error.
Exit status: 0 good, 1 findings, 2 usage or configuration, 3 something could not be reached.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from lmcache_core import __version__

OWN = {
    "bench": ("lmcache_core.cli.bench", "Measure configured tiers."),
    "check": ("lmcache_core.cli.check", "Verify every value of folders, stores or tiers."),
    "config": ("lmcache_core.cli.config", "Show every effective setting and where it came from."),
    "doctor": ("lmcache_core.cli.doctor", "Check this machine, the plugins and every configured tier."),
    "plugins": ("lmcache_core.cli.plugins", "List, verify and start plugins."),
}  # fmt: skip
"""Commands of the core: module with an ``app``, and help. Others come from ``lmcache_core.commands``."""


class Commands(TyperGroup):
    """Finds commands by name: the core's own, then those of installed distributions."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*OWN, *_offered()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in OWN:
            found = importlib.import_module(OWN[cmd_name][0]).app
        elif cmd_name in _offered():
            from lmcache_core.registry import Registry

            found = Registry().load("commands", cmd_name)
        else:
            return None
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(_rows())

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Names of commands, without importing what is behind them."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [_Completion(*row) for row in _rows() if row[0].startswith(incomplete)]


class _Completion(NamedTuple):
    """One proposal, as shells are told."""

    value: str
    help: str
    type: str = "plain"


def _rows() -> list[tuple[str, str]]:
    rows = _offered() | {name: text for name, (_, text) in OWN.items()}
    return sorted(rows.items())


def _offered() -> dict[str, str]:
    """Commands of installed distributions, and their help: from the catalogue, else what the distribution says
    of itself. Without the registry: help must not load the plugin contract.
    """
    from importlib.metadata import entry_points

    from lmcache_core._catalogue import CATALOGUE

    known = {entry.object: entry.help for entry in CATALOGUE if entry.help}
    rows = {}
    for entry in entry_points(group="lmcache_core.commands"):
        rows[entry.name] = known.get(entry.value) or _introduced(entry.dist)
    return rows


def _introduced(dist: Any) -> str:
    if dist is None:
        return "From an unnamed distribution."
    summary = (dist.metadata["Summary"] or "").rstrip(".")
    return f"{summary} (from {dist.name})." if summary else f"From {dist.name}."


app = typer.Typer(
    cls=Commands,
    name="lmcache",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A KV cache that every request, process, restart and engine can use.",
)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        print(f"lmcache {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; every error is one line on standard error."""
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=list(sys.argv[1:] if arguments is None else arguments),
            prog_name="lmcache",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return int(status or 0)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `lmcache plugins | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  named boundary: a command must never end in a traceback
        return _failed(error)


def _failed(error: Exception) -> int:
    from lmcache_core.spi import BackendError, ConfigError, LMCacheError, PluginError

    if isinstance(error, typer.Abort):
        return _fail("interrupted", 130)
    if (
        show := getattr(error, "format_message", None)
    ) is not None:  # about the command line itself
        context = getattr(error, "ctx", None)
        if type(error).__name__ == "NoArgsIsHelpError":
            print(show(), file=sys.stderr)
            return 2
        text = " ".join(show().split()).rstrip(".")
        where = f" (see `{context.command_path} --help`)" if context is not None else ""
        return _fail(f"{text[:1].lower()}{text[1:]}{where}", 2)
    if os.environ.get("LMCACHE_DEBUG"):
        raise error
    first = str(error).split("\n", 1)[0]
    if isinstance(error, (ConfigError, PluginError)):
        return _fail(first, 2)
    if isinstance(error, (BackendError, ConnectionError, TimeoutError)):
        return _fail(first, 3)
    if isinstance(error, (LMCacheError, OSError)):
        return _fail(first, 1)
    return _fail(
        f"internal error: {type(error).__name__}: {first} (LMCACHE_DEBUG=1 shows where)", 1
    )


def _fail(message: str, status: int) -> int:
    print(f"lmcache: {message}", file=sys.stderr)
    return status
