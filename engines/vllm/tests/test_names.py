"""The classes that vLLM makes, under every name it knows them by, on stand-ins for its own modules."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from lmcache_engine_vllm import halves, stock

from engines.vllm.tests.stand_ins import BLOCK, Request, cache_config, config

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Base:
    """As much of ``KVConnectorBase_V1`` as matters here."""

    requires_kv_delivery = property(lambda self: True)

    def __init__(self, vllm_config, role, kv_cache_config):
        self._kv_cache_config = kv_cache_config
        self._kv_cache_manager = None

    def bind_connector_metadata(self, step):
        self.bound = step

    def get_num_new_matched_tokens(self, request, local):
        raise AssertionError("not bound")

    def update_state_after_alloc(self, request, blocks, external):
        raise AssertionError("not bound")

    def get_transfer_results(self, ids):
        return SimpleNamespace(
            finished_recving=self.get_finished(ids)[1] or set(), failed_recving=set()
        )

    def reset_cache(self):
        return None

    def shutdown(self):
        return None

    def update_connector_output(self, output):
        self.told = output


class Role:
    SCHEDULER, WORKER = SimpleNamespace(name="SCHEDULER"), SimpleNamespace(name="WORKER")


@pytest.fixture
def connector(monkeypatch):
    """``lmcache_engine_vllm.connector``, imported on top of the stand-ins."""
    names = BASE.split(".")
    for end in range(1, len(names) + 1):
        monkeypatch.setitem(sys.modules, ".".join(names[:end]), ModuleType(names[end - 1]))
    found = sys.modules[BASE]
    found.KVConnectorBase_V1, found.KVConnectorRole = Base, Role
    found.SupportsHMA = type("SupportsHMA", (), {})
    monkeypatch.delitem(sys.modules, "lmcache_engine_vllm.connector", raising=False)
    yield importlib.import_module("lmcache_engine_vllm.connector")
    sys.modules.pop("lmcache_engine_vllm.connector", None)


class Stock(Base):
    """vLLM's own wrapper: forwards some hooks to what it makes and swallows the others."""

    def __init__(self, given, role, cache):
        super().__init__(given, role, cache)
        self._lmcache_engine = stock.LMCacheConnectorV1Impl(given, role, self)

    def get_finished(self, ids):
        return self._lmcache_engine.get_finished(ids)

    def take_events(self):
        yield "event"


def test_stock_wrapper_forwards_what_it_swallows(daemon):
    made = Stock(config(daemon), Role.SCHEDULER, cache_config(8))
    assert made.reset_cache() is True
    assert made.requires_kv_delivery is False
    assert isinstance(made, Stock)
    evicted = []
    made._kv_cache_manager = SimpleNamespace(evict_blocks=evicted.append)
    output = SimpleNamespace(invalid_block_ids={3}, failed_recving=None)
    made.update_connector_output(output)
    assert evicted == [{3}]
    assert made.told is output
    made.shutdown()
    assert made._lmcache_engine.off


@pytest.mark.parametrize("background", [False, True])
def test_stock_wrapper_lets_a_request_wait_for_its_load(daemon, background):
    given = config(daemon, async_load=background)
    made = Stock(given, Role.SCHEDULER, cache_config(8))
    ours = made._lmcache_engine
    asked = []
    ours.scheduler = SimpleNamespace(
        matched=lambda request, local: 8,
        background=ours.settings.background,
        allocated=lambda *given: asked.append(given),
        close=lambda: None,
    )
    request = Request("r", list(range(3 * BLOCK)), 1)
    assert made.get_num_new_matched_tokens(request, 0) == (8, background)
    table = SimpleNamespace(get_block_ids=lambda: ([4, 5],))
    made.update_state_after_alloc(request, table, 8)
    assert asked == [("r", 8, ([4, 5],))]
    made.shutdown()


def test_stock_wrapper_tells_which_loads_have_failed(daemon):
    made = Stock(config(daemon), Role.WORKER, cache_config(8))
    made._lmcache_engine.worker = SimpleNamespace(
        arrived={"r"}, missed={"r"}, storing=SimpleNamespace(forget=lambda ids: None)
    )
    assert made.get_transfer_results(set()).failed_recving == {"r"}
    made.shutdown()


def test_own_names_promise_nothing_to_a_peer(connector, daemon):
    for kind in (
        connector.LMCacheConnector,
        connector.LMCacheMPConnector,
        connector.SafeLMCacheConnectorV1,
    ):
        made = kind(config(daemon), Role.SCHEDULER, cache_config(8))
        assert made.requires_kv_delivery is False
        request = Request("r", list(range(3 * BLOCK)), 1)
        assert made.get_num_new_matched_tokens(request, 0) == (0, False)
        assert made.request_finished_all_groups(request, ([1],)) == (False, None)
        assert made.request_finished(request, [1]) == (False, None)
        made.shutdown()
    assert connector.LMCacheConnector.requires_piecewise_for_cudagraph({"use_layerwise": True})
    assert not connector.LMCacheConnector.requires_piecewise_for_cudagraph({})


def test_a_hit_that_fails_in_the_background_is_told_as_such(connector, daemon):
    made = connector.LMCacheConnector(config(daemon), Role.WORKER, cache_config(8))
    made.halves.worker = SimpleNamespace(
        arrived={"r"}, missed={"r"}, storing=SimpleNamespace(forget=lambda ids: None)
    )
    results = made.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
    assert made.get_transfer_results(set()).failed_recving == set()
    made.shutdown()


def test_every_output_ends_a_step(connector, daemon):
    stock, own = Stock, connector.LMCacheConnector
    for kind, events in ((stock, ["event"]), (own, [])):
        made, ends = kind(config(daemon), Role.SCHEDULER, cache_config(8)), []
        ours = made._lmcache_engine if kind is stock else made.halves
        ours.pace = SimpleNamespace(end=lambda ends=ends: ends.append(1))
        assert [*made.take_events()] == events and ends == [1]
        made.shutdown()
        assert [*made.take_events()] == events and ends == [1]


def test_what_has_left_the_cache_is_told_under_every_name(connector, daemon, monkeypatch):
    """Seen in LMCache#5076."""
    kinds = ModuleType("kv_events")
    kinds.BlockRemoved = lambda block_hashes, medium: (block_hashes, medium)
    kinds.AllBlocksCleared = lambda: "cleared"
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_events", kinds)
    for kind, stored in ((Stock, ["event"]), (connector.LMCacheConnector, [])):
        made = kind(config(daemon), Role.SCHEDULER, cache_config(8))
        ours = made._lmcache_engine if kind is Stock else made.halves
        said = [([b"x"], True), ([b"y"], False), ([], False)]
        ours.leaving = SimpleNamespace(taken=lambda said=said: said.pop(0), close=lambda: None)
        assert [*made.take_events()] == ["cleared", ([b"x"], "CPU"), *stored]
        assert [*made.take_events()] == [([b"y"], "CPU"), *stored]
        assert [*made.take_events()] == stored
        made.shutdown()


def test_a_worker_that_has_no_cache_refuses_promises(connector, daemon):
    """Seen in LMCache#853."""
    made = halves.Halves(config(daemon), cache_config(8), False, shared=False)
    made.begin(halves.Step())
    with pytest.raises(RuntimeError, match="promised"):
        made.begin(halves.Step(1, [None]))
    made.close()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("lmcache.integration.vllm.vllm_v1_adapter", ["LMCacheConnectorV1Impl"]),
        ("lmcache.integration.vllm.lmcache_mp_connector", ["LMCacheMPConnector"]),
        (
            "lmcache.integration.vllm.lmcache_connector_v1",
            ["LMCacheConnectorV1Dynamic", "SafeLMCacheConnectorV1"],
        ),
        (
            "lmcache.integration.vllm.vllm_multi_process_adapter",
            [
                "LMCacheMPSchedulerAdapter",
                "LMCacheMPWorkerAdapter",
                "LoadStoreOp",
                "ParallelStrategy",
            ],
        ),
        ("lmcache.integration.vllm.utils", ["mla_enabled"]),
        ("lmcache.utils", ["init_logger"]),
        (
            "lmcache.v1.multiprocess.custom_types",
            ["RequestAllocationRecord", "BlockAllocationRecord"],
        ),
    ],
)
def test_names_that_vllm_imports_are_there(connector, monkeypatch, module, names):
    """Seen in LMCache#1003, vllm#33440.

    Seen in vllm#26452.
    """
    monkeypatch.delitem(sys.modules, module, raising=False)
    found = importlib.import_module(module)
    for name in names:
        assert hasattr(found, name)
    monkeypatch.delitem(sys.modules, module, raising=False)
