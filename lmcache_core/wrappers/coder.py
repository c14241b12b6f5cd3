"""One chain of serdes on whole values: plain frames to encoded ones and back; no I/O."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_core import frame
from lmcache_core.spi import (
    BackendError,
    BufferTooSmall,
    ConfigError,
    Context,
    Corrupt,
    Key,
    Load,
    SerdeOff,
    Store,
    TensorSerde,
    ValueInfo,
)
from lmcache_core.wrappers import recode
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


class Coder:
    """A chain at work, from any thread.

    Every segment goes through the chain by itself. Of a chain of *n* serdes the lengths between them, u32
    each, n - 1 of them, precede the bytes of a segment. A serde that declines a value is left out of its
    chain, one that fails its test out of all, unless it is ``required``. A lossy serde is offered
    rows of floats only. An unknown wire id or a wrong digest is ``Corrupt``.

    Attributes:
        serdes: those that encode.
        lossy: whether approximate values may be decoded.
        spare: buffers for encoded values; whoever gets one in a ``Coded`` gives it back.
    """

    def __init__(self, chain: Chain, context: Context, /) -> None:
        self.serdes = chain.serdes
        self.spare = recode.Spare()
        self._context = context
        self._find = chain.find
        self._by_id = {serde.wire_id: serde for serde in (*chain.known, *chain.serdes)}
        self.lossy = not all(serde.lossless for serde in chain.serdes)
        for serde in chain.serdes[1:]:
            if isinstance(serde, TensorSerde):
                raise ConfigError(
                    f"serde {serde.wire_id!r} needs the plain payload: write it first"
                )

    @property
    def name(self) -> str:
        """Wire ids of the chain, for people."""
        return "+".join(serde.wire_id for serde in self.serdes)

    async def test(self) -> None:
        """Leave out what fails on noise.

        Raises:
            ConfigError: and is required.
        """
        for serde in self.serdes:
            work = self._context.executor.submit(fault_of, serde)
            if reason := await asyncio.wrap_future(work):
                self._switch_off(serde, reason)

    def _switch_off(self, serde: Serde, reason: str) -> None:
        name, tier = serde.wire_id, self._context.tier
        if serde.required:
            raise ConfigError(f"tier {tier!r}: serde {name!r} fails its self-test: {reason}")
        self._context.log.warning(
            "tier %r: serde %r fails its self-test (%s): values are stored without it",
            tier, name, reason,
        )  # fmt: skip
        self._context.emit(SerdeOff(tier=tier, serde=name, reason=reason))
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
        return max(self.room(header), header.nbytes) + total

    def encode(self, item: Store) -> Coded:
        """The frame as it is stored; in a borrowed buffer where anything was encoded.

        Raises:
            BackendError: a required serde declines.
        """
        begun = self._context.clock.now()
        whole = item.parts[0] if len(item.parts) == 1 else memoryview(b"".join(item.parts))
        header = frame.open_header(whole, item.key)
        if header.chain:
            return Coded(whole, None, 0, 0.0)
        infos = [ValueInfo(item.key, form, header.first) for form in recode.parts(header.spec)]
        parts = recode.cut(whole[header.nbytes :], header.stored)
        room, used, lengths = self.room(header), list[Serde](), list[tuple[int, ...]]()
        last: bytearray | None = None
        for serde in self.serdes:
            if not recode.takes(serde, header.spec):
                continue
            skip = 4 * len(used)
            bounds = [
                skip + recode.bound(serde, info.spec, part.nbytes)
                for info, part in zip(infos, parts, strict=True)
            ]
            buffer = self.spare.take(room + sum(bounds))
            view, made, at = memoryview(buffer), list[memoryview](), room
            earlier = list(zip(*lengths, strict=True)) or [()] * len(parts)
            try:
                for info, part, most, before in zip(infos, parts, bounds, earlier, strict=True):
                    struct.pack_into(f"<{len(before)}I", view, at, *before)
                    nbytes = recode.encode(serde, info, part, view[at + skip : at + most])
                    made.append(view[at + skip : at + skip + nbytes])
                    at += skip + nbytes
            except ValueError as error:
                self.spare.give(buffer)
                if serde.required:
                    raise BackendError(f"{serde.wire_id} declines {item.key!r}: {error}") from error
                self._context.log.debug("%s declines %r: %s", serde.wire_id, item.key, error)
                continue
            self.spare.give(last)
            last, parts = buffer, made
            used.append(serde)
            lengths.append(tuple(each.nbytes for each in made))
        if last is None:
            return Coded(whole, None, 0, 0.0)
        exact, skip = all(serde.lossless for serde in used), 4 * (len(used) - 1)
        stored = memoryview(last)[: room + sum(lengths[-1]) + skip * len(parts)]
        frame.seal_value(
            stored[:room], stored[room:], item.key, spec=header.spec,
            chain=[serde.wire_id for serde in used], approximate=not exact,
            stored=[skip + nbytes for nbytes in lengths[-1]],
            digests=header.digests if exact else (), tags=header.tags, created=header.created,
            first=header.first,
        )  # fmt: skip
        seconds = self._context.clock.now() - begun
        return Coded(stored, last, header.spec.nbytes, seconds, self.name)

    def decode(self, load: Load, stored: memoryview) -> Coded:
        """Rebuild the plain frame in the caller's buffers; ``nbytes`` is its length.

        ``stored`` lies in a buffer of its own, or exactly where it belongs. What it becomes is verified by whoever is
        outside.
        """
        begun = self._context.clock.now()
        key, header = load.key, frame.open_header(stored, load.key)
        data = stored[header.nbytes : header.nbytes + header.stored_nbytes]
        if (there := stored.obj is load.into[0].obj) and header.chain:
            data = memoryview(bytes(data))
        if header.chain or not there:
            frame.verify(header, data)
        self._admit(header)
        nbytes = plain_nbytes(header)
        if nbytes > load.room:
            raise BufferTooSmall(f"{key!r} needs {nbytes} bytes, got {load.room}", operation="load")
        one = len(load.into) == 1
        target = load.into[0][:nbytes] if one else memoryview(bytearray(nbytes))
        if not header.chain:
            if not there:
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
                frame.seal(target[:room], key, digests=header.digests, **seal)  # type: ignore[arg-type]
            else:
                frame.seal_value(target[:room], target[room:], key, **seal)  # type: ignore[arg-type]
        lengths = [0 if one else view.nbytes for view in load.into]
        for view, piece in zip(load.into, recode.cut(target, lengths), strict=True):
            view[: piece.nbytes] = piece
        coded = header.spec.nbytes if header.chain else 0
        return Coded(stored, None, coded, self._context.clock.now() - begun, self.name, nbytes)

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
            buffer = None if wire_id is chain[0] else self.spare.take(size)
            step = into if buffer is None else memoryview(buffer)[:size]
            recode.decode(serde, info, data, step)
            self.spare.give(last)
            data, last = step, buffer

    def _serde(self, wire_id: str, key: Key) -> Serde:
        serde = self._by_id.get(wire_id) or self._find(wire_id)
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
        if header.approximate and not self.lossy:
            raise Corrupt(f"{header.key!r} is approximate where all is exact", operation="load")

    def room(self, header: frame.Header, /) -> int:
        """Header room that an encoded frame may need."""
        names = [serde.wire_id for serde in self.serdes]
        return frame.header_nbytes(len(header.spec.segments), chain=names, tags=header.tags)


@dataclass(frozen=True, slots=True)
class Coded:
    """A value that went through a chain.

    Attributes:
        view: the stored frame.
        buffer: where it lies, to be given back; None where that is the caller's.
        raw: bytes before encoding; 0 where nothing was encoded.
        seconds: time it took.
        chain: for people.
        nbytes: length of the plain frame, after decoding.
    """

    view: memoryview
    buffer: bytearray | None
    raw: int
    seconds: float
    chain: str = ""
    nbytes: int = 0


def plain_nbytes(header: frame.Header) -> int:
    """Length of the frame before encoding."""
    if not header.chain:
        return header.nbytes + header.stored_nbytes
    return frame.header_nbytes(len(header.spec.segments), tags=header.tags) + header.spec.nbytes
