"""LMCache for vLLM. Import ``lmcache_engine_vllm.connector``; this package itself imports nothing."""
