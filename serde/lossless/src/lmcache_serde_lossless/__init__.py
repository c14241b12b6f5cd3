"""Serdes that give back every bit: ``x12``, ``xr`` and ``zstd``."""

from lmcache_serde_lossless.config import X12Options, XROptions, ZstdOptions
from lmcache_serde_lossless.floats import X12, XR
from lmcache_serde_lossless.zstd import Zstd

__all__ = ["X12", "XR", "X12Options", "XROptions", "Zstd", "ZstdOptions"]
