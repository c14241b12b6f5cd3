"""Both halves of a connector for whatever class vLLM has made: what is common, and the boundary of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from lmcache_core import __version__
from lmcache_core.config import LoadFailure
from lmcache_core.engine import Cache
from lmcache_core.spi.errors import ConfigError
from lmcache_core.wire.client import DaemonClient
from lmcache_engine_vllm import engine, settings
from lmcache_engine_vllm.capacity import capacity
from lmcache_engine_vllm.groups import chunk_of, parts
from lmcache_engine_vllm.identity import key_space
from lmcache_engine_vllm.layout import keep
from lmcache_engine_vllm.leaving import Leaving
from lmcache_engine_vllm.pace import Pace
from lmcache_engine_vllm.scheduler import Scheduler
from lmcache_engine_vllm.settings import LOG
from lmcache_engine_vllm.steps import Announced, Step
from lmcache_engine_vllm.tally import Tally
from lmcache_engine_vllm.worker import Worker

T = TypeVar("T")
U = TypeVar("U")


class Halves:
    """See the module.

    Raises:
        ConfigError: the cache cannot work as it is configured; the engine does not start.
    """

    def __init__(self, config: Any, cache_config: Any, scheduling: bool, *, shared: bool) -> None:
        self.off = False
        self.config = config
        self.cache_config = cache_config
        self.settings = settings.read(config, shared=shared)
        self.cache: Cache
        self.client: DaemonClient
        self.cache, self.client = settings.open_cache(self.settings)
        if self.cache.config.engine.layerwise:  # said where all engines are told
            self.settings = replace(self.settings, layerwise=True)
        self.tally = Tally(self.cache.metrics)
        self.scheduler: Scheduler | None = None
        self.worker: Worker | None = None
        self.leaving: Leaving | None = None
        self.pace: Pace | None = None
        try:
            engine.refuse(config)
            self.parts = parts(cache_config)
            self.chunk = chunk_of(self.parts, self.cache.config.engine.chunk_size)
        except ConfigError as error:
            LOG.warning("this engine runs without a cache: %s", error)
            self.off = True
            return
        if scheduling:
            self._schedule()

    def _schedule(self) -> None:
        options, transfer = self.cache.config.engine, self.config.kv_transfer_config
        if self.settings.canary and self.cache.fidelity != "exact":
            self.settings = replace(self.settings, canary=0.0)
            LOG.warning(
                "lmcache.canary has no effect: what lossy tiers give back is never the same"
            )
        self.scheduler = Scheduler(
            self.client, self.settings, options, self.parts, self.chunk,
            self.config.parallel_config.world_size, managers=self.cache.managers(), tally=self.tally,
        )  # fmt: skip
        self.pace = Pace(
            self.client.report_prefill,
            self.chunk,
            overlap=self.config.parallel_config.pipeline_parallel_size > 1,
        )
        if self.settings.events:
            names = self.scheduler.names
            self.leaving = Leaving(self.client, lambda: names.space)
        where = "shared" if self.cache.config.daemon.address else "private"
        LOG.info(
            "LMCache %s for vLLM %s: %s daemon at %s, chunks of %d tokens, role %s",
            __version__, engine.release(), where, self.client.address, self.chunk, transfer.kv_role,
        )  # fmt: skip
        if self.chunk != options.chunk_size:
            LOG.info(
                "chunk size %d is rounded up to %d, whole blocks of this engine",
                options.chunk_size, self.chunk,
            )  # fmt: skip
        if options.save_partial:
            LOG.warning("save_partial has no effect: of vLLM's blocks only full chunks are kept")
        if self.settings.canary and self.scheduler.whole:
            LOG.warning("lmcache.canary has no effect: hits of windows and states are not compared")
        if self.cache.fidelity != "exact":
            LOG.warning(
                "this cache has lossy tiers (%s): what they give back also enters vLLM's own prefix cache",
                self.cache.fidelity,
            )
        policy = getattr(transfer, "kv_load_failure_policy", None)
        if options.load_failure_policy is LoadFailure.RECOMPUTE and policy == "fail":
            transfer.kv_load_failure_policy = "recompute"
            LOG.info("kv_load_failure_policy is set to recompute: a lost cache fails no request")

    def guarded(self, without: U, call: Callable[..., T], *given: Any) -> T | U:
        """Call, and answer as ``without`` a cache once an error of our own has switched this half off."""
        if self.off:
            return without
        try:
            return call(*given)
        except Exception:  # noqa: BLE001  boundary: the engine's loop must not end for a cache
            LOG.exception("the cache is off for this engine: this should not have happened")
            self.off = True
            return without

    # -- worker ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, tensors: dict[str, Any]) -> None:
        """Learn the engine's memory, and tell the daemon.

        Raises:
            ConfigError: another rank of this engine sees another model.
        """
        if self.off:
            return
        try:
            ranks = engine.ranks(self.config, self.cache_config)
            backends = engine.backends(self.config, list(tensors))
            kept = [
                keep(
                    part, tensors, backends, ranks, chunk=self.chunk, number=number,
                    blocks=self.cache_config.num_blocks, release=engine.release(),
                )
                for number, part in enumerate(self.parts)
            ]  # fmt: skip
            sharding = f"tp={ranks.tensor},pp={ranks.pipeline},replicas={ranks.replicas}"
            space = key_space(self.config, [k.group for k in kept], sharding, self.cache.fidelity)
            self.cache.admit(space.weights.hex())
        except ConfigError as error:
            LOG.warning("this engine runs without a cache: %s", error)
            self.off = True
            return
        device = str(next(iter(tensors.values())).device.type)
        connector = self.cache.connector(device)
        connector.bind(tensors, [spec for each in kept for spec in each.specs])
        self.worker = Worker(
            self.client, self.settings, connector, kept, space, ranks,
            verify=self.cache.config.engine.verify_hot, tally=self.tally,
        )  # fmt: skip
        if ranks.rank == 0:
            nbytes = sum(each.room + each.form.nbytes for each in kept)
            LOG.info("%s", capacity(self.client, nbytes, self.chunk))

    def begin(self, step: Step) -> None:
        """Take the orders of a step; they must be obeyed or reported lost even when we are off."""
        if self.worker is None:
            if step.loads:
                raise RuntimeError("blocks were promised that no worker of this cache can fill")
            return
        self.worker.step = step
        self.guarded(None, self.worker.begin, step)

    def load(self) -> None:
        """Fill blocks; what cannot be filled is reported lost."""
        if self.worker is not None:
            self.guarded(None, self.worker.load)
            if self.off:
                self.worker.fail()

    def layer(self, name: str) -> None:
        """A layer is about to be read."""
        if self.worker is not None:
            self.guarded(None, self.worker.layer, name)

    def computed(self, name: str) -> None:
        """A layer is computed."""
        if self.worker is not None:
            self.guarded(None, self.worker.computed, name)

    def save(self) -> None:
        """Keep what is computed; loads that were begun end here."""
        if self.worker is not None:
            self.guarded(None, self.worker.save)
            if self.off:
                self.worker.fail()

    def missed(self) -> set[str]:
        """Of the requests last told as finished, those whose load has failed as a whole."""
        if self.worker is None:
            return set()
        missed, self.worker.missed = self.worker.missed, set()
        return missed

    def get_finished(self, ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose transfers in the background have ended."""
        if self.worker is None:
            return None, None
        self.worker.storing.forget(ids)
        arrived, self.worker.arrived = self.worker.arrived, set()
        return None, arrived or None

    def failures(self) -> set[int]:
        """Blocks that were promised and are not filled."""
        return self.worker.taken() if self.worker is not None else set()

    def events(self) -> list[Announced]:
        """Chunks that have become visible since the last call."""
        if self.worker is None:
            return []
        events, self.worker.storing.events = self.worker.storing.events, []
        return events

    # -- scheduler -------------------------------------------------------------------------------------------

    def gone(self) -> tuple[list[bytes], bool]:
        """Chunks that the cache has no more since the last call; see ``Leaving.taken``."""
        nothing: tuple[list[bytes], bool] = ([], False)
        return nothing if self.leaving is None else self.guarded(nothing, self.leaving.taken)

    def arrived(self, request: Any) -> None:
        """A request has come."""
        if self.scheduler is not None:
            self.guarded(None, self.scheduler.arrived, request)

    def matched(self, request: Any, local: int) -> tuple[int | None, bool]:
        """What is offered to a request, and whether it waits for it."""
        if self.scheduler is None:
            return 0, False
        offered = self.guarded(0, self.scheduler.matched, request, local)
        return offered, bool(offered) and self.scheduler.background

    def allocated(self, request: Any, external: int, blocks: Any = None) -> None:
        """The engine has taken so much of the offer."""
        if self.scheduler is not None:
            tables = blocks.get_block_ids() if blocks is not None and external else None
            self.scheduler.allocated(request.request_id, external, tables)

    def build(self, out: Any) -> Step:
        """The orders of a step. An error in here must not lose what was promised."""
        if self.scheduler is None:
            return Step()
        step = self.guarded(None, self.scheduler.build, out)
        if step is None:
            return self.scheduler.lost(out)
        if self.pace is not None:
            sizes = out.num_scheduled_tokens.values()
            self.guarded(None, self.pace.begin, sizes, bool(step.loads))
        return step

    def ended(self) -> None:
        """The output of a step is there; once per step, in their order."""
        if self.pace is not None:
            self.guarded(None, self.pace.end)

    def output(self, output: Any, manager: Any) -> None:
        """What the workers report after a step. Nobody may find blocks in vLLM's prefix cache that hold nothing good."""
        failed = getattr(output, "invalid_block_ids", None)
        if failed and manager is not None and hasattr(manager, "evict_blocks"):
            manager.evict_blocks(failed)
        missed = getattr(output, "failed_recving", None) or ()
        if self.scheduler is not None:
            self.scheduler.bypass(missed)
            self.scheduler.trust.judge(bool(failed or missed))
        if self.pace is not None:
            self.pace.heard()

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """The request is over; its blocks are free."""
        if self.scheduler is not None:
            self.guarded(None, self.scheduler.finished, request.request_id)
        return False, None

    def reset(self) -> bool:
        """Forget what was kept under the weights so far; a half that is off finds nothing old anyway."""
        if self.scheduler is not None:
            self.guarded(None, self.scheduler.reset)
        return True

    def close(self) -> None:
        """Part from the daemon; idempotent."""
        self.off = True
        if self.leaving is not None:
            self.leaving.close()
        if self.scheduler is not None:
            self.scheduler.close()
        self.cache.close()
