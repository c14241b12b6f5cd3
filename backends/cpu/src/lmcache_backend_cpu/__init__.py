"""Values in host memory, used where they lie."""

from lmcache_backend_cpu.backend import CPUBackend

__all__ = ["CPUBackend"]
