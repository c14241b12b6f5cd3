"""The name behind vLLM's ``LMCacheConnectorV1``."""

from lmcache_engine_vllm.stock import LMCacheConnectorV1Impl

__all__ = ["LMCacheConnectorV1Impl"]
