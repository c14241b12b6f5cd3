"""Encodes values on their way out and decodes them on their way in; the frame says how."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lmcache_core import frame
from lmcache_core.spi import (
    MISSED,
    AbstractBackend,
    BackendError,
    BufferTooSmall,
    ConfigError,
    Context,
    Corrupt,
    Key,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    Recoded,
    SerdeOff,
    Store,
    Stored,
    StoreDone,
    TensorSerde,
    ValueInfo,
    Wrapper,
)
from lmcache_core.wrappers import recode
from lmcache_core.wrappers.offload import Offload
from lmcache_core.wrappers.recode import Serde
from lmcache_core.wrappers.selftest import fault_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Serdes in order of encoding.

    Attributes:
        known: also decode what an earlier configuration wrote.
        find: asked for the serde of any other wire id; None when there is none.
    """

    serdes: tuple[Serde, ...]
    known: tuple[Serde, ...] = ()
    find: Callable[[str], Serde | None] = lambda wire_id: None


class Encoded(Wrapper):
    """Values outside are plain frames, inside encoded ones; their header names the chain.

    Every segment goes through the chain by itself. Of a chain of *n* serdes the lengths between them, u32
    each, n - 1 of them, precede the bytes of a segment. A serde that declines a value is left out of its
    chain, one that fails its test at ``open`` out of all, unless it is ``required``. A lossy serde is offered
    rows of floats only. An unknown wire id or a wrong digest is ``Corrupt``.

    Attributes:
        serdes: those that encode.
        stored: stored lengths of values stored lately, until the tier takes them.
    """

    config_type = Chain
    config: Chain

    def __init__(self, config: Chain, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.stored: dict[Key, int] = {}
        self.serdes = config.serdes
        self._by_id = {serde.wire_id: serde for serde in (*config.known, *config.serdes)}
        self._spare = recode.Spare()
        for serde in config.serdes[1:]:
            if isinstance(serde, TensorSerde):
                raise ConfigError(
                    f"serde {serde.wire_id!r} needs the plain payload: write it first"
                )

    async def open(self) -> None:
        await super().open()
        self.capabilities = replace(
            self.inner.capabilities, ranges=False, alignment=1, iov_max=1024, register=False
        )
        for serde in self.config.serdes:
            work = self.context.executor.submit(fault_of, serde)
            if reason := await asyncio.wrap_future(work):
                self._switch_off(serde, reason)

    def _switch_off(self, serde: Serde, reason: str) -> None:
        name, tier = serde.wire_id, self.context.tier
        if serde.required:
            raise ConfigError(f"tier {tier!r}: serde {name!r} fails its self-test: {reason}")
        self.context.log.warning(
            "tier %r: serde %r fails its self-test (%s): values are stored without it",
            tier, name, reason,
        )  # fmt: skip
        self.context.emit(SerdeOff(tier=tier, serde=name, reason=reason))
        self.serdes = tuple(each for each in self.serdes if each is not serde)
        self._by_id.pop(name, None)

    def bound(self, view: memoryview, key: Key, /) -> int:
        """Most bytes that a plain frame can become in the store."""
        header = frame.open_header(view, key)
        total = 0
        for form in recode.parts(header.spec):
            most = size = form.nbytes
            for links, serde in enumerate(self.serdes):
                size = recode.bound(serde, form, most) + 4 * links
                most = max(most, size)
            total += most
        return max(self._room(header), header.nbytes) + total

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        results: dict[int, Loaded] = {}
        decoded: list[_Coded] = []

        def finish(at: int, result: Loaded) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        refused = [self.screen_load(load) for load in batch]
        found = await self.inner.lookup([load.key for load in batch], deadline=deadline)
        there = [at for at, each in enumerate(found) if each is not None and not refused[at]]
        buffers = [self._spare.take(found[at].nbytes) for at in there]  # type: ignore[union-attr]
        rooms = [
            memoryview(buffer)[: found[at].nbytes]  # type: ignore[union-attr]
            for at, buffer in zip(there, buffers, strict=True)
        ]
        async with Offload(self.context) as offload:

            def succeeded(at: int, coded: _Coded) -> None:
                decoded.append(coded)
                finish(at, Loaded.filled(coded.nbytes))

            def arrived(position: int, result: Loaded) -> None:
                at = there[position]
                if result.status is not LoadStatus.FILLED:
                    finish(at, result)
                    return
                offload.begin(
                    result.nbytes,
                    lambda: self._decode(batch[at], rooms[position][: result.nbytes]),
                    partial(succeeded, at),
                    lambda error: finish(at, Loaded.failed(error)),
                )

            for at in range(len(batch)):
                if at not in there:
                    finish(at, refused[at] or MISSED)
            if there:
                loads = [
                    Load(batch[at].key, (room,)) for at, room in zip(there, rooms, strict=True)
                ]
                await self.inner.load(loads, done=arrived, deadline=deadline)
        self._tell("load", decoded)
        self._spare.give(*buffers)
        return [results[at] for at in range(len(batch))]

    async def store(
        self,
        batch: Sequence[Store],
        /,
        *,
        done: StoreDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Stored]:
        results: dict[int, Stored] = {}
        encoded: dict[int, _Coded] = {}

        def finish(at: int, result: Stored) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        async with Offload(self.context) as offload:
            for at, item in enumerate(batch):
                offload.begin(
                    item.nbytes,
                    partial(self._encode, item),
                    partial(encoded.__setitem__, at),
                    lambda error, at=at: finish(at, Stored.failed(error)),  # type: ignore[misc]
                )
        order = sorted(encoded)
        if order:
            self.stored.update((batch[at].key, encoded[at].view.nbytes) for at in order)
            await self.inner.store(
                [Store(batch[at].key, (encoded[at].view,), batch[at].ttl) for at in order],
                done=lambda position, result: finish(order[position], result),
                deadline=deadline,
            )
        self._tell("store", [*encoded.values()])
        self._spare.give(*(each.buffer for each in encoded.values()))
        return [results[at] for at in range(len(batch))]

    async def frame_lengths(self, keys: Sequence[Key], deadline: float | None) -> list[int | None]:
        """Length of each frame as it will be when decoded; reads headers only where the store can."""
        found = await self.inner.lookup(keys, deadline=deadline)
        part = frame.ALIGNMENT if self.inner.capabilities.ranges else None
        loads = [
            Load(key, (memoryview(bytearray(part or each.nbytes)),), 0, part)
            for key, each in zip(keys, found, strict=True) if each is not None
        ]  # fmt: skip
        lengths: dict[Key, int] = {}
        for load, result in zip(
            loads, await self.inner.load(loads, deadline=deadline), strict=True
        ):
            if result.status is LoadStatus.FILLED:
                try:
                    lengths[load.key] = _plain(frame.open_header(load.into[0], load.key))
                except Corrupt:
                    continue  # whoever loads it will say so
        return [lengths.get(key) for key in keys]

    def _encode(self, item: Store) -> _Coded:
        """The frame as it is stored; in a borrowed buffer where anything was encoded.

        Raises:
            BackendError: a required serde declines.
        """
        begun = self.context.clock.now()
        whole = item.parts[0] if len(item.parts) == 1 else memoryview(b"".join(item.parts))
        header = frame.open_header(whole, item.key)
        if header.chain:
            return _Coded(whole, None, 0, 0.0)
        infos = [ValueInfo(item.key, form, header.first) for form in recode.parts(header.spec)]
        parts = recode.cut(whole[header.nbytes :], header.stored)
        room, used, lengths = self._room(header), list[Serde](), list[tuple[int, ...]]()
        last: bytearray | None = None
        for serde in self.serdes:
            if not recode.takes(serde, header.spec):
                continue
            skip = 4 * len(used)
            bounds = [
                skip + recode.bound(serde, info.spec, part.nbytes)
                for info, part in zip(infos, parts, strict=True)
            ]
            buffer = self._spare.take(room + sum(bounds))
            view, made, at = memoryview(buffer), list[memoryview](), room
            earlier = list(zip(*lengths, strict=True)) or [()] * len(parts)
            try:
                for info, part, most, before in zip(infos, parts, bounds, earlier, strict=True):
                    struct.pack_into(f"<{len(before)}I", view, at, *before)
                    nbytes = recode.encode(serde, info, part, view[at + skip : at + most])
                    made.append(view[at + skip : at + skip + nbytes])
                    at += skip + nbytes
            except ValueError as error:
                self._spare.give(buffer)
                if serde.required:
                    raise BackendError(f"{serde.wire_id} declines {item.key!r}: {error}") from error
                self.context.log.debug("%s declines %r: %s", serde.wire_id, item.key, error)
                continue
            self._spare.give(last)
            last, parts = buffer, made
            used.append(serde)
            lengths.append(tuple(each.nbytes for each in made))
        if last is None:
            return _Coded(whole, None, 0, 0.0)
        exact, skip = all(serde.lossless for serde in used), 4 * (len(used) - 1)
        stored = memoryview(last)[: room + sum(lengths[-1]) + skip * len(parts)]
        frame.seal_value(
            stored[:room], stored[room:], item.key, spec=header.spec,
            chain=[serde.wire_id for serde in used], approximate=not exact,
            stored=[skip + nbytes for nbytes in lengths[-1]],
            digests=header.digests if exact else (), tags=header.tags, created=header.created,
            first=header.first,
        )  # fmt: skip
        return _Coded(stored, last, header.spec.nbytes, self.context.clock.now() - begun)

    def _decode(self, load: Load, stored: memoryview) -> _Coded:
        """Rebuild the plain frame in the caller's buffers; ``nbytes`` is its length."""
        begun = self.context.clock.now()
        key, header = load.key, frame.open_header(stored, load.key)
        data = stored[header.nbytes : header.nbytes + header.stored_nbytes]
        frame.verify(header, data)
        self._admit(header)
        nbytes = _plain(header)
        if nbytes > load.room:
            raise BufferTooSmall(f"{key!r} needs {nbytes} bytes, got {load.room}", operation="load")
        one = len(load.into) == 1
        target = load.into[0][:nbytes] if one else memoryview(bytearray(nbytes))
        if not header.chain:
            target[:] = stored[:nbytes]
        else:
            room = nbytes - header.spec.nbytes
            raw = recode.cut(target[room:], [segment.nbytes for segment in header.spec.segments])
            forms = recode.parts(header.spec)
            for form, part, into in zip(forms, recode.cut(data, header.stored), raw, strict=True):
                self._decode_part(ValueInfo(key, form, header.first), header.chain, part, into)
            seal = {
                "spec": header.spec, "tags": header.tags, "created": header.created,
                "first": header.first,
            }  # fmt: skip
            if header.digests and not header.approximate:
                frame.verify_raw(header, target[room:])
                frame.seal(target[:room], key, digests=header.digests, **seal)  # type: ignore[arg-type]
            else:
                frame.seal_value(target[:room], target[room:], key, **seal)  # type: ignore[arg-type]
        at = 0
        for view in () if one else load.into:
            piece = target[at : at + view.nbytes]
            view[: piece.nbytes] = piece
            at += piece.nbytes
        coded = header.spec.nbytes if header.chain else 0
        return _Coded(stored, None, coded, self.context.clock.now() - begun, nbytes)

    def _decode_part(
        self, info: ValueInfo, chain: Sequence[str], data: memoryview, into: memoryview
    ) -> None:
        """Decode one segment."""
        skip = 4 * (len(chain) - 1)
        if data.nbytes < skip:
            raise Corrupt(f"{info.key!r}: no lengths of its chain {chain}", operation="load")
        sizes = (into.nbytes, *struct.unpack_from(f"<{len(chain) - 1}I", data))
        data, last = data[skip:], None
        for wire_id, size in zip(reversed(chain), reversed(sizes), strict=True):
            serde = self._serde(wire_id, info.key)
            if size > 4 * into.nbytes + (1 << 20):
                raise Corrupt(f"{info.key!r}: impossible length {size}", operation="load")
            buffer = None if wire_id is chain[0] else self._spare.take(size)
            step = into if buffer is None else memoryview(buffer)[:size]
            recode.decode(serde, info, data, step)
            self._spare.give(last)
            data, last = step, buffer

    def _serde(self, wire_id: str, key: Key) -> Serde:
        serde = self._by_id.get(wire_id) or self.config.find(wire_id)
        if serde is None:
            raise Corrupt(f"{key!r}: unknown encoding {wire_id!r}", operation="load")
        self._by_id[wire_id] = serde
        return serde

    def _admit(self, header: frame.Header) -> None:
        """Raises:
        Corrupt: the value was not encoded as everything here has to be.
        """
        for serde in self.serdes:
            if serde.required and serde.wire_id not in header.chain:
                raise Corrupt(
                    f"{header.key!r} is not {serde.wire_id} as required", operation="load"
                )
        if header.approximate and all(serde.lossless for serde in self.serdes):
            raise Corrupt(f"{header.key!r} is approximate where all is exact", operation="load")

    def _room(self, header: frame.Header) -> int:
        names = [serde.wire_id for serde in self.serdes]
        return frame.header_nbytes(len(header.spec.segments), chain=names, tags=header.tags)

    def _tell(self, verb: str, coded: Sequence[_Coded]) -> None:
        """One event for what was recoded in a batch."""
        done = [each for each in coded if each.raw]
        if done:
            self.context.emit(
                Recoded(
                    tier=self.context.tier, verb=verb, values=len(done),
                    chain="+".join(serde.wire_id for serde in self.serdes),
                    raw=sum(each.raw for each in done),
                    stored=sum(each.view.nbytes for each in done),
                    seconds=sum(each.seconds for each in done),
                )
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Coded:
    """A value that went through the chain: its stored frame, and the buffer that is to be given back."""

    view: memoryview
    buffer: bytearray | None
    raw: int
    seconds: float
    nbytes: int = 0


def _plain(header: frame.Header) -> int:
    """Length of the frame before encoding."""
    if not header.chain:
        return header.nbytes + header.stored_nbytes
    return frame.header_nbytes(len(header.spec.segments), tags=header.tags) + header.spec.nbytes
