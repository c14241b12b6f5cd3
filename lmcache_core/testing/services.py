"""Services that tests need: a promised one that is missing is a failure, any other is a skip that says how to start it.

CI promises with ``LMCACHE_TEST_SERVICES=redis,s3``, so a green run there cannot hide a service that never came up.
A plugin whose store is a server starts one of its own for ``testing_config`` (then ``lmcache plugins verify`` and the
demo need nothing started by hand), for its tests and for its benchmark: a subclass of ``Serving`` in ``serving.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from unittest import SkipTest
from urllib.request import urlopen

from lmcache_core.spi import Unavailable

PROMISE = "LMCACHE_TEST_SERVICES"
EPHEMERAL = 32768
"""From here on Linux takes ports for outgoing connections."""
UNPACKED = Path(__file__).resolve().parents[2] / ".lmcache-work/bin"
"""Programs of Debian packages that ``.ci/system.sh`` unpacked, because installing them would start a service."""


def need_service(
    name: str, problem: str | None, /, *, start: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Go on where the service is there (``problem`` is None), else skip or fail the test.

    Args:
        problem: one line on why it cannot be used, None when it can.
        start: the command that starts it.
    """
    if problem is None:
        return
    if name in environment.get(PROMISE, "").replace(",", " ").split():
        raise AssertionError(f"{PROMISE} promises {name}, but {problem}; start it with: {start}")
    raise SkipTest(f"{name}: {problem}; start it with: {start}")


def find_program(name: str, /) -> str | None:
    """A program that is installed, or lies unpacked in the work folder of the tree."""
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED))


def free_port(below: int = EPHEMERAL) -> int:
    """A TCP port of the loopback that nobody uses now, and that no outgoing connection is given meanwhile."""
    while True:
        port = random.randrange(1 << 14, min(below, EPHEMERAL))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Serving(ABC):
    """A server that belongs to one test, demo or benchmark; ended by its own pid, at the latest with this process.

    Args:
        command: program and arguments.
        folder: an existing one, its working folder; gets ``server.log``.
    """

    patience = 20.0

    def __init__(self, command: Sequence[str], /, *, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self._command = list(command)
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def ready(self) -> bool:
        """Whether it serves; asked again and again after the start."""

    def start(self) -> Self:
        """Start it, also again, and wait until it serves.

        Raises:
            Unavailable: it ended, or does not serve in time; the end of its log is in the message.
        """
        with open(self.log, "ab") as log:
            self._child = subprocess.Popen(
                self._command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        atexit.register(self.kill)
        end = time.monotonic() + self.patience
        while not self.ready():
            if self._child.poll() is not None or time.monotonic() > end:
                self.kill()
                said = self.log.read_text(errors="replace").strip()[-300:]
                raise Unavailable(f"{self._command[0]} does not serve: {said}")
            time.sleep(0.005)
        return self

    def suspend(self) -> None:
        """Let it hang (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once (SIGKILL); idempotent, also while it hangs."""
        self._signal(signal.SIGKILL)
        if self._child is not None:
            self._child.wait()
            self._child = None
        atexit.unregister(self.kill)

    def _signal(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()


class Daemon(Serving):
    """``lmcache server`` on a unix socket alone; also it ends when it has had no client for 15 minutes.

    Args:
        folder: a new one, with a short path.
        settings: its configuration.
    """

    patience = 60.0

    def __init__(self, folder: Path, settings: Mapping[str, object], /) -> None:
        folder.mkdir()
        self.path = f"{folder}/s"
        written = folder / "kv.yaml"
        written.write_text(json.dumps(settings))
        command = [
            sys.executable, "-m", "lmcache_core", "server", "--private", "--grace", "900",
            "--socket", self.path, "--config", str(written),
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    def ready(self) -> bool:
        return "serves on" in self.log.read_text()


class Etcd(Serving):
    """An etcd of one member, that keeps what it has over a restart.

    Args:
        program: see ``find_program``.
        folder: an empty one of its own.
    """

    def __init__(self, program: str, folder: Path, /) -> None:
        self.member, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
        self.url = f"http://{self.member}"
        command = [
            program, f"--data-dir={folder}/data", "--logger=zap", "--log-level=error",
            f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        ]  # fmt: skip
        super().__init__(command, folder=folder)

    def ready(self) -> bool:
        with contextlib.suppress(OSError), urlopen(f"{self.url}/health") as answer:
            return b"true" in answer.read()
        return False
