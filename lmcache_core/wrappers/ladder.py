"""A value in several encoded forms, finest first; a load fetches one of them, chosen by the time it will take.

After the streaming of CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240): per chunk the best form that
still arrives in time at the measured bandwidth. When none does, the manager stops waiting and the engine
computes what is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from lmcache_core import frame
from lmcache_core.spi import (
    MISSED,
    AbstractBackend,
    BackendError,
    ConfigError,
    Context,
    Interior,
    Key,
    KVSpec,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    SegmentSpec,
    Store,
)
from lmcache_core.wrappers import recode
from lmcache_core.wrappers.coder import Chain, Coded, Coder
from lmcache_core.wrappers.heads import read_headers
from lmcache_core.wrappers.link import Link
from lmcache_core.wrappers.offload import Offload
from lmcache_core.wrappers.serde import Encoded

WIRE_ID = "ladder"
LANES, FLYING = 8, 4
"""Groups of values fetched or decoded at once, and of them fetched: a link that is fast now is used while it is."""
GROUP_NBYTES = 1 << 20
"""A group is decided on and fetched together."""
INDEXES = 4096
"""Values of a tier of this process alone whose levels are remembered."""
Rungs = tuple[tuple[int, int], ...]
"""Offset and length of each form in the stored value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderOptions:
    """Attributes:

    levels: chains, finest first; a form that is not smaller than the one before is not stored.
    target: seconds in which a load should be done: the finest form that makes it is fetched. Without it
        the finest that is as quick as any.
    """

    levels: tuple[Chain, ...]
    target: float = 0.0


class Ladder(Encoded):
    """Values outside are plain frames, inside all their forms, each an ordinary encoded frame.

    They are the segments of one opaque value, whose header says where each begins: a form is read and
    verified without the others. A value of which only one form pays is stored as that form alone.

    Attributes:
        target: see ``LadderOptions``.
        computing: seconds in which so many chunks could be computed instead, None while unknown.
    """

    def __init__(self, config: LadderOptions, context: Context, inner: AbstractBackend, /) -> None:
        known = tuple(serde for chain in config.levels for serde in chain.serdes)
        super().__init__(replace(config.levels[-1], known=known), context, inner)
        self.coders = (*(Coder(chain, context) for chain in config.levels[:-1]), self.coder)
        required = {frozenset(s.wire_id for s in c.serdes if s.required) for c in self.coders}
        if len(required) > 1:
            raise ConfigError(f"ladder: {max(required, key=len)} must be in every level or in none")
        self.coder.lossy = any(coder.lossy for coder in self.coders)
        self.target = config.target
        self.computing: Callable[[int], float | None] = lambda chunks: None
        self.link = Link(LANES)
        self._indexes: OrderedDict[Key, Rungs] = OrderedDict()

    async def open(self) -> None:
        await super().open()
        if not self.inner.capabilities.ranges:
            raise ConfigError(
                f"tier {self.context.tier!r} cannot load parts of values: give it a serde, no ladder"
            )
        for coder in self.coders[:-1]:
            await coder.test()

    def bound(self, view: memoryview, key: Key, /) -> int:
        most = sum(coder.bound(view, key) for coder in self.coders)
        return frame.header_nbytes(len(self.coders), chain=[WIRE_ID]) + most

    def encode(self, item: Store) -> Coded:
        """All forms that pay in one value, or the only one."""
        made = list[tuple[Coder, Coded]]()
        for coder in self.coders:
            coded = coder.encode(item)
            if made and coded.view.nbytes >= made[-1][1].view.nbytes:
                coder.spare.give(coded.buffer)
            else:
                made.append((coder, coded))
        forms = [coded.view for _, coded in made]
        if len(made) == 1:
            return made[0][1]
        lengths = [form.nbytes for form in forms]
        room = frame.header_nbytes(len(forms), chain=[WIRE_ID])
        buffer = self.coder.spare.take(room + sum(lengths))
        whole = memoryview(buffer)[: room + sum(lengths)]
        for form, into in zip(forms, recode.cut(whole[room:], lengths), strict=True):
            into[:] = form
        plain = frame.open_header(item.parts[0], item.key)
        segments = tuple(SegmentSpec(level, 0, 0, each) for level, each in enumerate(lengths))
        spec = KVSpec("uint8", plain.spec.tokens, 1, 0, 0, Interior.PAGE, segments)
        frame.seal_value(
            whole[:room], whole[room:], item.key, spec=spec, chain=[WIRE_ID], stored=lengths,
            approximate=self.coder.lossy, created=plain.created, first=plain.first,
        )  # fmt: skip
        for coder, coded in made:
            coder.spare.give(coded.buffer)
        seconds = sum(coded.seconds for _, coded in made)
        return Coded(whole, buffer, plain.spec.nbytes, seconds, WIRE_ID)

    async def delete(self, keys: Sequence[Key], /) -> int:
        for key in keys:
            self._indexes.pop(key, None)
        return await self.inner.delete(keys)

    async def headers(
        self, keys: Sequence[Key], deadline: float | None, /
    ) -> list[frame.Header | Loaded]:
        """Those of the finest forms."""
        indexes = await self.index(keys, deadline)
        there = [at for at, each in enumerate(indexes) if not isinstance(each, Loaded)]
        places = [(keys[at], indexes[at][0][0]) for at in there]  # type: ignore[index]
        found: list[frame.Header | Loaded] = [each for each in indexes if isinstance(each, Loaded)]
        for at, header in zip(there, await read_headers(self.inner, places, deadline), strict=True):
            found.insert(at, header)
        return found

    async def index(self, keys: Sequence[Key], deadline: float | None) -> list[Rungs | Loaded]:
        """Where the forms of each value lie, or why it cannot be said."""
        known = [self._indexes.get(key) for key in keys]
        unknown = [at for at, each in enumerate(known) if each is None]
        found: list[Rungs | Loaded] = [each or MISSED for each in known]
        headers = await read_headers(self.inner, [(keys[at], 0) for at in unknown], deadline)
        for at, header in zip(unknown, headers, strict=True):
            if isinstance(header, Loaded):
                found[at] = header
                continue
            begins = accumulate(header.stored, initial=header.nbytes)
            rungs = tuple(zip(begins, header.stored, strict=False))
            if header.chain != (WIRE_ID,):
                rungs = ((0, header.nbytes + header.stored_nbytes),)
            found[at] = rungs
            if not self.inner.capabilities.shared:  # elsewhere another process may replace it
                self._indexes[keys[at]] = rungs
        while len(self._indexes) > INDEXES:
            self._indexes.popitem(last=False)
        return found

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        course = _Course(self, batch, done, deadline)
        await course.run()
        self._tell("load", course.decoded)
        return [course.results[at] for at in range(len(batch))]


class _Course:
    """One batch of loads under way: groups of values, each at the level that is right when it departs."""

    def __init__(
        self, ladder: Ladder, batch: Sequence[Load], done: LoadDone | None, deadline: float | None
    ) -> None:
        self.results: dict[int, Loaded] = {}
        self.decoded: list[Coded] = []
        self._ladder, self._batch, self._done = ladder, batch, done
        self._deadline = deadline
        self._now = ladder.context.clock.now
        computing = ladder.computing(len(batch))
        target = ladder.target if computing is None else min(ladder.target, computing)
        until = self._now() + target
        self._until = until if deadline is None else min(until, deadline)
        self._waiting: deque[tuple[int, Rungs]] = deque()
        self._flying = 0
        self._places = asyncio.Semaphore(FLYING)

    async def run(self) -> None:
        keys = [load.key for load in self._batch]
        indexes = await self._ladder.index(keys, self._deadline)
        for at, (load, found) in enumerate(zip(self._batch, indexes, strict=True)):
            refused = self._ladder.screen_load(load)
            if refused or isinstance(found, Loaded):
                self._finish(at, refused or found)  # type: ignore[arg-type]
            else:
                self._waiting.append((at, found))
        async with Offload(self._ladder.context) as offload, asyncio.TaskGroup() as group:
            for _ in range(LANES):
                group.create_task(self._lane(offload))

    async def _lane(self, offload: Offload) -> None:
        """Fetch and decode group by group; so a slow decoder holds up the fetching."""
        plain, spare = not self._ladder.coders[0].serdes, self._ladder.coder.spare
        while True:
            async with self._places:
                if not self._waiting:
                    return
                level, group = self._next()
                buffers, rooms = list[bytearray](), list[memoryview]()
                for at, (_, nbytes) in group:
                    into = self._batch[at].into
                    if plain and level == 0 and len(into) == 1 and nbytes <= into[0].nbytes:
                        rooms.append(into[0][:nbytes])  # comes where it belongs
                    else:
                        buffers.append(spare.take(nbytes))
                        rooms.append(memoryview(buffers[-1])[:nbytes])
                good = await self._fetch(group, rooms)
            ended = asyncio.get_running_loop().create_future()
            offload.begin(
                sum(room.nbytes for _, room in good),
                partial(self._decode, level, good),
                ended.set_result,
                lambda error, good=good, ended=ended: ended.set_result(  # type: ignore[misc]
                    [(at, Loaded.failed(error)) for at, _ in good]
                ),
            )
            # It may still be told when we are gone.
            for at, result in await asyncio.shield(ended):
                self._finish(at, result)
            spare.give(*buffers)

    def _next(self) -> tuple[int, list[tuple[int, tuple[int, int]]]]:
        """The level for what departs now, and the place of each value of it."""
        deepest = max(len(rungs) for _, rungs in self._waiting)
        sizes = [
            sum(rungs[min(level, len(rungs) - 1)][1] for _, rungs in self._waiting)
            for level in range(deepest)
        ]
        raw = sum(self._batch[at].room for at, _ in self._waiting)
        level = self._ladder.link.choose(sizes, self._flying, raw, self._until - self._now())
        group, total = list[tuple[int, tuple[int, int]]](), 0
        while self._waiting and total < GROUP_NBYTES:
            at, rungs = self._waiting.popleft()
            group.append((at, rungs[min(level, len(rungs) - 1)]))
            total += group[-1][1][1]
        return level, group

    async def _fetch(
        self, group: Sequence[tuple[int, tuple[int, int]]], rooms: Sequence[memoryview]
    ) -> list[tuple[int, memoryview]]:
        """What is here; the others are finished."""
        loads = [
            Load(self._batch[at].key, (room,), offset, nbytes)
            for (at, (offset, nbytes)), room in zip(group, rooms, strict=True)
        ]
        departed, total = self._now(), sum(room.nbytes for room in rooms)
        self._flying += total
        try:
            answers = await self._ladder.inner.load(loads, deadline=self._deadline)
        except BackendError as error:
            answers = [Loaded.failed(error)] * len(loads)
        finally:
            self._flying -= total
        self._ladder.link.arrived(sum(each.nbytes for each in answers), departed, self._now())
        good = []
        for (at, _), room, answer in zip(group, rooms, answers, strict=True):
            if answer.status is LoadStatus.FILLED:
                good.append((at, room))
            else:
                self._finish(at, answer)
        return good

    def _decode(
        self, level: int, values: Sequence[tuple[int, memoryview]]
    ) -> list[tuple[int, Loaded]]:
        """On a thread."""
        found = list[tuple[int, Loaded]]()
        for at, stored in values:
            began = time.thread_time()
            try:
                coded = self._ladder.coder.decode(self._batch[at], stored)
            except BackendError as error:
                found.append((at, Loaded.failed(error)))
                continue
            self._ladder.link.decoded(level, coded.nbytes, time.thread_time() - began)
            self.decoded.append(replace(coded, chain=f"{WIRE_ID}.{level}"))
            found.append((at, Loaded.filled(coded.nbytes)))
        return found

    def _finish(self, at: int, result: Loaded) -> None:
        self.results[at] = result
        if self._done is not None:
            self._done(at, result)
