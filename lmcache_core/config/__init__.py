"""Configuration: records, and how they are read from files, the environment, engines and flags."""

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

__all__ = [
    "Config",
    "EngineConfig",
    "LoadFailure",
    "ManagerConfig",
    "PluginChoice",
    "PluginsConfig",
    "Quota",
    "Share",
    "TenantConfig",
    "TierConfig",
    "VerifyHot",
    "WritePolicy",
]
