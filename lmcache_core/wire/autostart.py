"""The private daemon: started by whoever of a user's engines needs it first, ended when the last has gone.

It is keyed by user, node and effective configuration, not by engine: a restarted engine, or the second of two with
one configuration, finds it running. The starter holds a lock; the new process gets a session, an environment
and a CPU set of its own, so that nothing of an engine's start leaks into it, and no death of a parent ends it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from typing import Any

from lmcache_core.config import Effective
from lmcache_core.spi.errors import Unavailable
from lmcache_core.wire.address import runtime_folder, socket_path
from lmcache_core.wire.client import DaemonClient

_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "VIRTUAL_ENV",
         "PYTHONPATH", "PYTHONHOME", "PYTHONPYCACHEPREFIX")  # fmt: skip
_KEPT_PREFIX = "LMCACHE_"
_START_S = 30.0


def connect_private(effective: Effective, /, *, name: str = "") -> DaemonClient:
    """Reach the private daemon of a configuration, starting it when it is not there.

    Memory is configured per worker (``daemon.workers``); the daemon has it for all of them together.

    Raises:
        Unavailable: it did not start; says where its log is.
    """
    config, folder, key = effective.config.daemon, runtime_folder(), digest(effective)
    where = socket_path(folder, f"private-{key}")
    start = _Start(os.path.join(folder, f"private-{key}"), where, effective)
    start.run()
    client = DaemonClient(
        f"unix://{where}", timeout=config.timeout, name=name, transfer=config.transfer.value
    )
    client.revive = start.revive
    return client


def digest(effective: Effective, /) -> str:
    """What one private daemon serves: this user, this node, this configuration."""
    said = [
        (setting.path, repr(setting.value))
        for setting in effective.settings
        if not setting.path.startswith("daemon.") or setting.path == "daemon.workers"
    ]
    text = json.dumps([os.getuid(), os.uname().nodename, sorted(said)])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class _Start:
    """Everything needed to start one private daemon, now and after a crash."""

    def __init__(self, base: str, where: str, effective: Effective) -> None:
        self._base = base
        self._path = where
        self._log = logging.getLogger("lmcache.daemon")
        self._again = 0.0
        config = effective.config.daemon
        self._command = [
            sys.executable, "-m", "lmcache_core", "server", "--private", "--port", "0",
            "--socket", where, "--grace", str(float(config.grace)), "--settings", f"{base}.json",
        ]  # fmt: skip
        if effective.path is not None:
            self._command += ["--config", effective.path]
        self._settings = json.dumps({**effective.given, **_scaled(effective)}, default=str)

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
        """Whether a daemon is there; one that hangs may have a full queue, where nobody waits for its end."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            return probe.connect_ex(self._path) in (0, errno.EAGAIN)

    def _spawn(self) -> None:
        with open(f"{self._base}.json", "w", opener=_private) as out:
            out.write(self._settings)
        env = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIX)}
        began = time.monotonic()
        with open(f"{self._base}.log", "a", opener=_private) as log:
            process = subprocess.Popen(
                self._command,
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


def _scaled(effective: Effective) -> dict[str, Any]:
    """The size of memory for all workers."""
    workers = effective.config.daemon.workers
    first = effective.config.tiers[:1]
    return {
        f"tiers.{tier.name}.size": int(tier.size) * workers
        for tier in first
        if workers > 1 and tier.size is not None
    }


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _last_line(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as log:
        lines = [line.strip() for line in log if line.strip()]
    return lines[-1] if lines else "no message"
