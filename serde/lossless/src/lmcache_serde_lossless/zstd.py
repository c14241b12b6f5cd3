"""``zstd`` over any bytes: for opaque pages, and behind lossy serdes that leave something."""

from __future__ import annotations

import threading
from typing import Any

from lmcache_core.spi import BytesSerde, Corrupt, ValueInfo
from lmcache_serde_lossless.config import ZstdOptions


class Zstd(BytesSerde):
    """One zstd frame per segment, its length inside, no checksum: values carry their own."""

    config_type = ZstdOptions
    wire_id = "zstd"
    lossless = True

    def __init__(self, config: ZstdOptions, /) -> None:
        import zstandard

        self._zstd: Any = zstandard
        self._level = config.level
        self._mine = threading.local()  # its objects serve one thread each

    def bound(self, nbytes: int, /) -> int:
        return nbytes + (nbytes >> 8) + 512

    def encode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> int:
        engine = getattr(self._mine, "out", None)
        if engine is None:
            engine = self._mine.out = self._zstd.ZstdCompressor(level=self._level)
        data = engine.compress(source)
        into[: len(data)] = data
        return len(data)

    def decode(self, info: ValueInfo, source: memoryview, into: memoryview, /) -> None:
        engine = getattr(self._mine, "back", None)
        if engine is None:
            engine = self._mine.back = self._zstd.ZstdDecompressor()
        try:
            # Asked for before anything is decompressed: a small lie could fill the memory.
            if self._zstd.frame_content_size(source) != into.nbytes:
                raise Corrupt(f"zstd: no frame of {into.nbytes} bytes", operation="load")
            into[:] = engine.decompress(source, max_output_size=into.nbytes)
        except (self._zstd.ZstdError, ValueError) as error:
            raise Corrupt(f"zstd: {error}", operation="load") from None
