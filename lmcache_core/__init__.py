"""The core of LMCache: pure Python, imports neither a tensor library nor any plugin."""

__version__ = "2026.11.0+tree"
