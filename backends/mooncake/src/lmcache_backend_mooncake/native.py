"""The library: loading it, what its numbers mean, addresses of memory, and the connections it has made.

Everything here is about ``mooncake.store`` 0.3.13, whose calls block, release the interpreter lock, and cannot be
cancelled: a transfer over TCP whose peer is silent waits for 60 s and is then left to itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lmcache_backend_mooncake.config import ELECTED, MooncakeConfig
from lmcache_core.spi import Unavailable

FULL = (-200, -714, -1602, -1700)
"""No room, or none that may be made now."""
GONE = (-703, -704, -712)
INVALID, TRANSFER, RPC = -600, -800, (-900, -901)
SAID = {
    -1: "internal error",
    -101: "segment not found",
    -200: "no segment has room",
    -600: "invalid parameters",
    -703: "not ready",
    -704: "not found",
    -706: "it is leased",
    -707: "the lease ended before the transfer",
    -712: "its segment is gone",
    -714: "in use",
    -800: "the transfer failed",
    -900: "the master does not answer",
    -901: "the master did not answer in time",
    -1700: "the tenant's quota is used up",
}
LIBRARIES = {
    "libibverbs": "apt-get install libibverbs1",
    "libnuma": "apt-get install libnuma1",
    "libcurl": "apt-get install libcurl4",
    "libcud": "pip install lmcache[mooncake] for machines without CUDA",
}


def said(code: int) -> str:
    """A number in words."""
    return f"{SAID.get(code, 'error')} ({code})"


def problem() -> str | None:
    """Why the library cannot be used here, with the remedy; None when it can."""
    # Its messages about every absent key and every connection are ours to give.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.store  # type: ignore[import-untyped]  # noqa: F401
    except ModuleNotFoundError:
        return "no package mooncake here: pip install lmcache[mooncake], with CUDA lmcache[mooncake-cuda]"
    except ImportError as error:
        missing = str(error).partition(":")[0]
        remedy = next((LIBRARIES[name] for name in LIBRARIES if name in missing), "see its log")
        return f"mooncake does not load: {error}; {remedy}"
    return None


def connect(config: MooncakeConfig) -> tuple[Any, Any]:
    """A client that is set up, and where its values go.

    Raises:
        Unavailable: it cannot be; the master does not answer, or an address is wrong.
    """
    if (trouble := problem()) is not None:
        raise Unavailable(trouble, retryable=False)
    import mooncake.store

    for name in (
        "MC_RPC_TIMEOUT_MS",
        "MC_RPC_CONNECT_TIMEOUT_MS",
    ):  # there is no other way to say it
        os.environ.setdefault(name, str(round(config.timeout * 1000)))
    store = mooncake.store.MooncakeDistributedStore()
    host = config.host or _seen_from(config.master)
    place = f"{host}:{config.port or _free_port()}"
    code = store.setup(
        {
            "local_hostname": place,
            "metadata_server": config.metadata,
            "global_segment_size": str(config.segment),
            "local_buffer_size": str(config.buffer),
            "protocol": config.over,
            "rdma_devices": config.devices,
            "master_server_addr": config.master,
            "tenant_id": config.tenant,
        }
    )
    if code:
        where, why = config.master, said(code)
        if config.elected:
            why += "; does it answer, and is a master elected?"
        raise Unavailable(f"cannot use the master at {where} as {place}: {why}")
    how = mooncake.store.ReplicateConfig()
    how.replica_num = config.replicas
    if config.prefer:
        how.preferred_segment = config.prefer
    return store, how


class _Buffer(ctypes.Structure):
    """``Py_buffer``: https://docs.python.org/3/c-api/buffer.html ."""

    _fields_ = [
        ("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    ]  # fmt: skip


def address(view: memoryview) -> int:
    """Where a view lies, also a read-only one; valid as long as the view."""
    found = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    where = int(found.buf or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))
    return where


def queues() -> set[int]:
    """Descriptors of this process that wait for events of others."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is gone
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found.add(int(name))
    return found


def cut(queues: Iterable[int], spare: Iterable[str]) -> int:
    """End the connections that the event queues of a client watch, so that transfers on them fail now.

    What others have opened to this process stays, and what leads to the addresses ``spare``. Returns how many ended.
    """
    ends: list[socket.socket] = []
    for queue in queues:
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/self/fdinfo/{queue}").read_text().splitlines()
        for line in lines:
            with contextlib.suppress(OSError):
                if line.startswith("tfd:") and (end := _socket(int(line.split()[1]))):
                    ends.append(end)
    spared, listening, made = set(spare), set(), []
    for end in ends:
        with contextlib.suppress(OSError):  # not a socket, or not connected
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(end.getsockname()[1])
            elif f"{end.getpeername()[0]}:{end.getpeername()[1]}" not in spared:
                made.append(end)
    count = 0
    for end in made:
        with contextlib.suppress(OSError):
            if end.getsockname()[1] not in listening:
                end.shutdown(socket.SHUT_RDWR)
                count += 1
    for end in ends:
        end.close()
    return count


def numbers(address: str) -> set[str]:
    """``HOST:PORT`` by number; those of all that elect a master."""
    first, *others = address.removeprefix(f"{ELECTED}://").split(";")
    if others:
        return set().union(numbers(first), *map(numbers, others))
    host, _, port = first.rpartition(":")
    try:
        found: list[Any] = list(
            socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        )
    except (OSError, ValueError):
        return set()
    return {f"{place[0]}:{place[1]}" for place in (each[4] for each in found)}


def _seen_from(master: str) -> str:
    """This node's address on the way to the master."""
    first = master.rpartition("://")[2].partition(";")[0]
    host, _, port = first.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Unavailable(f"no way to the master at {first}: {error}") from error


def _socket(descriptor: int) -> socket.socket | None:
    """A second handle of a socket; None for anything else."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        return None
    return socket.socket(fileno=os.dup(descriptor))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
