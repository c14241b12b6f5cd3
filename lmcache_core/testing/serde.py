"""``SerdeTests``: what the frame layer relies on.

* S1 Round trip. ``decode`` gives back what ``encode`` was given: every bit of it when ``lossless``, else what
  the stated error bound allows.
* S2 Bound. ``encode`` returns at most ``bound`` and writes only into what it was given; ``decode`` likewise.
* S3 Damage. Damaged, cut or foreign bytes end in ``Corrupt`` or in some bytes, never in anything else.
* S4 Borrowing. No view is kept.
* S5 Purity. Equal input gives equal output (where ``deterministic``), also on several threads at once.
* S6 Decline. An input it cannot encode is a ``ValueError`` and nothing else.
* S7 Name. ``wire_id`` is 1 to 15 printable ASCII characters without spaces; a lossy serde states its bound.
"""

from __future__ import annotations

import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from lmcache_core.spi import (
    BytesSerde,
    Corrupt,
    Interior,
    Key,
    KVSpec,
    SegmentSpec,
    TensorSerde,
    ValueInfo,
)
from lmcache_core.testing.laws import Decorator, law, read_laws

SERDE_LAWS = read_laws(__doc__)
GUARD = b"\xee" * 64


def serde_law(number: str) -> Decorator:
    return law(number, SERDE_LAWS[number])


def kv_spec(
    *, tokens: int = 32, heads: int = 2, head_dim: int = 16, layer: int = 0, dtype: str = "bfloat16"
) -> KVSpec:
    """The stored form of one layer of a small chunk."""
    nbytes = 2 * tokens * heads * head_dim * (4 if dtype == "float32" else 2)
    segment = SegmentSpec(layer, 0, heads, nbytes)
    return KVSpec(dtype, tokens, 2, heads, head_dim, Interior.ROWS, (segment,))


def bfloat16_noise(nbytes: int, seed: int) -> bytes:
    """Finite bfloat16 values, normally distributed."""
    draw = random.Random(seed)
    return b"".join(struct.pack("<f", draw.gauss(0, 1))[2:] for _ in range(nbytes // 2))


class SerdeTests(ABC):
    """Laws S1-S7.

    Attributes:
        deterministic: equal input gives equal output; encryption with a fresh nonce says False.
    """

    deterministic: ClassVar[bool] = True

    @abstractmethod
    def make_serde(self) -> TensorSerde | BytesSerde: ...

    def samples(self) -> Iterator[tuple[KVSpec, bytes]]:
        """Inputs with their stored form; a tensor serde for another dtype gives its own."""
        for number, spec in enumerate(
            (kv_spec(), kv_spec(tokens=1, layer=1), kv_spec(tokens=77, layer=5))
        ):
            yield spec, bfloat16_noise(spec.nbytes, number)
            yield spec, bytes(spec.nbytes)

    def check_close(self, spec: KVSpec, before: bytes, after: bytes) -> None:
        """Assert the error bound of a lossy serde."""
        raise AssertionError("a lossy serde has to define check_close")

    def info(self, spec: KVSpec) -> ValueInfo:
        return ValueInfo(Key(bytes(32), bytes(range(32))), spec)

    def bound(self, spec: KVSpec) -> int:
        serde = self.make_serde()
        return serde.bound(spec) if isinstance(serde, TensorSerde) else serde.bound(spec.nbytes)

    def encoded(self, spec: KVSpec, payload: bytes) -> bytes:
        into = bytearray(self.bound(spec))
        nbytes = self.make_serde().encode(
            self.info(spec), memoryview(payload).toreadonly(), memoryview(into)
        )
        return bytes(into[:nbytes])

    def decoded(self, spec: KVSpec, encoded: bytes) -> bytes:
        room = bytearray(GUARD + bytes(spec.nbytes) + GUARD)
        into = memoryview(room)[64 : 64 + spec.nbytes]
        try:
            self.make_serde().decode(self.info(spec), memoryview(encoded).toreadonly(), into)
        finally:
            assert room[:64] == room[-64:] == GUARD, "decode wrote outside its buffer"
        return into.tobytes()

    @serde_law("S1")
    def test_decode_gives_back_what_was_encoded(self) -> None:
        """Seen in LMCache#4118."""
        lossless = self.make_serde().lossless
        for spec, payload in self.samples():
            after = self.decoded(spec, self.encoded(spec, payload))
            if lossless:
                assert after == payload
            else:
                self.check_close(spec, payload, after)

    @serde_law("S1")
    def test_every_bit_pattern_survives_a_lossless_serde(self) -> None:
        spec = kv_spec()
        payload = random.Random(1).randbytes(spec.nbytes)
        if self.make_serde().lossless:
            assert self.decoded(spec, self.encoded(spec, payload)) == payload

    @serde_law("S2")
    def test_encode_stays_within_its_bound(self) -> None:
        for spec, payload in self.samples():
            bound = self.bound(spec)
            room = bytearray(GUARD + bytes(bound) + GUARD)
            into = memoryview(room)[64 : 64 + bound]
            nbytes = self.make_serde().encode(self.info(spec), memoryview(payload), into)
            assert 0 <= nbytes <= bound, f"{nbytes} bytes, bound {bound}"
            assert room[:64] == room[-64:] == GUARD, "encode wrote outside its buffer"

    @serde_law("S2")
    def test_other_forms_are_encoded_or_declined(self) -> None:
        """Seen in LMCache#4064."""
        forms = [kv_spec(dtype=dtype) for dtype in ("float16", "float32")]
        segment = SegmentSpec(0, 0, 0, 999)
        forms.append(KVSpec("uint8", 16, 1, 0, 0, Interior.PAGE, (segment,)))
        for spec in forms if self.make_serde().lossless else forms[:2]:
            payload = bytes(spec.nbytes)
            try:
                encoded = self.encoded(spec, payload)
            except ValueError:
                continue
            assert len(self.decoded(spec, encoded)) == spec.nbytes

    @serde_law("S3")
    def test_damage_is_corrupt_or_some_bytes(self) -> None:
        draw = random.Random(2)
        spec, payload = next(self.samples())
        good = self.encoded(spec, payload)
        cases = [good[: draw.randrange(len(good))] for _ in range(40)]
        cases += [b"", good + b"x", draw.randbytes(len(good)), b"\xff" * 8]
        for _ in range(200):
            bad = bytearray(good)
            bad[draw.randrange(min(len(bad), 64) if draw.random() < 0.5 else len(bad))] ^= (
                1 << draw.randrange(8)
            )
            cases.append(bytes(bad))
        for case in cases:
            try:
                self.decoded(spec, case)
            except Corrupt:
                continue
            assert case, "nothing at all was decoded"

    @serde_law("S4")
    def test_no_view_is_kept(self) -> None:
        spec, payload = next(self.samples())
        serde, info = self.make_serde(), self.info(spec)
        source, into, back = bytearray(payload), bytearray(self.bound(spec)), bytearray(payload)
        nbytes = serde.encode(info, memoryview(source), memoryview(into))
        serde.decode(info, memoryview(into)[:nbytes], memoryview(back))
        for buffer in (source, into, back):
            buffer.append(0)  # Python refuses to resize what a view still looks at

    @serde_law("S5")
    def test_equal_input_gives_equal_output_on_every_thread(self) -> None:
        spec, payload = next(self.samples())
        serde, info, bound = self.make_serde(), self.info(spec), self.bound(spec)
        first = self.decoded(spec, self.encoded(spec, payload))

        def once(_: int) -> tuple[bytes, bytes]:
            into, back = bytearray(bound), bytearray(spec.nbytes)
            nbytes = serde.encode(info, memoryview(payload), memoryview(into))
            serde.decode(info, memoryview(into)[:nbytes], memoryview(back))
            return bytes(into[:nbytes]), bytes(back)

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(once, range(32)))
        assert {back for _, back in results} == {first}
        if self.deterministic:
            assert len({encoded for encoded, _ in results}) == 1

    @serde_law("S6")
    def test_what_it_cannot_encode_is_a_value_error(self) -> None:
        spec = kv_spec()
        inputs = [b"\xff" * spec.nbytes, b"\x80\x7f" * (spec.nbytes // 2)]  # NaN, infinity
        for payload in inputs:
            try:
                encoded = self.encoded(spec, payload)
            except ValueError:
                continue
            self.decoded(spec, encoded)

    @serde_law("S7")
    def test_name_fits_into_a_frame(self) -> None:
        serde = self.make_serde()
        assert 1 <= len(serde.wire_id) <= 15
        assert all("!" <= character <= "~" for character in serde.wire_id)
        assert serde.lossless or serde.error_bound, "lossy without a stated bound"
