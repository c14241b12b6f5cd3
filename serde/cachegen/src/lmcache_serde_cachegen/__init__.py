"""The serdes ``cachegen`` and ``klt``: calibrated for one model by ``lmcache calibrate``."""

from lmcache_serde_cachegen.config import CacheGenOptions, KltOptions
from lmcache_serde_cachegen.serde import CacheGen, Klt
from lmcache_serde_cachegen.tables import TablesFile

__all__ = ["CacheGen", "CacheGenOptions", "Klt", "KltOptions", "TablesFile"]
