"""A helper that vLLM imports."""

import logging


def init_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)
