"""A SQLite file as an LMCache tier."""

from lmcache_sqlite_example.backend import SqliteBackend

__all__ = ["SqliteBackend"]
