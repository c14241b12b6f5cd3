"""LMCache for Hugging Face transformers."""

from lmcache_engine_transformers.cached import CachedModel as CachedModel
from lmcache_engine_transformers.cached import Reused as Reused

__all__ = ["CachedModel", "Reused"]
