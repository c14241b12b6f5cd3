"""Values as files: ``disk`` owns its folders, ``fs`` shares them with other nodes."""

from lmcache_backend_disk.backend import DiskBackend, FsBackend

__all__ = ["DiskBackend", "FsBackend"]
