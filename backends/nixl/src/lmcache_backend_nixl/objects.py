"""Parts as objects: OBJ (S3), AZURE_BLOB, DOCA_MEMOS.

NIXL tells of an object whether it is there, not how long it is, fills a buffer with less than was asked for and calls that
success, and cannot delete. So an object begins with 16 bytes: a mark and the length; a deleted part is a mark alone.
"""

from __future__ import annotations

import itertools
import mmap
import socket
import struct
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from lmcache_backend_nixl.agent import Agent
from lmcache_backend_nixl.config import NixlConfig, RailConfig
from lmcache_backend_nixl.driver import Call, Operation, Together
from lmcache_backend_nixl.memory import pieces
from lmcache_backend_nixl.rail import Rail, Transfer, all_stored, wanted
from lmcache_core.spi import (
    MISSED,
    PRESENT,
    STORED,
    BackendError,
    ConfigError,
    Context,
    Corrupt,
    Load,
    Loaded,
    Unavailable,
)

HEAD = struct.Struct("<8sQ")
MARK = b"LMCNIXL1"
DELETED = (1 << 64) - 1
ANY = 1 << 40
"""A length that no object has: what is registered as the object's."""


class ObjectRail(Rail):
    """A bucket or container."""

    most = (5 << 30) - HEAD.size

    def __init__(self, rail: RailConfig, config: NixlConfig, context: Context, /) -> None:
        self._rail, self._config = rail, config
        self._name = f"objects-{context.pid:x}-{context.random.getrandbits(64):016x}"
        self._numbers = itertools.count(1)
        self._moving: Agent | None = None
        self._asking: Agent | None = None

    def open(self) -> None:
        self.close()
        kind, params = self._rail.backend, self._rail.parameters
        self._check()
        self._asking = Agent(f"{self._name}-asking", kind, params)
        self._moving = Agent(self._name, kind, params)
        probe = f"{self._name}.probe"
        try:
            self._write(probe, HEAD.pack(MARK, DELETED))
        except Unavailable as error:
            raise ConfigError(
                f"nixl {kind} takes no object ({error}); check endpoint, bucket, region and keys"
            ) from None

    def close(self) -> None:
        for agent in (self._moving, self._asking):
            if agent is not None:
                agent.close()
        self._moving = self._asking = None

    @property
    def moving(self) -> Agent:
        assert self._moving is not None, "open"
        return self._moving

    @property
    def asking(self) -> Agent:
        assert self._asking is not None, "open"
        return self._asking

    def _check(self) -> None:
        """Ask whether anybody listens: the plugin's own tries take half a minute to fail."""
        where = urlsplit(self._rail.parameters.get("endpoint_override", ""))
        if where.hostname:
            port = where.port or (443 if where.scheme == "https" else 80)
            try:
                socket.create_connection((where.hostname, port), self._config.timeout).close()
            except OSError as error:
                raise Unavailable(f"{where.netloc} does not answer: {error}") from None

    # -- heads, on any thread ------------------------------------------------------------------------------

    def lengths(self, names: Sequence[str], /) -> list[int | None]:
        self._check()
        there = self.asking.present(names)
        heads = self._heads([name for name, is_there in zip(names, there, strict=True) if is_there])
        return [heads.get(name) for name in names]

    def _heads(self, names: Sequence[str]) -> dict[str, int | None]:
        """Lengths that stand in the first bytes of objects, all asked at once."""
        room = mmap.mmap(-1, max(1, len(names)) * HEAD.size)
        view = memoryview(room)
        steps = []
        for number, name in enumerate(names):
            into = view[number * HEAD.size : (number + 1) * HEAD.size]
            steps.append(self._step(self.asking, "READ", name, into, 0))
        found: dict[str, int | None] = {}
        errors = []
        for step in steps:
            step.start()
        for number, (name, step) in enumerate(zip(names, steps, strict=True)):
            try:
                step.wait()
                found[name] = _length(view[number * HEAD.size :][: HEAD.size])
            except Unavailable as error:  # deleted by others meanwhile, or a sick store
                errors.append(error)
        if errors and len(errors) == len(names):
            raise errors[0]
        return found

    def _write(self, name: str, content: bytes) -> None:
        room = mmap.mmap(-1, len(content))
        room[:] = content
        step = self._step(self.asking, "WRITE", name, memoryview(room), 0)
        step.start()
        step.wait()

    def delete(self, names: Sequence[str], /) -> list[bool]:
        there = [nbytes is not None for nbytes in self.lengths(names)]
        for name, is_there in zip(names, there, strict=True):
            if is_there:
                self._write(name, HEAD.pack(MARK, DELETED))
        return there

    def _step(
        self, agent: Agent, verb: str, name: str, view: memoryview, offset: int
    ) -> _ObjectTransfer:
        number = next(self._numbers)
        local = pieces([view], view.nbytes)
        places = [(offset, view.nbytes, number)]
        return _ObjectTransfer(agent, verb, local, "OBJ", places, name=name)

    # -- parts ---------------------------------------------------------------------------------------------

    def load(self, name: str, load: Load, /) -> Operation:
        yield Call(self._check)
        head = memoryview(mmap.mmap(-1, HEAD.size))
        try:
            yield self._step(self.moving, "READ", name, head, 0)
        except Unavailable:
            if not (yield Call(self.asking.present, [name]))[0]:
                return MISSED
            raise
        if (nbytes := _length(head)) is None:
            return MISSED
        if not bytes(head).startswith(MARK):
            raise Corrupt(f"{load.key!r}: the object is none of ours", operation="load")
        length, at = wanted(load, nbytes), 0
        for view in load.into:
            if part := view[: length - at]:
                yield self._step(self.moving, "READ", name, part, HEAD.size + load.offset + at)
            at += part.nbytes
        return Loaded.filled(length)

    def store(
        self, name: str, views: Sequence[memoryview], /, *, first: bool, others: Together | None
    ) -> Operation:
        if first and (yield Call(self.lengths, [name]))[0] is not None:
            return PRESENT
        # An object is written from one piece of memory.
        nbytes = sum(view.nbytes for view in views)
        whole = memoryview(mmap.mmap(-1, HEAD.size + nbytes))
        HEAD.pack_into(whole, 0, MARK, nbytes)
        at = HEAD.size
        for view in views:
            whole[at : at + view.nbytes] = view
            at += view.nbytes
        if others is not None and (problem := all_stored((yield others))) is not None:
            return problem
        yield self._step(self.moving, "WRITE", name, whole, 0)
        return STORED


class _ObjectTransfer(Transfer):
    """A transfer of an object, which is registered by its name for the time."""

    def __init__(self, *arguments: object, name: str) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._name = name
        self._span = [(0, ANY, self.places[0][2])]

    def begin(self, executor: object, /) -> None:
        self.start()

    def start(self) -> None:
        self.agent.register("OBJ", self._span, self._name)
        try:
            super().begin(None)  # type: ignore[arg-type]
        except BackendError:
            self.agent.deregister("OBJ", self._span, self._name)
            raise

    def ended(self) -> bool:
        try:
            if not super().ended():
                return False
        except BackendError:
            self.agent.deregister("OBJ", self._span, self._name)
            raise
        self.agent.deregister("OBJ", self._span, self._name)
        return True

    def wait(self) -> None:
        while not self.ended():
            time.sleep(0.0005)


def _length(head: memoryview) -> int | None:
    """What a head says; None of a deleted part, zero of what is no head of ours."""
    mark, nbytes = HEAD.unpack(head)
    if mark != MARK:
        return 0
    return None if nbytes == DELETED else int(nbytes)
