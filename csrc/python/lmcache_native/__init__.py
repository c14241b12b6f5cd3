"""Native form of ``lmcache_core.ops``, found through the entry point group of that name.

Nothing else belongs here: the contract and its documentation are those of ``lmcache_core.ops``.
"""

from lmcache_native import ops

__all__ = ["ops"]
