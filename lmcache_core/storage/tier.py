"""One lower tier: its backend, what is known of its contents, its deadlines and its health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lmcache_core.config import TierConfig
from lmcache_core.memory.arena import Arena
from lmcache_core.memory.index import NEVER
from lmcache_core.observers import Metrics
from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    ConfigError,
    Context,
    DeadlineExceeded,
    EvictionPolicy,
    Found,
    Key,
    MemoryKind,
    Region,
    TierClosed,
    TierOpened,
    Unavailable,
)
from lmcache_core.storage import upkeep
from lmcache_core.storage.answers import Answers
from lmcache_core.storage.gate import Gate, Prefill
from lmcache_core.storage.holdings import Holdings
from lmcache_core.storage.quarantine import Quarantine
from lmcache_core.storage.scrub import scrub
from lmcache_core.storage.tasks import Tasks, settle
from lmcache_core.storage.upkeep import PATIENCE
from lmcache_core.wrappers import Check, CheckOptions, Encoded

T = TypeVar("T")
LATE_CALLS = 16
REOPEN_S = 5.0
"""Mean pause between two attempts to open a tier that does not answer."""


class Tier:
    """A backend with its wrappers, behind the manager.

    A tier is *local* when only this process changes it: then the manager's holdings say what is there and no
    byte is written that was not charged. A shared tier is asked, and its answers are remembered for a while.

    Args:
        config: name, limit, deadlines, write policy.
        backend: wrapped as configured; what has no ``Check`` gets one here.
        context: the tier's own, its log and executor included.
        policy: makes the eviction policy for a limit.
        quota: bytes a tenant may hold, given tenant and limit.
    """

    def __init__(
        self,
        config: TierConfig,
        backend: AbstractBackend,
        /,
        *,
        context: Context,
        policy: Callable[[int], EvictionPolicy],
        quota: Callable[[str, int], int | None] = lambda tenant, limit: None,
        metrics: Metrics | None = None,
    ) -> None:
        layers = list(_layers(backend))
        if not any(isinstance(layer, Check) for layer in layers):
            backend = Check(CheckOptions(), context, backend)
        self.config = config
        self.name = config.name
        self.backend = backend
        self.context = context
        self.metrics = metrics or Metrics()
        self.holdings: Holdings | None = None
        self.answers = Answers()
        self.tasks = Tasks(f"tier {config.name}", context.log)
        self.quarantine = Quarantine(1, LATE_CALLS, self._parked)
        self.gate = Gate(Prefill(), context.random, enabled=False)
        self.room = asyncio.Lock()
        """Held while victims leave and a charge is made, so that nobody takes the room in between."""
        self.complete = asyncio.Event()
        """Set once the holdings know everything that was there before (at once for shared tiers)."""
        self.bad: dict[Key, str | None] = {}
        """Damaged values of a shared tier that are not removed yet, with the version that was damaged."""
        self.storing: dict[Key, bool] = {}
        """Values in a store call; True once they are deleted meanwhile."""
        self.recovered = False
        """Values of an earlier process are here, whose tags only their headers know."""
        self.opened = False
        self.closing = False
        self.small = False
        """A value was larger than its limit, which has been said."""
        self.frames: dict[tuple[bytes, int], int] = {}
        self.codec = next((layer for layer in layers if isinstance(layer, Encoded)), None)
        self._policy, self._quota = policy, quota
        self._registered = 0
        self.watch: Callable[[Key, bool], None] | None = None
        """Told what comes and goes; set before ``open``."""
        self.deleting: set[Key] = set()
        """Keys in a deletion under way: each is in one at most, so that none hits a later store."""
        self.gone: set[Key] | None = None
        """While recovering: keys removed meanwhile, which a page read earlier must not bring back."""

    @property
    def usable(self) -> bool:
        """Whether asking makes sense; otherwise everything is an instant miss."""
        return self.opened and not self.closing and not self.quarantine.full

    def count(self, what: str, value: float = 1, /, **labels: str) -> None:
        """Add to the counter ``lmcache_tier_WHAT`` of this tier."""
        if value:
            self.metrics.add(f"lmcache_tier_{what}", value, tier=self.name, **labels)

    # -- life ----------------------------------------------------------------------------------------------

    async def open(self, wait_s: float, /) -> None:
        """Open the backend; one that does not answer in time is opened in the background, again and again.

        Raises:
            ConfigError: it can never work so.
        """
        first = self.tasks.start("open", self._open())
        if await settle(first, wait_s):
            error = first.exception()
            if isinstance(error, BackendError):
                self.context.log.warning("tier %s does not open yet: %s", self.name, error)
            elif error is not None:
                raise error
            else:
                return
        self.tasks.start("reopen", self._reopen(first))

    async def _open(self) -> None:
        await self.backend.open()
        capabilities, size = self.backend.capabilities, self.config.size
        if capabilities.shared:
            if size is not None or self.config.quotas:
                raise ConfigError(
                    f"tier {self.name} is shared: limits are set at the store, remove size and quotas"
                )
            self.complete.set()
        else:
            limit = size
            if limit is None and capabilities.usage:
                limit = (await self.backend.usage()).limit  # type: ignore[assignment]  # a plain int will do
            if limit is None:
                raise ConfigError(
                    f"tier {self.name} needs a limit; give it a size, such as size: 100GiB"
                )
            self.set_limit(limit)
            if not capabilities.persistent:
                self.complete.set()
            elif capabilities.scan:
                self.tasks.start("recovery", upkeep.recover(self))
            else:
                raise ConfigError(
                    f"tier {self.name} keeps values that it cannot list: its limit would not hold"
                )
        if self.config.scrub and self.holdings is None:
            raise ConfigError(
                f"tier {self.name} is shared: remove scrub, and check it from one place (lmcache check)"
            )
        if self.config.scrub:
            self.tasks.start("scrub", scrub(self, self.config.scrub))
        self.opened = True
        self.context.emit(TierOpened(tier=self.name, plugin=self.config.plugin))

    async def _reopen(self, first: asyncio.Task[None]) -> None:
        await asyncio.wait([first])
        while not self.opened:
            await self.context.clock.sleep(REOPEN_S * self.context.random.uniform(0.5, 1.5))
            try:
                await self._open()
            except BackendError as error:
                self.context.log.debug("tier %s does not open: %s", self.name, error)
            except ConfigError as error:
                self.context.log.error("tier %s stays closed: %s", self.name, error)
                return

    def set_limit(self, nbytes: int, /) -> None:
        """Start with, or change, the byte limit; the caller removes what is then too much."""
        self.metrics.set("lmcache_tier_limit_bytes", nbytes, tier=self.name)
        if self.holdings is not None:
            self.holdings.limit = nbytes
            return
        footprint, quota = self.backend.footprint, self._quota
        self.holdings = Holdings(
            nbytes, self._policy(nbytes), footprint, quota=lambda tenant: quota(tenant, self.limit)
        )
        self.holdings.index.watch = self.watch

    @property
    def limit(self) -> int:
        return self.holdings.limit if self.holdings is not None else 0

    async def close(self, deadline: float, /) -> tuple[int, str]:
        """Stop everything, whatever the backend does; returns bytes left in quarantine and what went wrong."""
        self.closing = True
        now = self.context.clock.now
        left = await self.tasks.stop((deadline - now()) / 2)
        call = self.tasks.start("close", self.backend.aclose())
        trouble = f"still running: {', '.join(left)}" if left else ""
        if not await settle(call, deadline - now()):
            trouble = f"still running: {', '.join([*left, call.get_name()])}"
            call.cancel()
        elif (error := call.exception()) is not None:
            trouble = str(error)
        self.opened = False
        if self.holdings is not None:
            self.count("out_bytes_total", self.holdings.visible_nbytes, why="closed")
            self.metrics.set("lmcache_tier_resident_bytes", 0, tier=self.name)
        self.context.emit(TierClosed(tier=self.name, quarantined=self.quarantine.nbytes))
        return self.quarantine.nbytes, trouble

    async def prepare(self, arena: Arena, /) -> None:
        """Let a backend that gains from it register resident memory that is new; refusal costs speed only."""
        if not self.backend.capabilities.register:
            return
        for segment in arena.segments[self._registered :]:
            self._registered += 1
            region = Region(MemoryKind.HOST, 0, segment.address, segment.nbytes, segment.data)
            try:
                await self.call("register", self.backend.register(region), None, patience=PATIENCE)
            except BackendError as error:
                self.context.log.warning("tier %s uses memory as it is: %s", self.name, error)

    # -- calls ---------------------------------------------------------------------------------------------

    async def call(
        self,
        verb: str,
        work: Coroutine[Any, Any, T],
        deadline: float | Callable[[], float] | None,
        /,
        *,
        patience: float = 1.0,
        nbytes: Callable[[], int] = int,
        late: Callable[[], None] = lambda: None,
    ) -> T:
        """Run one backend call, no longer than the deadlines allow.

        Args:
            deadline: a clock time, or a function that tells it anew when it has come.
            nbytes: memory the call borrows. When nobody waits any more (deadline, cancellation) the call is
                cancelled and the memory parked; ``late`` is called when it has really ended.

        Raises:
            DeadlineExceeded: the manager stopped waiting.
            BackendError: of the backend.
        """
        now = self.context.clock.now()
        limit = now + self.config.deadline * patience
        clock = self.context.clock

        def left() -> float:
            return _least(limit, deadline() if callable(deadline) else deadline) - clock.now()

        task = self.tasks.start(verb, work)
        try:
            while not await settle(task, left()):
                if left() <= 0:
                    break
            else:
                return self._outcome(verb, task)
        except asyncio.CancelledError:
            self.quarantine.park(task, nbytes(), late)
            raise
        self.count("deadlines_total", verb=verb)
        self.quarantine.park(task, nbytes(), late)
        raise DeadlineExceeded(f"{verb} in tier {self.name} took too long", operation=verb)

    def _outcome(self, verb: str, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            raise Unavailable(f"tier {self.name} is closing", operation=verb)
        error = task.exception()
        if error is None or isinstance(error, BackendError):
            return task.result()
        # Plugin boundary: a bug of a backend costs its own tier hits and nobody else anything.
        raise BackendError(f"tier {self.name}: {verb} raised {error!r}", operation=verb) from error

    async def find(
        self, keys: Sequence[Key], deadline: float | None, /
    ) -> tuple[list[Found | None], bool]:
        """What is there, with the length of the frame before encoding, and whether the tier answered."""
        found: list[Found | None] = [None] * len(keys)
        now = self.context.clock.now()
        ask = []
        if self.holdings is not None:
            for at, slot in enumerate(self.holdings.find(keys, now)):
                if slot >= 0:
                    nbytes = (
                        self.holdings.length(slot)
                        if self.codec
                        else self.holdings.index.nbytes[slot]
                    )
                    expires = self.holdings.index.expires[slot]
                    found[at] = Found(nbytes, expires=None if expires == NEVER else expires)
                elif not self.complete.is_set() and keys[at] not in self.holdings.leaving:
                    ask.append(at)
        else:
            for at, key in enumerate(keys):
                if key in self.bad:
                    continue
                said = self.answers.get(key, now)
                if said is None:
                    ask.append(at)
                else:
                    found[at] = said[0]
        if not self.usable:
            return [None] * len(keys), False
        answered = True
        try:
            if ask:
                until = _least(deadline, now + self.config.deadline)
                asked = [keys[at] for at in ask]
                answers = await self.call(
                    "lookup", self.backend.lookup(asked, deadline=until), until
                )
                for at, answer in zip(ask, answers, strict=True):
                    if self.holdings is None and keys[at] not in self.bad:
                        self.answers.put(keys[at], answer, now)
                    found[at] = answer
            if self.codec is not None:
                await self._measure(keys, found, self.codec, {*ask}, deadline)
        except BackendError:
            answered = False  # its wrappers have told why
        return found, answered

    async def _measure(
        self,
        keys: Sequence[Key],
        found: list[Found | None],
        codec: Encoded,
        asked: set[int],
        deadline: float | None,
    ) -> None:
        """Replace stored lengths by those of the frames that decoding will give.

        Args:
            asked: where the store has answered, which knows stored lengths only.
        """
        unknown = []
        for at, each in enumerate(found):
            if each is None:
                continue
            known = each.nbytes if self.holdings is not None and at not in asked else 0
            known = known or self.frames.get((keys[at].space, keys[at].group), 0)
            if known:
                found[at] = Found(known, each.etag, each.expires, each.promise)
            else:
                unknown.append(at)
        if unknown:
            work = codec.frame_lengths([keys[at] for at in unknown], deadline)
            for at, nbytes in zip(unknown, await self.call("lookup", work, deadline), strict=True):
                each = found[at]
                if nbytes is None or each is None:
                    found[at] = None
                else:
                    found[at] = Found(nbytes, each.etag, each.expires, each.promise)
                    self.learn(keys[at], nbytes)

    def learn(self, key: Key, nbytes: int, /) -> None:
        """Note how long frames of this space and group are before encoding."""
        place = (key.space, key.group)
        self.frames[place] = max(nbytes, self.frames.get(place, 0))

    def mislead(self, key: Key, /) -> None:
        """What was noted by ``learn`` was too short."""
        self.frames.pop((key.space, key.group), None)

    def stored_nbytes(self, key: Key, nbytes: int, /) -> int:
        """Bytes the store got for a frame of ``nbytes`` that was just stored."""
        return nbytes if self.codec is None else self.codec.stored.pop(key, nbytes)

    def publish(self) -> None:
        """Set the gauges."""
        if self.holdings is not None:
            charged = self.holdings.visible_nbytes
            self.metrics.set("lmcache_tier_resident_bytes", charged, tier=self.name)
            self.metrics.set("lmcache_tier_chunks", len(self.holdings), tier=self.name)

    def _parked(self, nbytes: int) -> None:
        self.metrics.set("lmcache_tier_quarantined_bytes", nbytes, tier=self.name)


def _layers(backend: AbstractBackend) -> Sequence[AbstractBackend]:
    layers = [backend]
    while (inner := getattr(layers[-1], "inner", None)) is not None:
        layers.append(inner)
    return layers


def _least(*times: float | None) -> float:
    return min(time for time in times if time is not None)
