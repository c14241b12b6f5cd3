"""Names of stored chunks, made here and nowhere else (no second copy of any rule exists)."""

from lmcache_core.identity.canonical import (
    Scalar as Scalar,
    Unkeyable as Unkeyable,
    canonical as canonical,
)
from lmcache_core.identity.chain import (
    Chain as Chain,
    Extra as Extra,
    Tokens as Tokens,
    chunk_digests as chunk_digests,
    embedding_extras as embedding_extras,
    keys as keys,
    probe_digest as probe_digest,
)
from lmcache_core.identity.shards import (
    Run as Run,
    Shard as Shard,
    copy_runs as copy_runs,
    join as join,
    rows_spec as rows_spec,
    select as select,
    writer_of as writer_of,
)
from lmcache_core.identity.space import (
    EXACT as EXACT,
    FORMAT as FORMAT,
    Adapter as Adapter,
    Group as Group,
    KeySpace as KeySpace,
    Rope as Rope,
    chunk_tokens as chunk_tokens,
    with_manager as with_manager,
)
from lmcache_core.identity.weights import weights_fingerprint as weights_fingerprint
from lmcache_core.spi.keys import KeyManager as KeyManager
