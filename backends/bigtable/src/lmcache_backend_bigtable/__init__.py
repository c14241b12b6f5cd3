"""Values as rows of a Bigtable."""

from lmcache_backend_bigtable.backend import BigtableBackend as BigtableBackend
