"""How many tokens the tiers hold, from what the ranks have registered and what the daemon says of its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmcache_core.spi import BackendError, ConfigError
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient


def capacity(client: DaemonClient, nbytes: int, chunk: int, /) -> str:
    """One line for people; without a daemon it says what is known here.

    Args:
        nbytes: of a chunk of so many tokens, all groups and ranks together.
    """
    try:
        document = json.loads(client.ask(replies.Document, records.Describe).json)
    except (BackendError, ConfigError):
        document = {}
    held = [f"{name} {limit // nbytes * chunk} tokens" for name, limit in _limits(document)]
    return f"a token takes {nbytes / chunk:.0f} bytes of the cache; full: {', '.join(held) or 'unknown'}"


def _limits(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    memory = document.get("memory")
    found = [(memory["tier"], memory["capacity"])] if memory else []
    return found + [(t["name"], t["limit"]) for t in document.get("tiers", ()) if t.get("limit")]
