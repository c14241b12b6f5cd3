"""Values in InfiniStore."""

from lmcache_backend_infinistore.backend import InfiniStoreBackend

__all__ = ["InfiniStoreBackend"]
