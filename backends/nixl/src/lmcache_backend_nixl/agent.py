"""NIXL's bindings behind a few calls: agents, memory, transfers, and why a plugin does not load.

The bindings come from the wheel ``nixl-cu12``, or from ``nixl`` where that is installed instead; neither torch nor CUDA is
imported. Traps of version 1.5 that this module knows:

* a transfer that runs must not be released: that succeeds at once, and the memory is written all the same. Only the end
  of the whole agent ends it;
* a transfer that failed and was asked about again may crash the process: it is released exactly once;
* errors are bare codes, the reason goes to standard error;
* its libnl crashes when the process ends, once UCX has loaded its InfiniBand module;
* with ``NIXL_ETCD_ENDPOINTS`` in the environment an agent exchanges metadata through etcd, and where that hangs the end of the
  agent never returns and holds the interpreter lock: ours are made without it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lmcache_backend_nixl.config import PEERS
from lmcache_core.spi import ConfigError, Region, Unavailable

WHEELS = ("nixl_cu12", "nixl_cu13")
INFINIBAND = "/sys/class/infiniband"
ETCD = "NIXL_ETCD_ENDPOINTS"
Piece = tuple[int, int]
"""Address and length."""
Place = tuple[int, int, int]
"""Offset or address, length, and device: a descriptor of a file, the number of an object."""


def bindings() -> Any:
    """The module of the wheel that is installed.

    Raises:
        ConfigError: none is, or it cannot be imported.
    """
    problem = "not installed"
    for name in WHEELS:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(name):
                problem = f"{name} needs {error.name}"
        except ImportError as error:
            problem = str(error)
    raise ConfigError(f"nixl: {problem}; pip install nixl-cu12")


def plugin_problem(plugin: str, /) -> str | None:
    """Why the shared object of a NIXL plugin cannot be loaded here, or None. Loads it."""
    module = Path(bindings().__file__).resolve().parent
    places = [
        module.parent / f".{module.name}.mesonpy.libs" / "plugins",
        module.parent / f"{module.name}.libs" / "nixl",
    ]
    for place in places:
        if (path := place / f"libplugin_{plugin}.so").exists():
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                return str(error).rpartition("/")[2]
            return None
    return f"{module.name} brings no such plugin"


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set (None: remove) variables of the C library's environment for a while: some settings have no parameter."""
    libc = ctypes.CDLL(None)
    for name, value in values.items():
        if value is None:
            libc.unsetenv(name.encode())
        else:
            libc.setenv(name.encode(), value.encode(), 1)
    try:
        yield
    finally:
        for name in values:
            if (before := os.environ.get(name)) is None:
                libc.unsetenv(name.encode())
            else:
                libc.setenv(name.encode(), before.encode(), 1)


def _settings(plugin: str) -> dict[str, str]:
    if plugin == "OBJ":
        # The kit of AWS tries eleven times otherwise, each time for 3 s of silence or more.
        return {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2"}
    if plugin in PEERS and "UCX_MODULES" not in os.environ and not os.path.isdir(INFINIBAND):
        return {"UCX_MODULES": "^ib"}
    return {}


class Agent:
    """One NIXL agent with one plugin. Used by one thread at a time.

    Raises:
        ConfigError: the plugin is not there, does not load, or refuses its parameters.
    """

    def __init__(self, name: str, plugin: str, params: dict[str, str], /) -> None:
        self.name = name
        self.plugin = plugin
        self._nixl = nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        with _environment({ETCD: None}):
            self._agent = nixl.nixlAgent(name, config)
        if plugin not in self._agent.getAvailPlugins():
            raise ConfigError(f"NIXL has no plugin {plugin} here: {plugin_problem(plugin)}")
        try:
            with _environment(_settings(plugin)):
                self._backend = self._agent.createBackend(plugin, params)
        except Exception as error:  # noqa: BLE001  # the bindings' errors share no base
            why = plugin_problem(plugin) or f"it refuses ({error}): {', '.join(sorted(params))}"
            raise ConfigError(f"NIXL plugin {plugin} cannot be used here: {why}") from None
        self._closed = False
        self._regions: list[Piece] = []
        self._lent: Counter[Piece] = Counter()
        self._mutex = threading.Lock()

    # -- memory --------------------------------------------------------------------------------------------

    def add(self, region: Region, /) -> None:
        """Register memory for good."""
        piece = (region.pointer, region.nbytes)
        self.register("DRAM", [(*piece, 0)])
        self._regions.append(piece)

    def remove(self, region: Region, /) -> None:
        piece = (region.pointer, region.nbytes)
        if piece in self._regions:
            self._regions.remove(piece)
            self.deregister("DRAM", [(*piece, 0)])

    def covers(self, piece: Piece, /) -> bool:
        """Whether memory is registered for good."""
        at, nbytes = piece
        return any(a <= at and at + nbytes <= a + n for a, n in self._regions)

    def lend(self, pieces: Sequence[Piece], /) -> None:
        """Register what is not registered, until ``take_back``."""
        for piece in pieces:
            if not self.covers(piece):
                with self._mutex:
                    self._lent[piece] += 1
                    if self._lent[piece] == 1:
                        self.register("DRAM", [(*piece, 0)])

    def take_back(self, pieces: Sequence[Piece], /) -> None:
        for piece in pieces:
            with self._mutex:
                if self._lent[piece]:
                    self._lent[piece] -= 1
                    if not self._lent[piece]:
                        self.deregister("DRAM", [(*piece, 0)])

    def register(self, kind: str, places: Sequence[Place], /, name: str = "") -> None:
        self._do("register", "registerMem", self._list(kind, places, name))

    def deregister(self, kind: str, places: Sequence[Place], /, name: str = "") -> None:
        with suppress(Unavailable):
            self._do("deregister", "deregisterMem", self._list(kind, places, name))

    def _list(self, kind: str, places: Sequence[Place], name: str) -> Any:
        segment = getattr(self._nixl, f"{kind}_SEG")
        return self._nixl.nixlRegDList(segment, [(*place, name) for place in places])

    # -- transfers -----------------------------------------------------------------------------------------

    def post(
        self, verb: str, pieces: Sequence[Piece], kind: str, places: Sequence[Place], peer: str = ""
    ) -> Any:
        """Start to ``READ`` into memory or to ``WRITE`` from it; returns a handle.

        Raises:
            Unavailable: it could not be started; nothing touches the memory.
        """
        nixl = self._nixl
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(*piece, 0) for piece in pieces])
        other = nixl.nixlXferDList(getattr(nixl, f"{kind}_SEG"), list(places))
        operation = nixl.NIXL_READ if verb == "READ" else nixl.NIXL_WRITE
        handle = self._do(
            verb.lower(), "createXferReq", operation, local, other,
            peer or self.name, "", [self._backend],
        )  # fmt: skip
        try:
            self._do(verb.lower(), "postXferReq", handle)
        except Unavailable:
            self._release(handle)
            raise
        return handle

    def ended(self, handle: Any, /) -> bool:
        """Whether a transfer has ended; a handle is not used again afterwards.

        Raises:
            Unavailable: it has, without success.
        """
        try:
            status = self._do("transfer", "getXferStatus", handle)
        except Unavailable:
            self._release(handle)
            raise
        if status == self._nixl.NIXL_IN_PROG:
            return False
        self._release(handle)
        return True

    def _release(self, handle: Any) -> None:
        with suppress(Unavailable):
            self._do("release", "releaseXferReq", handle)

    def present(self, names: Sequence[str], /) -> list[bool]:
        """Which objects are there."""
        wanted = self._nixl.nixlRegDList(
            self._nixl.OBJ_SEG, [(0, 0, number, name) for number, name in enumerate(names)]
        )
        found = self._do("lookup", "queryMem", wanted, self._backend)
        return [one is not None for one in found]

    # -- peers ---------------------------------------------------------------------------------------------

    def describe(self) -> bytes:
        """What a peer needs to reach memory that is registered by now."""
        return bytes(self._do("describe", "getLocalMD"))

    def meet(self, description: bytes, /) -> None:
        self._do("meet", "loadRemoteMD", description)

    def progress(self) -> None:
        """Let peers go on with what they read from here."""
        self._do("progress", "getNotifs", {})

    def part(self, peer: str, /) -> None:
        with suppress(Unavailable):
            self._do("part", "invalidateRemoteMD", peer)

    def close(self) -> None:
        """End connections and transfers: afterwards nothing touches any memory. Idempotent."""
        if not self._closed:
            self._closed = True
            del self._agent

    def _do(self, what: str, verb: str, *arguments: Any) -> Any:
        if self._closed:
            raise Unavailable(f"{self.plugin}: {what} failed: closed")
        try:
            return getattr(self._agent, verb)(*arguments)
        except Exception as error:  # noqa: BLE001  # the bindings' errors share no base
            # Without its traceback, whose frames would hold memory.
            raise Unavailable(f"{self.plugin}: {what} failed: {error}") from None
