"""Another daemon as a tier."""

from lmcache_backend_lmcache.backend import LMCacheBackend as LMCacheBackend
