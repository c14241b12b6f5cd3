"""Configuration: records, and how they are read from files, the environment, engines and flags."""

from lmcache_core.config.binding import Binder as Binder, Setting as Setting
from lmcache_core.config.load import (
    Effective as Effective,
    load as load,
    permissions as permissions,
)
from lmcache_core.config.records import (
    Config as Config,
    DaemonConfig as DaemonConfig,
    EngineConfig as EngineConfig,
    LoadFailure as LoadFailure,
    ManagerConfig as ManagerConfig,
    PluginChoice as PluginChoice,
    PluginsConfig as PluginsConfig,
    Quality as Quality,
    Quota as Quota,
    Share as Share,
    TenantConfig as TenantConfig,
    TierConfig as TierConfig,
    Transfer as Transfer,
    VerifyHot as VerifyHot,
    WritePolicy as WritePolicy,
)
from lmcache_core.config.tree import Item as Item, items as items
