"""Encodes values on their way out and decodes them on their way in; the frame says how."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from lmcache_core import frame
from lmcache_core.spi import (
    MISSED,
    AbstractBackend,
    BufferTooSmall,
    BytesSerde,
    ConfigError,
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
    TensorSerde,
    ValueInfo,
    Wrapper,
)
from lmcache_core.wrappers.offload import Offload

Serde = TensorSerde | BytesSerde


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Serdes in order of encoding; ``known`` also decode what an earlier configuration wrote."""

    serdes: tuple[Serde, ...]
    known: tuple[Serde, ...] = ()


class Encoded(Wrapper):
    """Values outside are plain frames, inside encoded ones; their header names the chain.

    A serde that declines a value is left out of its chain. An unknown wire id or a wrong digest is ``Corrupt``.
    Between two serdes only the writer knows a length: those lengths, u64 each, precede the payload of a chain.

    Attributes:
        stored: stored lengths of values stored lately, until the tier takes them.
    """

    config_type = Chain
    config: Chain

    def __init__(self, config: Chain, context: Context, inner: AbstractBackend, /) -> None:
        super().__init__(config, context, inner)
        self.stored: dict[Key, int] = {}
        self._by_id = {serde.wire_id: serde for serde in (*config.known, *config.serdes)}
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

    def bound(self, view: memoryview, key: Key, /) -> int:
        """Most bytes that a plain frame can become in the store."""
        header = frame.open_header(view, key)
        most = header.spec.nbytes
        for serde in self.config.serdes:
            size = serde.bound(header.spec) if isinstance(serde, TensorSerde) else serde.bound(most)
            most = max(most, size)
        names = [serde.wire_id for serde in self.config.serdes]
        room = frame.header_nbytes(len(header.spec.segments), chain=names, tags=header.tags)
        return max(room, header.nbytes) + most + 8 * len(names)

    async def load(
        self,
        batch: Sequence[Load],
        /,
        *,
        done: LoadDone | None = None,
        deadline: float | None = None,
    ) -> Sequence[Loaded]:
        results: dict[int, Loaded] = {}

        def finish(at: int, result: Loaded) -> None:
            results[at] = result
            if done is not None:
                done(at, result)

        refused = [self.screen_load(load) for load in batch]
        found = await self.inner.lookup([load.key for load in batch], deadline=deadline)
        there = [at for at, each in enumerate(found) if each is not None and not refused[at]]
        rooms = [memoryview(bytearray(found[at].nbytes)) for at in there]  # type: ignore[union-attr]
        async with Offload(self.context) as offload:

            def arrived(position: int, result: Loaded) -> None:
                at = there[position]
                if result.status is not LoadStatus.FILLED:
                    finish(at, result)
                    return
                offload.begin(
                    result.nbytes,
                    lambda: self._decode(batch[at], rooms[position][: result.nbytes]),
                    lambda nbytes: finish(at, Loaded.filled(nbytes)),
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
        encoded: dict[int, memoryview] = {}

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
            self.stored.update((batch[at].key, encoded[at].nbytes) for at in order)
            await self.inner.store(
                [Store(batch[at].key, (encoded[at],), batch[at].ttl) for at in order],
                done=lambda position, result: finish(order[position], result),
                deadline=deadline,
            )
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

    def _encode(self, item: Store) -> memoryview:
        """The frame as it is stored, in memory of its own where anything was encoded."""
        whole = item.parts[0] if len(item.parts) == 1 else memoryview(b"".join(item.parts))
        header = frame.open_header(whole, item.key)
        data = whole[header.nbytes : header.nbytes + header.stored_nbytes]
        if header.chain:
            return whole
        info, used, lengths = ValueInfo(item.key, header.spec), list[Serde](), list[int]()
        for serde in self.config.serdes:
            if isinstance(serde, TensorSerde):
                bound = serde.bound(header.spec)
            else:
                bound = serde.bound(data.nbytes)
            into = memoryview(bytearray(bound))
            try:
                nbytes = serde.encode(info, data, into)
            except ValueError as error:
                self.context.log.debug("%s declines %r: %s", serde.wire_id, item.key, error)
                continue
            data = into[:nbytes]
            used.append(serde)
            lengths.append(nbytes)
        if not used:
            return whole
        chain = [serde.wire_id for serde in used]
        room = frame.header_nbytes(len(header.spec.segments), chain=chain, tags=header.tags)
        sizes = struct.pack(f"<{len(used) - 1}Q", *lengths[:-1])
        stored = memoryview(bytearray(b"".join((bytes(room), sizes, data))))
        known = header.digests if all(serde.lossless for serde in used) else ()
        frame.seal_value(
            stored[:room], stored[room:], item.key, spec=header.spec, chain=chain,
            digests=known, tags=header.tags, created=header.created,
        )  # fmt: skip
        return stored

    def _decode(self, load: Load, stored: memoryview) -> int:
        """Rebuild the plain frame in the caller's buffers and return its length."""
        key, header = load.key, frame.open_header(stored, load.key)
        data = stored[header.nbytes : header.nbytes + header.stored_nbytes]
        frame.verify(header, data)
        nbytes = _plain(header)
        if nbytes > load.room:
            raise BufferTooSmall(f"{key!r} needs {nbytes} bytes, got {load.room}", operation="load")
        one = len(load.into) == 1
        target = load.into[0][:nbytes] if one else memoryview(bytearray(nbytes))
        if not header.chain:
            target[:] = stored[:nbytes]
        else:
            room, raw, links = nbytes - header.spec.nbytes, header.spec.nbytes, len(header.chain)
            if data.nbytes < 8 * (links - 1):
                raise Corrupt(f"{key!r}: no lengths of its chain {header.chain}", operation="load")
            sizes = struct.unpack_from(f"<{links - 1}Q", data)
            data = data[8 * (links - 1) :]
            info = ValueInfo(key, header.spec)
            for wire_id, size in zip(reversed(header.chain), (*reversed(sizes), None), strict=True):
                if (serde := self._by_id.get(wire_id)) is None:
                    raise Corrupt(f"{key!r}: unknown encoding {wire_id!r}", operation="load")
                if size is not None and size > 4 * raw + (1 << 20):
                    raise Corrupt(f"{key!r}: impossible length {size}", operation="load")
                into = target[room:] if size is None else memoryview(bytearray(size))
                serde.decode(info, data, into)
                data = into
            seal = {"spec": header.spec, "tags": header.tags, "created": header.created}
            if header.digests:
                frame.verify_raw(header, target[room:])
                frame.seal(target[:room], key, digests=header.digests, **seal)  # type: ignore[arg-type]
            else:
                frame.seal_value(target[:room], target[room:], key, **seal)  # type: ignore[arg-type]
        at = 0
        for view in () if one else load.into:
            piece = target[at : at + view.nbytes]
            view[: piece.nbytes] = piece
            at += piece.nbytes
        return nbytes


def _plain(header: frame.Header) -> int:
    """Length of the frame before encoding."""
    if not header.chain:
        return header.nbytes + header.stored_nbytes
    return frame.header_nbytes(len(header.spec.segments), tags=header.tags) + header.spec.nbytes
