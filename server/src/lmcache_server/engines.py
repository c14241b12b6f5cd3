"""Engines of several ranks: one key space they agree on, and chunks they fill together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_core import frame
from lmcache_core.identity.space import ROOT_TAG, SPACE_TAG
from lmcache_core.memory.leases import Held
from lmcache_core.spi import ConfigError, Interior, Key, KVSpec, Refusal, SegmentSpec
from lmcache_core.storage.manager import StorageManager
from lmcache_core.wire.records import Form, Register
from lmcache_server.session import Session
from lmcache_server.slices import MANY_WRITTEN, in_parts, in_turns

DIGEST = 16
MOST_OVER = 4096
OLD = 64
"""Turns after which a chunk that some rank never came for is dropped."""


@dataclass(slots=True)
class Engine:
    """One engine instance.

    Attributes:
        space: canonical bytes; empty until the first rank has registered.
        specs: stored form and header room of a full chunk, per group.
        writes: per rank, per group: positions of its segments.
        joints: chunks that are being filled.
        over: turn in which a chunk was last given up, so that a rank that comes late does not begin it alone.
    """

    name: str
    ranks: int
    space: bytes = b""
    forms: list[Form] = field(default_factory=list)
    specs: list[tuple[KVSpec, int]] = field(default_factory=list)
    writes: dict[int, list[list[int]]] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    joints: dict[Key, Joint] = field(default_factory=dict)
    over: dict[Key, int] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.sessions]

    def register(self, session: Session, record: Register) -> None:
        """Take a rank in.

        Raises:
            ConfigError: it disagrees with the ranks that were here before it.
        """
        if record.ranks != self.ranks:
            raise ConfigError(
                f"engine {self.name!r} has {self.ranks} ranks, rank {record.rank} says {record.ranks}"
            )
        if record.rank < 0:
            return
        if record.rank >= self.ranks:
            raise ConfigError(f"engine {self.name!r} has no rank {record.rank} of {self.ranks}")
        if self.space and (record.space, record.forms) != (self.space, self.forms):
            theirs, ours = (hashlib.sha256(s).hexdigest()[:16] for s in (record.space, self.space))
            raise ConfigError(
                f"rank {record.rank} of engine {self.name!r} names key space {theirs}, the others "
                f"{ours}: their layouts differ"
            )
        specs = [_spec(form) for form in record.forms]
        if len(record.writes) != len(specs) or any(
            at >= len(spec.segments)
            for positions, (spec, _) in zip(record.writes, specs, strict=True)
            for at in positions
        ):
            raise ConfigError(f"rank {record.rank} of engine {self.name!r} writes unknown segments")
        self.space, self.forms, self.specs = record.space, record.forms, specs
        self.writes[record.rank] = record.writes
        self.sessions[record.rank] = session

    def give_up(self, key: Key, turn: int) -> None:
        """Remember that nothing comes of this chunk in this turn of the engine."""
        if turn:
            self.over.pop(key, None)
            self.over[key] = turn
            while len(self.over) > MOST_OVER:
                del self.over[next(iter(self.over))]

    def joint(self, key: Key, turn: int) -> Joint | Refusal | None:
        """The chunk as other ranks fill it in this turn; None: begin it. What is left of earlier turns is dropped."""
        joint = self.joints.get(key)
        if joint is not None and joint.turn < turn:
            joint.drop()
            joint = None
        if joint is not None:
            return joint if joint.turn == turn else Refusal.PENDING
        return Refusal.UNWANTED if turn and self.over.get(key, 0) >= turn else None

    def digests(self) -> tuple[bytes, bytes]:
        """Digest and root of the key space; empty until all ranks are here."""
        if self.missing:
            return b"", b""
        space, root = (hashlib.sha256(tag + self.space).digest() for tag in (SPACE_TAG, ROOT_TAG))
        return space, root

    def rank_of(self, session: Session) -> int:
        """Raises:
        ConfigError: the session is no rank of this engine.
        """
        for rank, each in self.sessions.items():
            if each is session:
                return rank
        raise ConfigError(f"this process is no registered rank of engine {self.name!r}")


class Joint:
    """A reservation that the ranks of one engine fill together. Also its owner, as the pool sees it.

    It becomes visible when every rank has filled its part, which may be none. One abort kills it: the key is
    free at once, the memory when nobody can write into it any more.
    """

    def __init__(
        self,
        engine: Engine,
        key: Key,
        tags: Sequence[str],
        manager: StorageManager,
        turn: int = 0,
        first: int = -1,
    ) -> None:
        self.engine = engine
        self.first = first
        self.key = key
        self.turn = turn
        self.tags = tags
        self.manager = manager
        self.held: Held
        self.writers: set[Session] = set()
        self.joined: set[Session] = set()
        self.dead = False
        spec, _ = engine.specs[key.group]
        self._digests: list[bytes] = [b""] * len(spec.segments)
        self._filled: set[int] = set()

    def join(self, session: Session) -> None:
        self.writers.add(session)
        self.joined.add(session)

    def fill(self, session: Session, digests: bytes, ttl: float | None) -> bool:
        """A rank has filled its segments; False when the chunk is dead.

        Raises:
            ConfigError: not as many digests as the rank has segments.
        """
        rank = self.engine.rank_of(session)
        mine = self.engine.writes[rank][self.key.group]
        if len(digests) != DIGEST * len(mine):
            raise ConfigError(f"{len(digests)} bytes are not the digests of {len(mine)} segments")
        self.writers.discard(session)
        if self.dead:
            self._settle()
            return False
        for at, position in enumerate(mine):
            self._digests[position] = digests[DIGEST * at : DIGEST * (at + 1)]
        self._filled.add(rank)
        if len(self._filled) < self.engine.ranks or not all(self._digests):
            return True
        spec, room = self.engine.specs[self.key.group]
        header = frame.seal(
            self.held.view[:room], self.key, spec=spec, digests=self._digests, tags=self.tags,
            created=int(time.time()), first=self.first,
        )  # fmt: skip
        self.engine.joints.pop(self.key, None)
        return self.manager.commit_batch([self.held], [header.identity], ttl=ttl)[0]

    def abort(self, session: Session, /) -> None:
        """A rank will not write (any more)."""
        self.writers.discard(session)
        self.leave(session)
        self._settle()

    def leave(self, session: Session | None, /) -> None:
        """A rank's service has ended; it may still write."""
        if not self.dead and self.engine.joints.get(self.key) is self:
            self.dead = True
            del self.engine.joints[self.key]
            self.engine.give_up(self.key, self.turn)
            self.manager.pool.quarantine(self.held)

    def drop(self) -> None:
        """Nobody will come for the rest of it."""
        for session in [*self.writers]:
            self.leave(session)
        if not self.writers:
            self.leave(None)
        self._settle()

    def _settle(self) -> None:
        if self.dead and not self.writers:
            self.manager.abort(self.held)


class Engines:
    """All engines that have registered."""

    def __init__(self, manager: StorageManager, log: Callable[[str], None]) -> None:
        self.by_name: dict[str, Engine] = {}
        self._manager = manager
        self._log = log

    def register(self, session: Session, record: Register) -> Engine:
        """See ``Engine.register``."""
        engine = self.by_name.get(record.engine)
        if engine is None:
            if record.rank < 0:
                return Engine(record.engine, record.ranks)
            engine = Engine(record.engine, record.ranks)
        engine.register(session, record)
        if record.rank >= 0 and not engine.missing:
            self._log(f"engine {record.engine!r}: all {engine.ranks} ranks are here")
        self.by_name[record.engine] = engine
        return engine

    def find(self, name: str) -> Engine:
        """Raises:
        ConfigError: not registered.
        """
        engine = self.by_name.get(name)
        if engine is None or engine.missing:
            raise ConfigError(f"engine {name!r} is not registered with all its ranks")
        return engine

    def ended(self, session: Session) -> None:
        """A session is over: an engine without ranks is forgotten."""
        for name, engine in list(self.by_name.items()):
            for rank, each in list(engine.sessions.items()):
                if each is session:
                    del engine.sessions[rank]
            if not engine.sessions:
                del self.by_name[name]
                in_turns(in_parts(Joint.drop, [*engine.joints.values()], MANY_WRITTEN))


def _spec(form: Form) -> tuple[KVSpec, int]:
    try:
        interior = Interior(form.interior)
    except ValueError as error:
        raise ConfigError(f"no interior {form.interior!r}") from error
    segments = tuple(SegmentSpec(*segment) for segment in form.segments)
    spec = KVSpec(
        form.dtype, form.tokens, form.planes, form.heads, form.head_dim, interior, segments
    )
    return spec, form.room
