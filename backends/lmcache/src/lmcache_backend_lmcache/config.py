"""Options of the ``lmcache`` tier."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_core.spi import Duration, Secret


@dataclass(frozen=True, slots=True)
class LMCacheConfig:
    """Which daemon.

    Attributes:
        url: ``lmcache://HOST[:PORT]``, ``lm://...``, ``tls://HOST[:PORT][?ca=FILE]``, or ``unix:///PATH`` of a
            daemon of this user on this node.
        token: of a daemon on another node, or of another user.
        timeout: longest wait for one answer.
        threads: most calls at once.
    """

    url: str
    token: Secret = Secret("")
    timeout: Duration = Duration(1.0)
    threads: int = 4
