"""GENERATED from plugins.toml by .ci/catalogue.py; edit that file and run `make catalogue`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One first-party name: what ships it, where it lies in a checkout, what it needs.

    ``kind`` is the end of the entry-point group ``lmcache_core.KIND``. ``status`` is ``experimental``,
    ``stable`` or ``retired``; a retired name has a ``reason``. Empty text means none.
    """

    kind: str
    name: str
    dist: str
    path: str
    object: str
    extra: str = ""
    status: str = "experimental"
    reason: str = ""
    needs: str = ""
    service: str = ""


CATALOGUE: tuple[Entry, ...] = (
    Entry(
        kind="backends",
        name="memory",
        dist="lmcache",
        path=".",
        object="lmcache_core.memory.backend:MemoryBackend",
        status="stable",
    ),
    Entry(
        kind="backends",
        name="cpu",
        dist="lmcache-backend-cpu",
        path="backends/cpu",
        object="lmcache_backend_cpu:CPUBackend",
        extra="cpu",
        status="experimental",
    ),
    Entry(
        kind="backends",
        name="disk",
        dist="lmcache-backend-disk",
        path="backends/disk",
        object="lmcache_backend_disk:DiskBackend",
        extra="disk",
        status="experimental",
        needs="a folder of its own on a local file system",
    ),
    Entry(
        kind="backends",
        name="fs",
        dist="lmcache-backend-disk",
        path="backends/disk",
        object="lmcache_backend_disk:FsBackend",
        extra="fs",
        status="experimental",
        needs="a folder on a file system that the nodes share",
    ),
    Entry(
        kind="backends",
        name="lmcache",
        dist="lmcache-backend-lmcache",
        path="backends/lmcache",
        object="lmcache_backend_lmcache:LMCacheBackend",
        extra="lmcache",
        status="experimental",
        needs="an lmcache server that can be reached",
    ),
    Entry(
        kind="policies",
        name="lru",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.lru:LRU",
        status="stable",
    ),
    Entry(
        kind="policies",
        name="fifo",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.fifo:FIFO",
        status="stable",
    ),
    Entry(
        kind="policies",
        name="mru",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.mru:MRU",
        status="stable",
    ),
    Entry(
        kind="policies",
        name="arc",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.arc:ARC",
        status="stable",
    ),
    Entry(
        kind="policies",
        name="s3fifo",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.s3fifo:S3FIFO",
        status="experimental",
    ),
    Entry(
        kind="policies",
        name="lfu",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.lfu:LFU",
        status="experimental",
    ),
    Entry(
        kind="policies",
        name="wtinylfu",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.wtinylfu:WTinyLFU",
        status="experimental",
    ),
    Entry(
        kind="policies",
        name="gdsf",
        dist="lmcache",
        path=".",
        object="lmcache_core.policies.gdsf:GDSF",
        status="experimental",
    ),
    Entry(
        kind="wrappers",
        name="limit",
        dist="lmcache",
        path=".",
        object="lmcache_core.wrappers.limit:Limit",
        status="experimental",
    ),
    Entry(
        kind="wrappers",
        name="breaker",
        dist="lmcache",
        path=".",
        object="lmcache_core.wrappers.breaker:Breaker",
        status="experimental",
    ),
    Entry(
        kind="wrappers",
        name="retry",
        dist="lmcache",
        path=".",
        object="lmcache_core.wrappers.retry:Retry",
        status="experimental",
    ),
    Entry(
        kind="wrappers",
        name="check",
        dist="lmcache",
        path=".",
        object="lmcache_core.wrappers.check:Check",
        status="experimental",
    ),
    Entry(
        kind="wrappers",
        name="chaos",
        dist="lmcache",
        path=".",
        object="lmcache_core.wrappers.chaos:Chaos",
        status="experimental",
    ),
    Entry(
        kind="gpu_connectors",
        name="cpu",
        dist="lmcache-gpu-cpu",
        path="gpu_connectors/cpu",
        object="lmcache_gpu_cpu:CPUConnector",
        extra="gpu-cpu",
        status="experimental",
    ),
    Entry(
        kind="ops",
        name="native",
        dist="lmcache-native",
        path="csrc",
        object="lmcache_native:ops",
        extra="native",
        status="experimental",
        needs="a C++ compiler and Python.h while it is built",
    ),
    Entry(
        kind="commands",
        name="check",
        dist="lmcache-backend-disk",
        path="backends/disk",
        object="lmcache_backend_disk.command:app",
        extra="disk",
        status="experimental",
    ),
    Entry(
        kind="commands",
        name="server",
        dist="lmcache-server",
        path="server",
        object="lmcache_server.command:app",
        extra="server",
        status="experimental",
    ),
    Entry(
        kind="commands",
        name="demo",
        dist="lmcache-engine-transformers",
        path="engines/transformers",
        object="lmcache_engine_transformers.demo.command:app",
        extra="transformers",
        status="experimental",
        needs="torch (the CPU build is enough), transformers; gguf and accelerate once",
    ),
    Entry(
        kind="engines",
        name="transformers",
        dist="lmcache-engine-transformers",
        path="engines/transformers",
        object="lmcache_engine_transformers",
        extra="transformers",
        status="experimental",
        needs="torch (the CPU build is enough) and transformers",
    ),
)
