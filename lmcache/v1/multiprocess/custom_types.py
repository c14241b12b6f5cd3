"""Names that vLLM imports beside ``LMCacheMPConnector`` and, with that there, never uses."""


class RequestAllocationRecord:
    """Not used."""


BlockAllocationRecord = RequestAllocationRecord
