"""The name behind vLLM's ``LMCacheMPConnector``."""

from lmcache_engine_vllm.connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]
