"""Values through NIXL: in files, in objects, in the memory of another node, or striped over several of these."""

from lmcache_backend_nixl.backend import NixlBackend

__all__ = ["NixlBackend"]
