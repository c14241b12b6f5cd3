"""Values in Redis or Valkey."""

from lmcache_backend_redis.backend import RedisBackend, ValkeyBackend

__all__ = ["RedisBackend", "ValkeyBackend"]
