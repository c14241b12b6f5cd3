"""Values in a Mooncake store."""

from lmcache_backend_mooncake.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]
