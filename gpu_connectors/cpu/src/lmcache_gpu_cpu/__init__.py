"""Connector for KV in host memory."""

from lmcache_gpu_cpu.connector import CPUConnector as CPUConnector

__all__ = ["CPUConnector"]
