"""What ``daemon.py`` measures with: daemons and clients of its own, clocks, touched memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmcache_core import frame, ops
from lmcache_core.spi import Interior, Key, KVSpec, Refusal, SegmentSpec
from lmcache_core.wire import records, replies
from lmcache_core.wire.client import DaemonClient

SPACE = bytes(32)
IDENTITY = bytes(16)
TOKEN = "bench"


def key(number: int, salt: int = 0) -> Key:
    return Key(SPACE, number.to_bytes(16, "big") + salt.to_bytes(16, "big"))


@contextlib.contextmanager
def daemon(*flags: str, gib: float = 1.0) -> Iterator[tuple[str, int, subprocess.Popen[bytes]]]:
    """A daemon of its own: socket, port, process."""
    with tempfile.TemporaryDirectory(prefix="lmcache-bench-") as folder:
        path = f"{folder}/d.sock"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable, "-m", "lmcache_core", "server", "--socket", path, "--port", str(port),
            "--http-port", "none", "--prometheus-port", "none", "--l1-size-gb", str(gib), *flags,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stderr=subprocess.DEVNULL, env={**os.environ, "LMCACHE_SERVER_TOKEN": TOKEN}
        )
        try:
            while not os.path.exists(path) and process.poll() is None:
                time.sleep(0.01)
            yield path, port, process
        finally:
            process.kill()
            process.wait()


def connect(path: str, **options: Any) -> DaemonClient:
    client = DaemonClient(f"unix://{path}", **options)
    while client.home is None:
        time.sleep(0.01)
    return client


def store(
    client: DaemonClient, keys: list[Key], nbytes: int, source: memoryview | None = None
) -> int:
    """Reserve, copy in, commit; counts what became visible."""
    granted = client.reserve([(each, nbytes) for each in keys], None)
    held = [each for each in granted if not isinstance(each, Refusal)]
    if source is not None:
        for at, each in enumerate(held):
            ops.copy(each.view, source[at * nbytes : (at + 1) * nbytes])
    return sum(client.commit_batch(held, [IDENTITY] * len(held)))


def send(client: DaemonClient, keys: list[Key], nbytes: int, payload: memoryview) -> int:
    """The same where a value must be a frame: on plain TCP the daemon keeps no other."""
    granted = client.reserve([(each, nbytes) for each in keys], None)
    held = [each for each in granted if not isinstance(each, Refusal)]
    room = frame.header_nbytes(1)
    spec = KVSpec("uint8", 256, 1, 0, 0, Interior.PAGE, (SegmentSpec(0, 0, 0, nbytes - room),))
    identities = []
    for each in held:
        ops.copy(each.view[room:], payload[: nbytes - room])
        header = frame.seal_value(each.view[:room], each.view[room:], each.key, spec=spec)
        identities.append(header.identity)
    return sum(client.commit_batch(held, identities))


def percentiles(work: Callable[[], object], count: int) -> tuple[float, float]:
    """Median and 99th percentile of the duration, in milliseconds."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    times.sort()
    return times[count // 2] * 1e3, times[count * 99 // 100] * 1e3


def touched(client: DaemonClient) -> None:
    """Wait until both sides have touched all of the memory there is, as they do in the background."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        home = client.home
        stock = memory(client)
        if stock["populated"] < stock["capacity"] - (4 << 20):
            time.sleep(0.05)
        elif home is not None and all(
            home.populated.get(n, 0) >= size for n, size in home.sizes.items()
        ):
            return
        time.sleep(0.05)


def shared(nbytes: int) -> memoryview:
    """Touched shared memory."""
    view = memoryview(mmap.mmap(-1, nbytes))
    ops.populate(view)
    return view


def fetch(client: DaemonClient, keys: list[Key], nbytes: int, into: memoryview) -> None:
    loaded = client.load(keys, None)
    assert len(loaded.leases) == len(keys), loaded.reason
    for at, lease in enumerate(loaded.leases):
        ops.copy(into[at * nbytes : (at + 1) * nbytes], lease.view)
    client.release(loaded.leases)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def cpu(pid: int) -> float:
    """Seconds of CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(client: DaemonClient) -> dict[str, Any]:
    document = json.loads(client.ask(replies.Document, records.Describe).json)
    found: dict[str, Any] = document["memory"]
    return found
