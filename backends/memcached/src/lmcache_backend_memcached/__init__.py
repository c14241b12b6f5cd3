"""Values in memcached."""

from lmcache_backend_memcached.backend import MemcachedBackend

__all__ = ["MemcachedBackend"]
