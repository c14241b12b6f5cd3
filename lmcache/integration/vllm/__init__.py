"""Names that vLLM imports; what is behind them is in ``lmcache_engine_vllm``."""
