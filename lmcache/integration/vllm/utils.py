"""A helper that vLLM imports."""

from typing import Any


def mla_enabled(model_config: Any) -> bool:
    """Whether a model keeps latent vectors instead of keys and values."""
    return bool(getattr(model_config, "use_mla", False))
