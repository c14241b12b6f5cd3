"""What vLLM's own ``LMCacheConnectorV1`` makes: an object it forwards some of its hooks to.

The others it swallows, ``reset_cache`` above all: after a change of weights it reports success and goes on
finding what the old ones computed. So they are bound on the wrapper itself, which hands us its instance; so are
those that let a request wait for its load. Counters cannot be: vLLM's exporter asks the class, in another process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmcache_engine_vllm import engine
from lmcache_engine_vllm.halves import Halves
from lmcache_engine_vllm.settings import LOG
from lmcache_engine_vllm.steps import Announced

BOUND = {
    "get_num_new_matched_tokens": "matched",
    "get_transfer_results": "transfer_results",
    "on_new_request": "arrived",
    "reset_cache": "reset",
    "shutdown": "close",
    "take_events": "after_step",
    "update_connector_output": "connector_output",
    "update_state_after_alloc": "granted",
}
"""Hooks of the wrapper, and what answers them here."""


class LMCacheConnectorV1Impl(Halves):
    """Args:
    parent: vLLM's wrapper.
    """

    def __init__(self, vllm_config: Any, role: Any, parent: Any) -> None:
        super().__init__(
            vllm_config,
            parent._kv_cache_config,
            getattr(role, "name", "") == "SCHEDULER",
            shared=False,
        )
        self._parent = parent
        for name, ours in BOUND.items():
            if not hasattr(type(parent), name):
                LOG.warning("this vLLM has no %s to bind; it will not be followed", name)
            setattr(parent, name, getattr(self, ours))
        kind = type(parent)
        if getattr(parent, "requires_kv_delivery", False):
            # A property: only a class of its own can say that a dropped save is a later miss, nothing worse.
            parent.__class__ = type(kind.__name__, (kind,), {"requires_kv_delivery": False})

    def bind_connector_metadata(self, step: Any) -> None:
        self.begin(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.computed(layer_name)

    def wait_for_save(self) -> None:
        self.save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.failures()

    def get_kv_events(self) -> list[Announced]:
        return self.events()

    def granted(self, request: Any, blocks: Any, external: int) -> None:
        self.allocated(request, external, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.build(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.finished(request)

    def transfer_results(self, finished: set[str]) -> Any:
        results = type(self._parent).get_transfer_results(self._parent, finished)
        results.failed_recving |= self.missed()
        return results

    def connector_output(self, connector_output: Any) -> None:
        self.output(connector_output, getattr(self._parent, "_kv_cache_manager", None))
        type(self._parent).update_connector_output(self._parent, connector_output)

    def after_step(self) -> Iterable[Any]:
        self.ended()
        stored: Iterable[Any] = type(self._parent).take_events(self._parent)
        return [*engine.departures(*self.gone()), *stored]
