"""What only the master's HTTP port tells: all names, and how full the segments are."""

from __future__ import annotations

import urllib.error
import urllib.request

from lmcache_backend_mooncake.config import MooncakeConfig
from lmcache_core.spi import Unavailable, Usage

MOST = 1 << 30
"""Longest answer that is read."""


def names(config: MooncakeConfig) -> list[str]:
    """Names of all objects that begin with the prefix, in order."""
    lines = ask(config, "/get_all_keys").splitlines()
    return sorted(line for line in lines if line.startswith(config.prefix))


def usage(config: MooncakeConfig) -> Usage:
    """Of the whole store, whoever uses it."""
    found: dict[str, int] = {}
    for line in ask(config, "/metrics").splitlines():
        name, _, value = line.partition(" ")
        if name in ("master_allocated_bytes", "master_total_capacity_bytes", "master_key_count"):
            found[name] = int(float(value))
    nbytes, values = found.get("master_allocated_bytes", 0), found.get("master_key_count", 0)
    return Usage(nbytes, values, found.get("master_total_capacity_bytes"))


def ask(config: MooncakeConfig, path: str) -> str:
    """One answer.

    Raises:
        Unavailable: there is none.
    """
    where = f"http://{config.admin}{path}"
    try:
        with urllib.request.urlopen(where, timeout=float(config.timeout)) as answer:
            return str(answer.read(MOST).decode("utf-8", "replace"))
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise Unavailable(f"{where} does not answer: {error}") from error
