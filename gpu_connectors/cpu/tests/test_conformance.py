"""The laws of connectors."""

from lmcache_gpu_cpu import CPUConnector

from lmcache_core.testing.gpu import GPUConnectorTests


class TestCPUConnector(GPUConnectorTests):
    def make_connector(self) -> CPUConnector:
        return CPUConnector()


class TestCPUConnectorWithThreads(GPUConnectorTests):
    def make_connector(self) -> CPUConnector:
        return CPUConnector(threads=3)
