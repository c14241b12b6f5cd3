"""Nothing crosses a tier's border unverified, in either direction."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby

from lmcache_core import frame
from lmcache_core.spi import (
    AbstractBackend,
    BackendError,
    Context,
    Corrupt,
    Key,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    Store,
    Stored,
    StoreDone,
    Wrapper,
)
from lmcache_core.wrappers.around import Settled
from lmcache_core.wrappers.offload import Offload

HEADERS = 1024
"""Headers remembered for loads of ranges."""
PART_NBYTES = 4 << 20
"""So much of a batch of stores is verified on one thread, then passed on while the next part is verified."""
AHEAD = 2
"""Parts verified at once. More would keep the threads from storing what is verified already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Attributes:

    stores: also verify what is about to be stored, so that damage in memory does not spread.
    """

    stores: bool = True


class Check(Wrapper):
    """A load is filled only when header, key and every digest are right; otherwise it failed with ``Corrupt``.

    A part of a value is verified by the segments that hold it, which are read whole.
    """

    config_type = CheckOptions

    def __init__(self, config: CheckOptions, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self._headers: OrderedDict[Key, tuple[frame.Header, memoryview]] = OrderedDict()

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        whole = [i for i, load in enumerate(batch) if load.offset == 0 and load.length is None]
        results: dict[int, Loaded] = {}

        def finish(index: int, result: Loaded) -> None:
            results[index] = result
            if done is not None:
                done(index, result)

        async with Offload(self.context) as offload:

            def arrived(position: int, result: Loaded) -> None:
                index = whole[position]
                if result.status is not LoadStatus.FILLED:
                    finish(index, result)
                    return
                load = batch[index]
                offload.begin(
                    result.nbytes,
                    lambda: verify_frame(load.key, load.into, result.nbytes),
                    lambda _: finish(index, result),
                    lambda error: finish(index, Loaded.failed(error)),
                )

            for index, load in enumerate(batch):
                if load.offset or load.length is not None:
                    finish(index, await self._range(load, deadline))
            if whole:
                await self.inner.load([batch[i] for i in whole], done=arrived, deadline=deadline)
        return [results[index] for index in range(len(batch))]

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        if not self.config.stores:
            return await self.inner.store(batch, done=done, deadline=deadline)
        settled = Settled(len(batch), done)
        lost: dict[int, BackendError] = {}
        places = asyncio.Semaphore(AHEAD)

        async def run(part: Sequence[int]) -> None:
            items, errors = [batch[i] for i in part], list[BackendError | None]()
            async with places, Offload(self.context) as offload:
                offload.begin(
                    sum(item.nbytes for item in items),
                    partial(_damage, items),
                    errors.extend,
                    lambda error: errors.extend([error] * len(part)),
                )
            good = []
            for index, error in zip(part, errors, strict=True):
                if error is None:
                    good.append(index)
                else:
                    settled(index, Stored.failed(error))
            if not good:
                return
            try:
                await self.inner.store(
                    [batch[i] for i in good],
                    done=lambda at, result: settled(good[at], result),
                    deadline=deadline,
                )
            except BackendError as error:
                lost.update(dict.fromkeys(good, error))

        begins = list(accumulate((item.nbytes for item in batch), initial=0))
        async with asyncio.TaskGroup() as group:
            for _, part in groupby(range(len(batch)), lambda i: begins[i] // PART_NBYTES):
                group.create_task(run(list(part)))
        if len(lost) == len(batch) > 0:
            raise lost[0]  # no item has a result
        for index, error in lost.items():
            settled(index, Stored.failed(error))
        return settled.results

    async def delete(self, keys: Sequence[Key], /) -> int:
        for key in keys:
            self._headers.pop(key, None)
        return await self.inner.delete(keys)

    async def _range(self, load: Load, deadline: float | None) -> Loaded:
        """Read the segments around a range, verify them, hand out the range."""
        known = self._headers.pop(load.key, None)
        if known is None:
            first = await self._read(load.key, 0, frame.ALIGNMENT, deadline)
            if isinstance(first, Loaded):
                return first
            nbytes = frame.length_of(first)
            if nbytes > frame.ALIGNMENT:
                first = await self._read(load.key, 0, nbytes, deadline)
                if isinstance(first, Loaded):
                    return first
            try:
                known = frame.open_header(first, load.key), first
            except Corrupt as error:
                return Loaded.failed(error)
        self._headers[load.key] = known
        if len(self._headers) > HEADERS:
            self._headers.popitem(last=False)
        header, head = known
        total = header.nbytes + header.stored_nbytes
        stop = total if load.length is None else load.offset + load.length
        if stop > total or load.offset > stop or stop - load.offset > load.room:
            result = (await self.inner.load([load], deadline=deadline))[0]
            if result.status is not LoadStatus.FILLED:
                return result
            return Loaded.failed(
                Corrupt(f"{load.key!r} is longer than its frame", operation="load")
            )
        begin, end, covered = _around(header, load.offset, stop)
        body = await self._read(load.key, begin, end - begin, deadline) if end > begin else head[:0]
        if isinstance(body, Loaded):
            return body
        try:
            for index, at, nbytes in covered:
                frame.verify_segment(header, index, body[at - begin : at - begin + nbytes])
            if header.chain and end > begin:
                frame.verify(header, body)
        except Corrupt as error:
            return Loaded.failed(error)
        at, views = load.offset, list(load.into)
        while at < stop:
            source = (
                head[at : min(stop, header.nbytes)]
                if at < header.nbytes
                else body[at - begin : stop - begin]
            )
            room = min(views[0].nbytes, source.nbytes)
            views[0][:room] = source[:room]
            views[0] = views[0][room:]
            at += room
            if not views[0].nbytes:
                views.pop(0)
        return Loaded.filled(stop - load.offset)

    async def _read(
        self, key: Key, offset: int, nbytes: int, deadline: float | None
    ) -> memoryview | Loaded:
        """Exactly these bytes of a value, or the result that says why not."""
        scratch = memoryview(bytearray(nbytes))
        load = Load(key, (scratch,), offset, nbytes)
        result = (await self.inner.load([load], deadline=deadline))[0]
        if result.status is LoadStatus.FILLED and result.nbytes != nbytes:
            return Loaded.failed(
                Corrupt(f"{key!r} ends at {offset + result.nbytes}", operation="load")
            )
        return scratch if result.status is LoadStatus.FILLED else result


def _damage(items: Sequence[Store]) -> list[Corrupt | None]:
    """What is wrong with each of some values about to be stored."""
    found: list[Corrupt | None] = []
    for item in items:
        try:
            verify_frame(item.key, item.parts, item.nbytes)
            found.append(None)
        except Corrupt as error:
            found.append(error.with_traceback(None))  # its frames hold the caller's views
    return found


def verify_frame(key: Key, views: Sequence[memoryview], nbytes: int, /) -> None:
    """Check the frame in the first ``nbytes`` bytes of ``views``, header and payload.

    Raises:
        Corrupt: says what is wrong.
    """
    whole = views[0] if len(views) == 1 else memoryview(b"".join(views))
    header = frame.open_header(whole[:nbytes], key)
    if nbytes != header.nbytes + header.stored_nbytes:
        raise Corrupt(f"{key!r}: {nbytes} bytes hold a frame of another length", operation="load")
    frame.verify(header, whole[header.nbytes : nbytes])


def _around(
    header: frame.Header, offset: int, stop: int
) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Bytes to read for a range, and (index, offset, length) of the segments in them."""
    if stop <= header.nbytes:
        return header.nbytes, header.nbytes, []
    if header.chain:
        return header.nbytes, header.nbytes + header.stored_nbytes, []
    covered, at = [], header.nbytes
    for index, segment in enumerate(header.spec.segments):
        if at < stop and at + segment.nbytes > offset:
            covered.append((index, at, segment.nbytes))
        at += segment.nbytes
    if not covered:
        return stop, stop, []
    return covered[0][1], covered[-1][1] + covered[-1][2], covered
