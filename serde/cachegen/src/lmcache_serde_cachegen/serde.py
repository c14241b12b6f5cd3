"""``klt`` and ``cachegen``: a header, escapes, and one stream of entropy-coded symbols."""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lmcache_core import codecs, ops
from lmcache_core.spi import ConfigError, Corrupt, KVSpec, TensorSerde, ValueInfo
from lmcache_serde_cachegen import calibrate, reference
from lmcache_serde_cachegen.config import LEVELS, CacheGenOptions, CalibratedOptions, KltOptions
from lmcache_serde_cachegen.tables import BITS, read

Array = NDArray[Any]
HEADER = struct.Struct("<8sB3xII")
"""First bytes of the tables' digest, level, bytes of escapes, bytes of the stream."""
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}
FAR = 0.48
"""Error relative to the values, root mean square, from which on they are not what the tables were made for."""
SHARE = 8
"""At most one element in so many may be an escape, else the tables are of other values."""


class _Calibrated(TensorSerde):
    """Both codecs; the symbols of a token are those of its planes, heads and coordinates, in this order."""

    lossless = False
    config_type: ClassVar[type]
    wire_id: ClassVar[str]

    def __init__(self, config: CalibratedOptions, /) -> None:
        name = self.wire_id
        if not config.tables.digest:
            raise ConfigError(
                f"{name} needs tables of its model: lmcache calibrate MODEL makes them, then "
                f"{name}: {{tables: FILE}}"
            )
        tables = read(config.tables.path)
        if tables.digest != config.tables.digest:
            raise ConfigError(
                f"tables {config.tables.path!r} have changed since the configuration was read"
            )
        if name not in tables.about["codecs"]:
            raise ConfigError(f"tables {config.tables.path!r} are not for {name}")
        self.config, self.exact_tokens = config, config.exact_tokens
        self.tables = tables
        self._levels: dict[int, Any] = {}
        self._parts: dict[tuple[int, int, int, int], _Part] = {}
        self._proven: set[int] = set()
        self._local = _Local()
        kind = ops.extra("Basis")
        self._basis: Any = kind or reference.Basis
        self._encode = ops.extra("basis_encode") if kind else reference.basis_encode
        self._decode = ops.extra("basis_decode") if kind else reference.basis_decode

    calibrate = staticmethod(calibrate.tables)
    """Makes tables for every codec of this distribution; ``lmcache calibrate`` finds it here."""
    levels = LEVELS

    def bound(self, spec: KVSpec, /) -> int:
        count = max(1, spec.nbytes // (4 if spec.dtype == "float32" else 2))
        return HEADER.size + _room(count) + codecs.rans_bound(count, BITS)

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        level = self.config.level
        part = self._part(info.spec, level)
        count, at = info.spec.tokens * part.stride, HEADER.size
        symbols = self._local.symbols(count)
        turns = self._local.turns(part, info)
        plane, element = source.nbytes // len(part.planes), ELEMENTS[info.spec.dtype]
        end = at + _room(count)
        for number, (basis, steps, limits, deltas) in enumerate(part.planes):
            used = self._encode(
                basis, source[number * plane : (number + 1) * plane], symbols,
                number * part.channels, part.stride, into[at:end], steps, limits, deltas, part.group,
                part.rounding, b"" if number else turns, part.interleaved, element, info.spec.tokens,
            )  # fmt: skip
            if used < 0:
                raise ValueError(f"{self.wire_id}: {_REASONS[used]}")
            at += used
        escapes = at - HEADER.size
        at += codecs.rans_encode(self._distributions(level), part.classes, symbols, into[at:])
        if at >= source.nbytes:
            raise ValueError(f"{self.wire_id}: {at} bytes are no fewer than {source.nbytes}")
        HEADER.pack_into(into, 0, self._mark, level, escapes, at - HEADER.size - escapes)
        if id(part) not in self._proven:
            self._prove(info, source, into[:at])
            self._proven.add(id(part))
        return at

    def _prove(self, info: ValueInfo, source: memoryview, coded: memoryview) -> None:
        """The first segment of each layer is decoded again: another model may have the same shape.

        Raises:
            ValueError: what comes back is not close.
        """
        back = memoryview(bytearray(source.nbytes))
        self.decode(info, coded, back)
        element = ELEMENTS[info.spec.dtype]
        exact, found = (reference.elements(view, element) for view in (source, back))
        error = float(np.square(found - exact).sum() / max(float(np.square(exact).sum()), 1e-30))
        if not error <= FAR**2:
            raise ValueError(
                f"{self.wire_id}: {_REASONS[-1]}: error {error**0.5:.2f} of their size"
            )

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        if source.nbytes < HEADER.size:
            raise self._corrupt(info, f"{source.nbytes} bytes are no segment")
        mark, level, escapes, stream = HEADER.unpack_from(source)
        if mark != self._mark:
            raise self._corrupt(info, f"made with tables {mark.hex()}, here are {self._mark.hex()}")
        if HEADER.size + escapes + stream != source.nbytes:
            raise self._corrupt(info, f"{source.nbytes} bytes are not as long as they say")
        try:
            part = self._part(info.spec, level)
        except ValueError as error:
            raise self._corrupt(info, str(error)) from error
        count, at = info.spec.tokens * part.stride, HEADER.size
        symbols = self._local.symbols(count)
        turns = self._local.turns(part, info)
        end = at + escapes
        if not codecs.rans_decode(self._distributions(level), part.classes, source[end:], symbols):
            raise self._corrupt(info, "not what an encoder wrote")
        plane, element = into.nbytes // len(part.planes), ELEMENTS[info.spec.dtype]
        for number, (basis, steps, limits, deltas) in enumerate(part.planes):
            used = self._decode(
                basis, symbols, number * part.channels, part.stride, source[at:end],
                into[number * plane : (number + 1) * plane], steps, limits, deltas, part.group,
                b"" if number else turns, part.interleaved, element, info.spec.tokens,
            )  # fmt: skip
            at += max(0, used)
            if used < 0:
                break
        if at != end:
            raise self._corrupt(info, "escapes are too few or too many")

    @property
    def _mark(self) -> bytes:
        return bytes.fromhex(self.tables.digest[:16])

    def _corrupt(self, info: ValueInfo, problem: str) -> Corrupt:
        return Corrupt(f"{info.key!r}: {self.wire_id}: {problem}", operation="load")

    def _distributions(self, level: int) -> Any:
        if level not in self._levels:
            freqs = self.tables.arrays[f"{self.wire_id}.freqs"][level - 1]
            self._levels[level] = codecs.RansTables(freqs.tobytes(), BITS)
        return self._levels[level]

    def _part(self, spec: KVSpec, level: int) -> _Part:
        """What the tables say for a segment of this form.

        Raises:
            ValueError: they are not for such a segment.
        """
        segment = spec.segments[0]
        key = (segment.layer, segment.head_begin, segment.head_end, level)
        about, item = self.tables.about, 4 if spec.dtype == "float32" else 2
        heads = segment.head_end - segment.head_begin
        whole = about["planes"] * spec.tokens * heads * about["dim"] * item
        fits = spec.planes == about["planes"] and spec.head_dim == about["dim"] and heads > 0
        if not (
            fits
            and segment.head_end <= about["heads"] == spec.heads
            and whole == segment.nbytes > 0
        ):
            raise ValueError(
                f"tables of {about['model']} are for {about['heads']} heads of {about['dim']}, not for "
                f"{spec.heads} of {spec.head_dim}"
            )
        if segment.layer not in about["layers"] or spec.dtype not in ELEMENTS:
            raise ValueError(
                f"tables of {about['model']} know no layer {segment.layer} of {spec.dtype}"
            )
        if not 1 <= level <= len(about["codecs"][self.wire_id]["bits"]):
            raise ValueError(f"tables of {about['model']} have no level {level}")
        return self._parts.get(key) or self._parts.setdefault(key, self._cut(*key))

    def _cut(self, layer: int, begin: int, end: int, level: int) -> _Part:
        arrays, about, name = self.tables.arrays, self.tables.about, self.wire_id
        row, heads, chosen = about["layers"].index(layer), slice(begin, end), about["codecs"][name]
        cut = (level - 1, row)
        classes = arrays[f"{name}.classes"][cut][:, :, heads]
        extents = _limits(arrays[f"{name}.freqs"][level - 1])[classes].min(0)
        planes = []
        for plane in range(about["planes"]):
            there = [
                (arrays[f"{name}.{side}"][row, plane, heads].astype("<f4")
                 * arrays[f"{name}.{side}_scale"][row, plane, heads][:, None, None]).tobytes()
                if f"{name}.{side}" in arrays else b"" for side in ("forward", "backward")
            ]  # fmt: skip
            mean = arrays[f"{name}.mean"][row, plane, heads].tobytes()
            deltas = arrays.get(f"{name}.deltas")
            planes.append(
                (
                    self._basis(mean, *there, end - begin, about["dim"]),
                    arrays[f"{name}.steps"][cut][plane, heads].tobytes(),
                    extents[plane].astype("u1").tobytes(),
                    b"" if deltas is None else deltas[cut][plane, heads].tobytes(),
                )
            )
        turning = about["rope"]["layers"][row] if name == Klt.wire_id else -1
        group = chosen["group"]
        kinds = [0, *[len(classes) - 1] * (group - 1)]
        return _Part(
            planes=tuple(planes), channels=(end - begin) * about["dim"],
            stride=about["planes"] * (end - begin) * about["dim"],
            classes=np.ascontiguousarray(classes[kinds]).tobytes(), group=group,
            rounding=chosen["rounding"][level - 1],
            frequencies=None if turning < 0 else arrays[f"rope.{turning}"],
            interleaved=about["rope"]["interleaved"],
        )  # fmt: skip


class Klt(_Calibrated):
    """Keys without their rotation, both in the coordinates in which the model feels all errors alike.

    After KVTC (arXiv 2511.01815: principal components, entropy coding) with the metric of the loss: see
    ``calibrate``.
    """

    config_type = KltOptions
    wire_id = "klt"
    error_bound = "half a step (three quarters at most) of each calibrated coordinate; the tables list the steps"


class CacheGen(_Calibrated):
    """After CacheGen (arXiv 2310.07240): groups of ten tokens with an anchor, bins that grow with depth,
    distributions for each layer and channel that were measured once.
    """

    config_type = CacheGenOptions
    wire_id = "cachegen"
    error_bound = "half a step of each channel; the tables list the steps"


_REASONS = {
    -1: "the values are not those the tables were made for",
    -2: "an element is not finite or far outside the tables",
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Tables of one segment: for each plane its basis, steps, limits and deltas."""

    planes: tuple[tuple[Any, bytes, bytes, bytes], ...]
    channels: int
    stride: int
    classes: bytes
    group: int
    rounding: float
    frequencies: Array | None
    interleaved: bool


class _Local(threading.local):
    """Memory of one thread, kept from call to call."""

    def __init__(self) -> None:
        self._symbols = bytearray()
        self._angles: Array = np.empty((0, 0), np.float64)
        self._turns: Array = np.empty((0, 2, 0), np.float32)
        self._made: tuple[int, int, int] | None = None

    def symbols(self, count: int) -> memoryview:
        if len(self._symbols) < count:
            self._symbols = bytearray(count)
        return memoryview(self._symbols)[:count]

    def turns(self, part: _Part, info: ValueInfo) -> Any:
        """Cosines and sines of the keys of a segment: the same for all layers that turn alike."""
        if part.frequencies is None:
            return b""
        first, tokens = max(0, info.first_token), info.spec.tokens
        made = (first, tokens, part.frequencies.ctypes.data)
        if made != self._made:
            shape = tokens, int(part.frequencies.size)
            if self._angles.shape != shape:
                self._angles = np.empty(shape, np.float64)
                self._turns = np.empty((tokens, 2, shape[1]), np.float32)
            positions = np.arange(first, first + tokens, dtype=np.float64)[:, None]
            for at, function in enumerate((np.cos, np.sin)):
                np.multiply(positions, part.frequencies, out=self._angles)
                function(self._angles, out=self._angles)
                self._turns[:, at] = self._angles
            self._made = made
        return self._turns


def _room(count: int) -> int:
    """Bytes that escapes may take."""
    return 2 * (count // SHARE + 8)


def _limits(freqs: Array) -> Array:
    """The furthest symbol of each class from the middle."""
    far = np.abs(np.arange(255) - 127)
    found: Array = np.where(freqs[:, :255] > 0, far, 0).max(1)
    return found
