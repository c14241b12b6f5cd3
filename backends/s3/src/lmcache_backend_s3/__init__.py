"""Values as objects: S3 and what speaks it (``s3``), Google Cloud Storage (``gs``), Azure Blob (``az``)."""

from lmcache_backend_s3.providers import AzBackend, GSBackend, S3Backend

__all__ = ["AzBackend", "GSBackend", "S3Backend"]
