"""The connector's former out-of-tree name."""

from lmcache_engine_vllm.connector import LMCacheConnector as LMCacheConnectorV1Dynamic
from lmcache_engine_vllm.connector import SafeLMCacheConnectorV1

__all__ = ["LMCacheConnectorV1Dynamic", "SafeLMCacheConnectorV1"]
