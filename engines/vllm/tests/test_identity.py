"""What makes the KV of two requests or two engines different, and what does not."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from lmcache_engine_vllm import settings
from lmcache_engine_vllm.identity import key_space, weights_of, wishes

from engines.vllm.tests.common import served
from engines.vllm.tests.stand_ins import Request
from lmcache_core.config import EngineConfig
from lmcache_core.identity import Chain, KeyManager, Unkeyable
from lmcache_core.spi import ConfigError


def digests(options=None, **how):
    request = Request("r", list(range(12)), 1, **how)
    wish = wishes(request, options or EngineConfig(), {})
    return Chain(bytes(32), 4, extras=wish.extras).extend(request.all_token_ids)


def picture(identifier, offset, length=2):
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def test_a_picture_changes_its_chunk_and_later_ones_and_none_before():
    """Seen in LMCache#4183."""
    plain, first, other = (
        digests(),
        digests(mm_features=[picture("a", 5)]),
        digests(mm_features=[picture("b", 5)]),
    )
    assert plain[0] == first[0] == other[0]
    assert len({plain[1], first[1], other[1]}) == len({plain[2], first[2], other[2]}) == 3


def test_salts_never_share():
    """Seen in sglang#37160."""
    assert not {*digests(cache_salt="a")} & {*digests(cache_salt="b")}


def test_tags_separate_only_where_they_are_part_of_the_key():
    eve, bob = ({"lmcache.tag.user": name} for name in ("eve", "bob"))
    assert digests(kv_transfer_params=eve) == digests(kv_transfer_params=bob)
    keyed = EngineConfig(tags_in_key=("user",))
    assert digests(keyed, kv_transfer_params=eve) != digests(keyed, kv_transfer_params=bob)


def test_an_adapter_is_known_by_its_content(tmp_path):
    """Seen in vllm#44250, vllm#27211."""
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights * 64)
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')

    def lora(name):
        return digests(lora_request=SimpleNamespace(lora_path=str(tmp_path / name)))

    assert lora("a") == lora("b") != lora("c")
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 16}')
    assert lora("a") != lora("b")
    with pytest.raises(Unkeyable, match="adapter at"):
        lora("missing")


def test_embeddings_and_changing_sessions_have_no_name():
    with pytest.raises(Unkeyable, match="embeddings"):
        digests(prompt_embeds=object())
    request = Request("r", [1], 1)
    request.resumable = True
    with pytest.raises(Unkeyable, match="session"):
        wishes(request, EngineConfig(), {})


@pytest.mark.parametrize(
    "how",
    [
        {"cache_salt": "\ud800"},
        {"kv_transfer_params": {"lmcache.tag.user": "\ud800"}},
        {"kv_transfer_params": {"lmcache.tag.user": 255 * "x"}},
        {"kv_transfer_params": {f"lmcache.tag.{n}": n for n in range(17)}},
        {"kv_transfer_params": {"lmcache.max_offload_tokens": float("nan")}},
        {"kv_transfer_params": {"lmcache.max_offload_tokens": float("inf")}},
        {"kv_transfer_params": "lmcache.skip_save"},
    ],
)
def test_what_a_request_says_wrongly_costs_it_the_cache_and_nobody_else(how):
    """JSON carries all of it; raised into a hook, one such request would end the cache of its engine."""
    with pytest.raises(Unkeyable):
        wishes(Request("r", [1], 1, **how), EngineConfig(), {})


@dataclass(frozen=True)
class Nothing:
    pass


class ByRegion(KeyManager):
    config_type = Nothing

    def __init__(self, config):
        pass

    def fields(self, labels):
        return {"region": labels.get("region", "").encode()}


def test_a_configured_key_manager_separates_requests(make):
    engine = make(plugins={"allow_paths": True}, key_managers=[f"{__name__}:ByRegion"])
    prompt = list(range(300, 320))
    north, south = ({"lmcache.tag.region": name} for name in ("north", "south"))
    for params, expected in ((north, 0), (south, 0), (north, 16)):
        assert served(engine, prompt, kv_transfer_params=params) == expected
        engine.pool.reset()


def test_tiers_that_drop_tokens_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="a page holds a row for every position"):
        key_space(None, (), "", "approx:drop(keep=0.3)+quant")


def test_weights_that_are_not_on_disk_are_refused():
    model = SimpleNamespace(model="/nowhere", revision=None, hf_config=SimpleNamespace())
    with pytest.raises(ConfigError, match="not found"):
        weights_of(model, SimpleNamespace(load_config=None))


def test_another_lmcache_in_the_environment_is_refused(monkeypatch):
    found = [SimpleNamespace(version="0.5.6")]
    monkeypatch.setattr(settings, "distributions", lambda name: found)
    with pytest.raises(ConfigError, match="pip uninstall -y lmcache"):
        settings.refuse_others()


def written(**extra):
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra, engine_id="e", is_kv_consumer=True, is_kv_producer=False
    )
    cache = SimpleNamespace(kv_offloading_size=8.0, kv_offloading_backend="lmcache")
    parallel = SimpleNamespace(world_size=2)
    given = SimpleNamespace(
        kv_transfer_config=transfer, cache_config=cache, parallel_config=parallel
    )
    return settings.read(given, shared=True)


def test_size_of_offloading_is_that_of_a_private_daemon():
    found = written()
    assert not found.shared
    assert found.extra["lmcache.max_local_cpu_size"] == 4.0  # per worker


def test_a_named_daemon_is_used_whatever_the_size():
    found = written(
        **{"lmcache.mp.host": "tcp://cache", "lmcache.mp.port": 7, "lmcache.mp.mq_timeout": 3}
    )
    assert found.shared
    assert found.extra["lmcache.daemon.host"] == "tcp://cache"
    assert found.extra["lmcache.daemon.port"] == 7


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("lmcache.mp.hots", "x", "did you mean lmcache.mp.host"),
        ("lmcache.canary", 2, "a share from 0 to 1"),
        ("skip_last_n_tokens", "many", "a number of tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(key, value, said):
    with pytest.raises(ConfigError, match=said):
        written(**{key: value})
