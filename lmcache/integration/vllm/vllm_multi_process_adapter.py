"""Names that vLLM imports beside ``LMCacheMPConnector`` and, with that there, never uses."""


class LMCacheMPSchedulerAdapter:
    """Not used."""


class LMCacheMPWorkerAdapter:
    """Not used."""


class LoadStoreOp:
    """Not used."""


class ParallelStrategy:
    """Not used."""
