"""The private daemon: started by whoever of a user's engines needs it first, ended when the last has gone.

It is keyed by user, node and effective configuration, not by engine: a restarted engine, or the second of two with
one configuration, finds it running. The starter holds a lock; the new process gets a session, an environment
and a CPU set of its own, so that nothing of an engine's start leaks into it, and no death of a parent ends it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from lmcache_core.config import Effective
from lmcache_core.spi.errors import Unavailable
from lmcache_core.wire.address import runtime_folder, socket_path
from lmcache_core.wire.client import DaemonClient

_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "VIRTUAL_ENV",
         "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX")  # fmt: skip
_KEPT_PREFIX = "LMCACHE_"
_OF_THE_CLIENT = ("daemon.", "mp_")
_START_S = 30.0


def connect_private(
    effective: Effective,
    /,
    *,
    path: str | os.PathLike[str] | None = None,
    flags: Mapping[str, Any] | None = None,
    ranks: int = 1,
    grace: float = 30.0,
    timeout: float = 1.0,
    name: str = "",
) -> DaemonClient:
    """Reach the private daemon of a configuration, starting it when it is not there.

    Args:
        effective: the configuration, read.
        path, flags: where it was read from, for the daemon to read again.
        ranks: workers of this engine on this node; sizes are per worker, the daemon has them together.
        grace: seconds it stays after its last client.

    Raises:
        Unavailable: it did not start; says where its log is.
    """
    folder = runtime_folder()
    key = digest(effective, ranks)
    where = socket_path(folder, f"private-{key}")
    start = _Start(folder, key, where, path, dict(flags or {}), ranks, grace, effective)
    start.run()
    client = DaemonClient(f"unix://{where}", timeout=timeout, name=name)
    client.revive = start.revive
    return client


def digest(effective: Effective, ranks: int = 1, /) -> str:
    """What one private daemon serves: this user, this node, this configuration."""
    said = [
        (setting.path, repr(setting.value))
        for setting in effective.settings
        if not setting.path.startswith(_OF_THE_CLIENT)
    ]
    text = json.dumps([os.getuid(), os.uname().nodename, ranks, sorted(said)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Start:
    """Everything needed to start one private daemon, now and after a crash."""

    def __init__(
        self,
        folder: str,
        key: str,
        where: str,
        path: str | os.PathLike[str] | None,
        flags: dict[str, Any],
        ranks: int,
        grace: float,
        effective: Effective,
    ) -> None:
        self._base = os.path.join(folder, f"private-{key}")
        self._path = where
        self._log = logging.getLogger("lmcache.daemon")
        self._again = 0.0
        self._command = [
            sys.executable, "-m", "lmcache_core", "server", "--private", "--port", "0",
            "--socket", where, "--grace", str(grace),
        ]  # fmt: skip
        written = {
            k: v for k, v in flags.items() if not k.startswith(_OF_THE_CLIENT) and k != "daemon"
        }
        written.update(_scaled(effective, ranks))
        self._settings = json.dumps(written, default=str)
        if path is not None:
            self._command += ["--config", os.path.abspath(path)]

    def run(self) -> None:
        """Start the daemon unless it runs; under a lock, so that one of many starters does."""
        with open(f"{self._base}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._serves():
                return
            self._spawn()

    def revive(self) -> None:
        """Start it again after its end, now and then; never raises, never waits for a lock."""
        now = time.monotonic()
        if now < self._again:
            return
        self._again = now + 5.0
        try:
            with open(f"{self._base}.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._serves():
                    self._spawn()
        except (OSError, Unavailable) as error:
            self._log.warning("private daemon not started again: %s", error)

    def _serves(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self._path) == 0

    def _spawn(self) -> None:
        with open(f"{self._base}.json", "w", opener=_private) as out:
            out.write(self._settings)
        env = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIX)}
        began = time.monotonic()
        with open(f"{self._base}.log", "a", opener=_private) as log:
            process = subprocess.Popen(
                [*self._command, "--settings", f"{self._base}.json"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/",
                start_new_session=True, close_fds=True,
            )  # fmt: skip
        while not self._serves():
            if process.poll() is not None or time.monotonic() - began > _START_S:
                raise Unavailable(
                    f"the private daemon did not start: {_last_line(f'{self._base}.log')} "
                    f"(log: {self._base}.log)"
                )
            time.sleep(0.01)
        self._log.info(
            "private daemon started: pid %d, socket %s, log %s.log",
            process.pid,
            self._path,
            self._base,
        )
        # It outlives us; nobody waits for it, and the interpreter must not complain about that.
        process.returncode = 0


def _scaled(effective: Effective, ranks: int) -> dict[str, Any]:
    """Sizes of memory are per worker; the daemon has the sum."""
    if ranks <= 1:
        return {}
    return {
        f"tiers.{tier.name}.size": int(tier.size) * ranks
        for tier in effective.config.tiers[:1]
        if tier.size is not None
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _last_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as log:
        lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "no message"
