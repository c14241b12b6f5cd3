"""Which groups of an engine are kept, by which rule, and which of their blocks are whole."""

from types import SimpleNamespace

import pytest
from lmcache_engine_vllm.groups import chunk_of, filled, parts

from engines.vllm.tests.stand_ins import FullAttentionSpec, SlidingWindowSpec
from lmcache_core.spi import ConfigError, Reuse

FULL = FullAttentionSpec(block_size=16)


class MambaSpec(SimpleNamespace):
    pass


def cache(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def recurrent(**how):
    return MambaSpec(block_size=16, mamba_cache_mode="align", **how)


def test_groups_are_read_off_the_engines_own_configuration():
    """Seen in LMCache#1668."""
    found = parts(cache(FULL, SlidingWindowSpec(block_size=32, sliding_window=64), recurrent()))
    assert [(part.reuse, part.window, part.block) for part in found] == [
        (Reuse.ALL, 0, 16), (Reuse.WINDOW, 64, 32), (Reuse.POINT, 0, 16),
    ]  # fmt: skip
    assert chunk_of(found, 8) == 32
    assert chunk_of(found, 100) == 128


def test_what_a_state_consists_of_is_part_of_its_name():
    narrow, wide = (recurrent(shapes=((4, 8),), dtypes=(kind,)) for kind in ("f16", "bf16"))
    assert parts(cache(FULL, narrow))[1].state != parts(cache(FULL, wide))[1].state
    assert parts(cache(FULL))[0].state == ""


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (MambaSpec(block_size=16, mamba_cache_mode="none"), "only with prefix caching"),
        (recurrent(num_speculative_blocks=2), "under speculative decoding"),
        (type("ChunkedLocalAttentionSpec", (SimpleNamespace,), {})(block_size=16), "not known"),
    ],
)
def test_what_cannot_be_reused_is_refused(spec, why):
    """Seen in LMCache#2879.

    Seen in LMCache#1153.
    """
    inner = SimpleNamespace(kv_cache_specs={"a": spec}, block_size=16)
    for each in (spec, inner):
        with pytest.raises(ConfigError, match=why):
            parts(cache(FULL, each))


def test_states_are_kept_where_the_engine_says_that_they_are_whole():
    found = parts(cache(FULL, recurrent(), recurrent()))
    state = SimpleNamespace(
        get_block_ids=lambda id: ([1, 2, 3], [0, 4, 5], [0, 6, 7]),
        boundary_state_offloads={"r": [(1, 9, 32), (2, 8, 16), (2, 11, 40)]},
    )
    out = SimpleNamespace(kv_connector_block_state=state)
    assert filled(found, out, "r", 48) == ((1, 2, 3), (0, 9, 0), (8, 0, 0))
    assert filled(found, out, "another", 48) == ((1, 2, 3), (0, 0, 0), (0, 0, 0))
    del state.boundary_state_offloads  # an engine that hands over none
    assert filled(found, out, "r", 32) == ((1, 2), (0, 0), (0, 0))
