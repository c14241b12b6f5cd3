"""Tokens to chunks to the cache: what every engine integration is built on."""

from lmcache_core.engine.cache import Cache
from lmcache_core.engine.client import CacheClient, Paged, Surface
from lmcache_core.engine.engine import CacheEngine
from lmcache_core.engine.forms import Forms
from lmcache_core.engine.request import Request, Saved, State

__all__ = [
    "Cache",
    "CacheClient",
    "CacheEngine",
    "Forms",
    "Paged",
    "Request",
    "Saved",
    "State",
    "Surface",
]
