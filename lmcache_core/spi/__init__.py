"""The only package a plugin imports. Standard library only.

``backend``, ``serde`` and ``policy`` are frozen by a snapshot test; ``channel`` and ``gpu`` are provisional.
"""

from lmcache_core.spi.adapter import fill as fill, section as section
from lmcache_core.spi.api import PLUGIN_API as PLUGIN_API
from lmcache_core.spi.backend import (
    MISSED as MISSED,
    PRESENT as PRESENT,
    STORED as STORED,
    AbstractBackend as AbstractBackend,
    Capabilities as Capabilities,
    Durability as Durability,
    Found as Found,
    Load as Load,
    LoadDone as LoadDone,
    Loaded as Loaded,
    LoadStatus as LoadStatus,
    Placement as Placement,
    ScanPage as ScanPage,
    Store as Store,
    Stored as Stored,
    StoreDone as StoreDone,
    StoreStatus as StoreStatus,
    Usage as Usage,
)
from lmcache_core.spi.blocking import BlockingBackend as BlockingBackend
from lmcache_core.spi.buffers import (
    Extent as Extent,
    Lease as Lease,
    MemoryKind as MemoryKind,
    MemoryOptions as MemoryOptions,
    Refusal as Refusal,
    Region as Region,
    Reservation as Reservation,
    ResidentPool as ResidentPool,
)
from lmcache_core.spi.channel import (
    Piece as Piece,
    TransferChannel as TransferChannel,
    TransferState as TransferState,
)
from lmcache_core.spi.config import ByteSize as ByteSize, Duration as Duration, Secret as Secret
from lmcache_core.spi.context import (
    Clock as Clock,
    Context as Context,
    Executor as Executor,
    Files as Files,
    FileStatus as FileStatus,
)
from lmcache_core.spi.errors import (
    BackendError as BackendError,
    BufferTooSmall as BufferTooSmall,
    Closed as Closed,
    ConfigError as ConfigError,
    Corrupt as Corrupt,
    DeadlineExceeded as DeadlineExceeded,
    LMCacheError as LMCacheError,
    PluginConflict as PluginConflict,
    PluginDenied as PluginDenied,
    PluginError as PluginError,
    PluginIncompatible as PluginIncompatible,
    PluginLoadError as PluginLoadError,
    PluginNotFound as PluginNotFound,
    PluginUnavailable as PluginUnavailable,
    Unavailable as Unavailable,
    Unsupported as Unsupported,
)
from lmcache_core.spi.gpu import Copied as Copied, Fence as Fence, GPUConnector as GPUConnector
from lmcache_core.spi.hooks import (
    BatchDone as BatchDone,
    Damaged as Damaged,
    Event as Event,
    Evicted as Evicted,
    HealthChanged as HealthChanged,
    Observer as Observer,
    Recoded as Recoded,
    SerdeOff as SerdeOff,
    TierClosed as TierClosed,
    TierOpened as TierOpened,
)
from lmcache_core.spi.keys import (
    DIGEST_NBYTES as DIGEST_NBYTES,
    TEXT_LENGTH as TEXT_LENGTH,
    Key as Key,
    KeyManager as KeyManager,
)
from lmcache_core.spi.layout import (
    Interior as Interior,
    KVSpec as KVSpec,
    PageSpec as PageSpec,
    Reuse as Reuse,
    SegmentSpec as SegmentSpec,
    TensorLike as TensorLike,
    page_spec as page_spec,
)
from lmcache_core.spi.policy import EvictionPolicy as EvictionPolicy
from lmcache_core.spi.polled import PolledBackend as PolledBackend
from lmcache_core.spi.serde import (
    BytesSerde as BytesSerde,
    TensorSerde as TensorSerde,
    ValueInfo as ValueInfo,
)
from lmcache_core.spi.wrapper import Wrapper as Wrapper
