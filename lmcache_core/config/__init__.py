"""Configuration: records, and how they are read from files, the environment, engines and flags."""

from lmcache_core.config.binding import Setting, bind
from lmcache_core.config.load import Effective, load, permissions
from lmcache_core.config.records import (
    Config,
    EngineConfig,
    LoadFailure,
    ManagerConfig,
    PluginChoice,
    PluginsConfig,
    Quota,
    Share,
    TenantConfig,
    TierConfig,
    VerifyHot,
    WritePolicy,
)
from lmcache_core.config.tree import Item, items

__all__ = [
    "Config",
    "Effective",
    "EngineConfig",
    "Item",
    "LoadFailure",
    "ManagerConfig",
    "PluginChoice",
    "PluginsConfig",
    "Quota",
    "Setting",
    "Share",
    "TenantConfig",
    "TierConfig",
    "VerifyHot",
    "WritePolicy",
    "bind",
    "items",
    "load",
    "permissions",
]
