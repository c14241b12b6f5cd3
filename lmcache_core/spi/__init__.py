"""The only package a plugin imports. Standard library only.

``backend``, ``serde`` and ``policy`` are frozen by a snapshot test; ``channel`` and ``gpu`` are provisional.
"""

from lmcache_core.spi.api import (
    PLUGIN_API,
)
from lmcache_core.spi.backend import (
    MISSED,
    PRESENT,
    STORED,
    AbstractBackend,
    Capabilities,
    Durability,
    Found,
    Load,
    LoadDone,
    Loaded,
    LoadStatus,
    Placement,
    ScanPage,
    Store,
    Stored,
    StoreDone,
    StoreStatus,
    Usage,
)
from lmcache_core.spi.blocking import (
    BlockingBackend,
)
from lmcache_core.spi.buffers import (
    Extent,
    Lease,
    MemoryKind,
    MemoryOptions,
    Refusal,
    Region,
    Reservation,
    ResidentPool,
)
from lmcache_core.spi.channel import (
    Piece,
    TransferChannel,
    TransferState,
)
from lmcache_core.spi.config import (
    ByteSize,
    Duration,
    Secret,
)
from lmcache_core.spi.context import (
    Clock,
    Context,
    Executor,
    Files,
    FileStatus,
)
from lmcache_core.spi.errors import (
    BackendError,
    BufferTooSmall,
    Closed,
    ConfigError,
    Corrupt,
    DeadlineExceeded,
    LMCacheError,
    PluginConflict,
    PluginDenied,
    PluginError,
    PluginIncompatible,
    PluginLoadError,
    PluginNotFound,
    PluginUnavailable,
    Unavailable,
    Unsupported,
)
from lmcache_core.spi.gpu import (
    Copied,
    Fence,
    GPUConnector,
)
from lmcache_core.spi.hooks import (
    BatchDone,
    Damaged,
    Event,
    Evicted,
    HealthChanged,
    Observer,
    TierClosed,
    TierOpened,
)
from lmcache_core.spi.keys import (
    DIGEST_NBYTES,
    TEXT_LENGTH,
    Key,
    KeyManager,
)
from lmcache_core.spi.layout import (
    Interior,
    KVSpec,
    PageSpec,
    Reuse,
    SegmentSpec,
)
from lmcache_core.spi.policy import (
    EvictionPolicy,
)
from lmcache_core.spi.polled import (
    PolledBackend,
)
from lmcache_core.spi.serde import (
    BytesSerde,
    TensorSerde,
    ValueInfo,
)
from lmcache_core.spi.wrapper import (
    Wrapper,
)

__all__ = [
    "DIGEST_NBYTES",
    "MISSED",
    "PLUGIN_API",
    "PRESENT",
    "STORED",
    "TEXT_LENGTH",
    "AbstractBackend",
    "BackendError",
    "BatchDone",
    "BlockingBackend",
    "BufferTooSmall",
    "ByteSize",
    "BytesSerde",
    "Capabilities",
    "Clock",
    "Closed",
    "ConfigError",
    "Context",
    "Copied",
    "Corrupt",
    "Damaged",
    "DeadlineExceeded",
    "Durability",
    "Duration",
    "Event",
    "Evicted",
    "EvictionPolicy",
    "Executor",
    "Extent",
    "Fence",
    "FileStatus",
    "Files",
    "Found",
    "GPUConnector",
    "HealthChanged",
    "Interior",
    "KVSpec",
    "Key",
    "KeyManager",
    "LMCacheError",
    "Lease",
    "Load",
    "LoadDone",
    "LoadStatus",
    "Loaded",
    "MemoryKind",
    "MemoryOptions",
    "Observer",
    "PageSpec",
    "Piece",
    "Placement",
    "PluginConflict",
    "PluginDenied",
    "PluginError",
    "PluginIncompatible",
    "PluginLoadError",
    "PluginNotFound",
    "PluginUnavailable",
    "PolledBackend",
    "Refusal",
    "Region",
    "Reservation",
    "ResidentPool",
    "Reuse",
    "ScanPage",
    "Secret",
    "SegmentSpec",
    "Store",
    "StoreDone",
    "StoreStatus",
    "Stored",
    "TensorSerde",
    "TierClosed",
    "TierOpened",
    "TransferChannel",
    "TransferState",
    "Unavailable",
    "Unsupported",
    "Usage",
    "ValueInfo",
    "Wrapper",
]
