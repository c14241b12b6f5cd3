"""What vLLM's own ``LMCacheConnectorV1`` makes: an object it forwards some of its hooks to.

The others it swallows, ``reset_cache`` above all: after a change of weights it reports success and goes on
finding what the old ones computed. So they are bound on the wrapper itself, which hands us its instance.
"""

from __future__ import annotations

from typing import Any

from lmcache_engine_vllm.halves import Halves
from lmcache_engine_vllm.settings import LOG
from lmcache_engine_vllm.steps import Announced

BOUND = ("reset_cache", "shutdown", "update_connector_output")


class LMCacheConnectorV1Impl(Halves):
    """Args:
    parent: vLLM's wrapper.
    """

    waits = False

    def __init__(self, vllm_config: Any, role: Any, parent: Any) -> None:
        super().__init__(
            vllm_config,
            parent._kv_cache_config,
            getattr(role, "name", "") == "SCHEDULER",
            shared=False,
        )
        self._parent = parent
        for name in BOUND:
            if not hasattr(type(parent), name):
                LOG.warning("this vLLM has no %s to bind; it will not be followed", name)
            setattr(parent, name, getattr(self, name))
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

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        return self.matched(request, num_computed_tokens)[0]

    def update_state_after_alloc(self, request: Any, *given: Any) -> None:
        self.allocated(request, given[-1])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.build(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.finished(request)

    def update_connector_output(self, connector_output: Any) -> None:
        self.output(connector_output, getattr(self._parent, "_kv_cache_manager", None))
        type(self._parent).update_connector_output(self._parent, connector_output)

    def reset_cache(self) -> bool | None:
        return self.reset()

    def shutdown(self) -> None:
        self.close()
