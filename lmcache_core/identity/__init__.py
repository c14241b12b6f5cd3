"""Names of stored chunks, made here and nowhere else (no second copy of any rule exists)."""

from lmcache_core.identity.canonical import Scalar, Unkeyable, canonical
from lmcache_core.identity.chain import (
    Chain,
    Extra,
    Tokens,
    chunk_digests,
    embedding_extras,
    keys,
    probe_digest,
)
from lmcache_core.identity.managers import KeyManager, with_manager
from lmcache_core.identity.shards import (
    Run,
    Shard,
    copy_runs,
    join,
    rows_spec,
    select,
    writer_of,
)
from lmcache_core.identity.space import (
    EXACT,
    FORMAT,
    Adapter,
    Group,
    KeySpace,
    Rope,
    chunk_tokens,
)
from lmcache_core.identity.weights import weights_fingerprint

__all__ = [
    "EXACT",
    "FORMAT",
    "Adapter",
    "Chain",
    "Extra",
    "Group",
    "KeyManager",
    "KeySpace",
    "Rope",
    "Run",
    "Scalar",
    "Shard",
    "Tokens",
    "Unkeyable",
    "canonical",
    "chunk_digests",
    "chunk_tokens",
    "copy_runs",
    "embedding_extras",
    "join",
    "keys",
    "probe_digest",
    "rows_spec",
    "select",
    "weights_fingerprint",
    "with_manager",
    "writer_of",
]
