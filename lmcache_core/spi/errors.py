"""Every error a plugin may raise or a caller may meet.

Messages are one line, lower case: what happened, to which named thing, and the nearest valid thing.
``retryable`` is data, so that no code needs a list of error types.
"""

from __future__ import annotations


class LMCacheError(Exception):
    """Root of all errors of this project."""


class ConfigError(LMCacheError, ValueError):
    """A configuration value that cannot be used; names the source, the key and the nearest valid key."""


class PluginError(LMCacheError):
    """A plugin cannot be used; subclasses say why."""


class PluginNotFound(PluginError, LookupError):
    """No installed distribution offers the name."""


class PluginDenied(PluginError):
    """The name is installed but not allowed by configuration or environment."""


class PluginConflict(PluginError):
    """More than one distribution offers the name."""


class PluginLoadError(PluginError, ImportError):
    """The plugin is installed but importing it failed; the cause is chained."""


class PluginIncompatible(PluginError):
    """The plugin speaks another ``PLUGIN_API`` or is not of the kind its entry point says."""


class PluginUnavailable(PluginError):
    """The plugin is installed and importable but cannot work here (library, device or server absent)."""


class BackendError(LMCacheError):
    """A backend verb failed.

    Attributes:
        retryable: whether the same call may succeed when tried again.
        operation: the verb (``"load"``), or ``""`` when unknown.
        tier: the configured name of the tier, or ``""``.
    """

    retryable: bool = False

    def __init__(
        self, message: str, /, *, retryable: bool | None = None, operation: str = "", tier: str = ""
    ) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable
        self.operation = operation
        self.tier = tier


class Unavailable(BackendError, ConnectionError):
    """The store behind the backend cannot be reached or did not answer; another try may succeed."""

    retryable = True


class Unsupported(BackendError):
    """The verb or option is not declared in the backend's capabilities."""


class BufferTooSmall(BackendError, ValueError):
    """The caller's buffers are shorter than the value; they were left alone."""


class Corrupt(BackendError):
    """The stored value is damaged, foreign, or of another format."""


class Closed(BackendError):
    """The backend has been closed."""


class DeadlineExceeded(BackendError, TimeoutError):
    """The manager stopped waiting; memory in flight is quarantined until the backend is quiescent."""

    retryable = True
