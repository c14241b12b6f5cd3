"""The connector that vLLM makes, once in its scheduler and once in every worker.

Nothing raised in here reaches the engine's loop, except where going on would read wrong bytes: a half that fails
stops for good, says so once, and the engine runs as without a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from lmcache_engine_vllm import engine
from lmcache_engine_vllm.halves import Halves

if TYPE_CHECKING:
    from lmcache_engine_vllm.stats import Stats


class LMCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not typed here
    """``{"kv_connector": "LMCacheConnector", "kv_connector_module_path": "lmcache_engine_vllm.connector"}``."""

    shared = False
    """Whether a daemon that others started is meant where none is named."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        with suppress(ImportError):  # vLLM before 0.32 counts no sources
            self._cache_hit_source = import_module(
                "vllm.v1.metrics.cache_hit_source"
            ).CacheHitSource.HOST
        self._announced: Any = None
        self.halves = Halves(
            vllm_config, kv_cache_config, role is KVConnectorRole.SCHEDULER, shared=self.shared
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """What is not kept is a later miss, nothing worse."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Hooks around each layer run in Python."""
        return bool(extra_config.get("use_layerwise") or extra_config.get("lmcache.use_layerwise"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats | None:
        from lmcache_engine_vllm.stats import Stats  # here, and below: not every process counts

        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Any:
        from lmcache_engine_vllm.stats import Exported

        return Exported(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> Stats | None:
        new = self.halves.tally.take()
        return self.build_kv_connector_stats(new) if new else None

    # -- worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.halves.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.halves.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.halves.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.halves.layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.halves.computed(layer_name)

    def wait_for_save(self) -> None:
        self.halves.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.halves.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.halves.missed()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.halves.failures()

    def get_kv_connector_kv_cache_events(self) -> Any:
        said = self.halves.events()
        if not said:
            return None
        stored = import_module("vllm.distributed.kv_events").BlockStored
        events = _events()(num_workers=1)
        events.add_events([stored(**asdict(each)) for each in said])
        return events

    # -- scheduler -------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self.halves.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.halves.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.halves.allocated(request, num_external_tokens, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.halves.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.halves.output(connector_output, getattr(self, "_kv_cache_manager", None))
        events = connector_output.kv_cache_events
        if events and self._announced is not None:
            self._announced.add_events(events.get_all_events())
            self._announced.increment_workers(events.get_number_of_workers())
        elif events:
            self._announced = events

    def take_events(self) -> Iterable[Any]:
        self.halves.ended()  # of all hooks, only this one is called for every output
        events, self._announced = self._announced, None
        found = list(events.aggregate().get_all_events()) if events is not None else []
        return [*engine.departures(*self.halves.gone()), *found]

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.halves.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.halves.finished(request)

    def reset_cache(self) -> bool | None:
        return self.halves.reset()

    def shutdown(self) -> None:
        self.halves.close()


def _events() -> Any:
    """vLLM's own collection, which keeps what all workers have announced."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector"
    return import_module(module).LMCacheKVEvents


class LMCacheMPConnector(LMCacheConnector):
    """The same on a daemon that others started; ``lmcache.mp.host`` and ``lmcache.mp.port`` say where."""

    shared = True


SafeLMCacheConnectorV1 = LMCacheConnector
"""Under the name that articles on LMCache use; there is no other kind."""
