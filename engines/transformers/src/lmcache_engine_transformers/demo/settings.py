"""What the demo configures: memory above, and the tier that outlives the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import yaml

from lmcache_core.spi import ConfigError, Secret
from lmcache_core.testing.services import Daemon

CPU_SIZE = "1GiB"
BRIEF = ("--texts", "3", "--context", "1024", "--following", "256")
"""For calibrating: a fifth of what it reads by itself, since somebody waits."""


def settings_for(tier: str, serde: str, chunk: int, place: Path, /) -> dict[str, Any]:
    """Memory above, and the tier that outlives the process below it, empty.

    Raises:
        ConfigError: ``tier`` is neither a name nor one mapping.
        PluginError: no such tier.
        Unsupported: the tier has neither a folder nor a server that it can start by itself.
    """
    written = yaml.safe_load(tier)
    if isinstance(written, str):
        written = {written: _empty(written, place)}
    if not (isinstance(written, dict) and len(written) == 1):
        raise ConfigError(f"--tier takes a name or one 'PLUGIN: {{OPTIONS}}', not {tier!r}")
    ((plugin, options),) = written.items()
    # A demo on a busy machine shows hits, not deadlines.
    lower = {"deadline": "60s", "write": "through", **(options or {})}
    if serde:
        lower["serde"] = yaml.safe_load(f"[{serde}]")
    return {
        "chunk_size": chunk,
        "tiers": [{"cpu": {"size": CPU_SIZE}}, {plugin: lower}],
        "manager": {"cost_gate": False, "dirty_cap": 0.9},
    }


@contextmanager
def two_caches(settings: dict[str, Any], /) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Settings of two processes, so that the second finds in the lower tier alone what the first has stored.

    A folder belongs to one cache at a time: it is each process's own. A server is shared by two daemons, which end with this.
    """
    ((_, lower),) = settings["tiers"][-1].items()
    if "path" in lower:
        yield settings, settings
        return
    with TemporaryDirectory(prefix="lmcache-demo-") as name:
        folder = Path(name)
        with Daemon(folder / "a", settings) as one, Daemon(folder / "b", settings) as two:
            first, second = ({"socket": each.path, "timeout": "60s"} for each in (one, two))
            yield {"daemon": first}, {"daemon": second}


def calibrated(
    settings: dict[str, Any], folder: Path, place: Path, say: Callable[[str], None], /
) -> dict[str, Any]:
    """The same, with tables of this model for every serde that needs some; made once and kept."""
    from lmcache_core.config import permissions

    ((_, lower),) = settings["tiers"][-1].items()
    chain = []
    for each in lower.get("serde", ()):
        ((name, options),) = ({each: None} if isinstance(each, str) else each).items()
        known = {field.name for field in fields(permissions().load("serdes", name).config_type)}
        if "tables" in known and "tables" not in (options or {}):
            tables = place / f"{folder.name}.tables"
            if not tables.exists():
                say("calibrating, once")
                command = ["calibrate", str(folder), "--out", str(tables), "--no-report", *BRIEF]
                run_module(["lmcache_core", *command], say=lambda line: say(f"calibrating, {line}"))
            options = {**(options or {}), "tables": str(tables)}
        chain.append({name: options} if options else name)
    if chain:
        lower["serde"] = chain
    return settings


def run_module(
    module: Sequence[str], text: str = "", say: Callable[[str], object] = lambda line: None
) -> str:
    """Standard output of a module of Python.

    Args:
        text: its standard input.
        say: told each line of its standard error as it comes.

    Raises:
        RuntimeError: it failed; its last word.
    """
    command, last = [sys.executable, "-m", *module], "no word"
    with TemporaryFile("w+") as given, TemporaryFile("w+") as output:
        given.write(text)
        given.seek(0)
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=given, stdout=output, stderr=pipe, text=True) as run:
            try:
                for line in filter(None, map(str.strip, run.stderr or ())):
                    say(last := line)
            except (
                BaseException
            ):  # most likely Ctrl-C, which only a terminal tells the module as well
                run.kill()
                run.wait()
                raise
        if run.returncode:
            raise RuntimeError(last)
        output.seek(0)
        return output.read()


def _empty(plugin: str, place: Path) -> dict[str, Any]:
    """Options of a tier with nothing in it: in a new folder, or in a server that ends with this process."""
    from lmcache_core.config import permissions

    found = permissions().load("backends", plugin)
    if any(field.name == "path" for field in fields(found.config_type)):
        kept = place / "tier"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return {"path": str(kept), "size": "4GiB"}
    config = found.testing_config()
    written = ((field, getattr(config, field.name)) for field in fields(config))
    return {
        field.name: value.reveal() if isinstance(value, Secret) else value
        for field, value in written
        if value != field.default
    }
