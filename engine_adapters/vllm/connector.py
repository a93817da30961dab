"""What vLLM loads: its connector interface over our two sides.

    --kv-transfer-config '{"kv_connector": "UcmConnector",
                           "kv_connector_module_path": "engine_adapters.vllm.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"url": "http://...", "group": "..."}}'

vLLM makes one with the role of the scheduler, and one in each worker. A model whose KV cache this connector
does not handle is refused here, at the engine's start, with the reason.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import ForwardContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.stats import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from dataplane.staging import TorchPages
from engine_adapters.namespace import Namespace
from engine_adapters.vllm.broker import Broker
from engine_adapters.vllm.describe import agreed, describe, hash_holds
from engine_adapters.vllm.endpoints import presence
from engine_adapters.vllm.events import Teller
from engine_adapters.vllm.layout import Layout, layout_of
from engine_adapters.vllm.mover import Mover
from engine_adapters.vllm.ordering import Shape, Step
from engine_adapters.vllm.orders import StepOrders, WorkerReport
from engine_adapters.vllm.pool import open_pool
from engine_adapters.vllm.prom import UcmPromMetrics
from engine_adapters.vllm.scheduler import SchedulerSide
from engine_adapters.vllm.settings import Settings, settings_of
from engine_adapters.vllm.spans import open_spans
from engine_adapters.vllm.stats import UcmStats
from engine_adapters.vllm.weights import Weights
from engine_adapters.vllm.worker import RankParts, WorkerSide

log = logging.getLogger("ucm.vllm")

_STEPS_MAX = 1_024
"""Step times kept between two readings of the statistics."""
_SOURCES = {"shm": CacheHitSource.HOST, "posix": CacheHitSource.DISK}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler's orders on their way to the workers."""

    orders: StepOrders


@dataclass
class Description(KVConnectorHandshakeMetadata):
    """What a rank says of its cache, once at the engine's start."""

    namespace: Namespace


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """The workers' reports on their way to the scheduler."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Two ranks' reports in one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.plus(other.report))


class UcmConnector(KVConnectorBase_V1, SupportsHMA):
    """One of an engine's: the scheduler's, or a worker's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises SettingsRefused, LayoutRefused, or RuntimeError when the service refuses the engine."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings_of(self._kv_transfer_config.kv_connector_extra_config or {})
        self._layout = layout_of(vllm_config, kv_cache_config)
        if self._settings.load == "sync" and (reason := only_async(vllm_config, self._layout)):
            log.warning("load: sync is not safe here, so blocks are loaded asynchronously: %s", reason)
            self._settings = replace(self._settings, load="async")
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._begin_scheduler(vllm_config, kv_cache_config)

    def _begin_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        layout = self._layout
        self._settings = replace(self._settings, engine=engine_name(self._settings, vllm_config))
        self._weights = Weights(self._settings)
        self._namespace = describe(
            vllm_config, kv_cache_config, self._settings, weight_version=self._weights.version()
        )
        self._broker = Broker(
            self._settings, self._namespace, layout.parts, presence(self._settings, vllm_config)
        )
        self._hash_checked = False
        events = vllm_config.kv_events_config
        told = bool(events and events.enable_kv_cache_events)
        self._pool = open_pool(self._settings, layout.block_size_tokens, self._broker, told=told)
        self._teller = Teller(layout.block_size_tokens) if told and self._pool is None else None
        self._spans = open_spans(self._settings)
        self._side = SchedulerSide(
            self._settings,
            Shape(
                layout.block_size_tokens,
                tuple(group.kind == "window" for group in layout.groups),
                layout.tp,
            ),
            self._broker,
            self._spans,
            events=self._teller is not None,
        )
        self._step_ns = 0
        self._steps_us: list[int] = []

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """All ranks have described their caches: only now is it known what the engine's blocks are, and it
        joins the service. Called once, before the first request."""
        told = {}
        for rank, one in metadata.items():
            assert isinstance(one, Description)
            told[rank] = one.namespace
        self._namespace = agreed(self._namespace, told)
        self._broker.renew_namespace(self._namespace)
        self._broker.start()
        if self._pool is not None:
            self._pool.start()
        self._broker.wait_ready(self._settings.start_wait_ms)
        if self._broker.refused is not None:
            self.shutdown()
            raise RuntimeError(f"the metadata service refuses this engine: {self._broker.refused}")

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not saved is a miss later."""
        return False

    # ------------------------------------------------------------------------------ the scheduler's side

    @property
    def side(self) -> SchedulerSide:
        """The scheduler's side; only a connector with the scheduler's role has it."""
        assert self._side is not None
        return self._side

    def on_new_request(self, request: Request) -> None:
        """See SchedulerSide.new_request."""
        if not self._hash_checked:
            self._check_hash()
        began = time.perf_counter_ns()
        self.side.new_request(request)
        self._step_ns += time.perf_counter_ns() - began

    def _check_hash(self) -> None:
        """With the first request vLLM's hash is set up: is it the one that was told to the service?"""
        self._hash_checked = True
        if not hash_holds(self._namespace):
            raise RuntimeError(
                "vLLM names its blocks otherwise than this engine told the service: set PYTHONHASHSEED, or "
                "--prefix-caching-hash-algo sha256"
            )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerSide.matched."""
        began = time.perf_counter_ns()
        answer = self.side.matched(request, num_computed_tokens)
        self._step_ns += time.perf_counter_ns() - began
        return answer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See SchedulerSide.allocated."""
        began = time.perf_counter_ns()
        ids = blocks.get_block_ids() if num_external_tokens else ()
        self.side.allocated(request, ids, num_external_tokens)
        self._step_ns += time.perf_counter_ns() - began

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """See SchedulerSide.build. Ends what the scheduler's thread spends here in a step."""
        began = time.perf_counter_ns()
        state = scheduler_output.kv_connector_block_state
        assert state is not None
        step = Step(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.preempted_req_ids or (),
            state.resolve_block_ids,
        )
        metadata = StepMetadata(self.side.build(step))
        self._step_ns += time.perf_counter_ns() - began
        if len(self._steps_us) < _STEPS_MAX:
            self._steps_us.append(self._step_ns // 1_000)
        self._step_ns = 0
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See SchedulerSide.report."""
        began = time.perf_counter_ns()
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            assert isinstance(metadata, WorkerMetadata)
            self.side.report(metadata.report)
        if connector_output.invalid_block_ids and self._settings.load == "sync":
            self._forget_locally(connector_output.invalid_block_ids)
        self._step_ns += time.perf_counter_ns() - began

    def _forget_locally(self, invalid: set[int]) -> None:
        """A synchronous load failed. vLLM has these blocks, and those computed from them in this step, in its
        own prefix cache already, and leaves them there for those who will compute them again; a request that
        is aborted or preempted before it does would leave garbage behind."""
        assert self._kv_cache_manager is not None
        self._kv_cache_manager.evict_blocks(self.side.spoiled(invalid))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished."""
        began = time.perf_counter_ns()
        hold = self.side.finished(request)
        self._step_ns += time.perf_counter_ns() - began
        return hold, None

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """All of a load under the tier of its first block."""
        if not num_external_tokens:
            return {}
        source = _SOURCES.get(self.side.tier(request.request_id), CacheHitSource.EXTERNAL_UNSPECIFIED)
        return {source: num_external_tokens}

    def take_events(self) -> Iterable[KVCacheEvent]:
        """For those who follow this engine's KV events: what the service announces, or else what this engine
        stored and serves."""
        if self._pool is not None:
            assert self._kv_cache_manager is not None
            return self._pool.take(self._kv_cache_manager.block_pool)
        if self._teller is None:
            return ()
        outcomes = self.side.outcomes
        return self._teller.events(outcomes.take_published(), outcomes.take_gone())

    def reset_cache(self) -> bool:
        """vLLM drops its caches, as after an update of the weights: nothing stored before is used again. It
        asks this also when it could not drop its own, since requests still had blocks: what they and those
        who share them compute would then be stored as the new weights'."""
        assert self._kv_cache_manager is not None
        if not emptied(self._kv_cache_manager.block_pool):
            log.error(
                "the caches cannot be reset while requests have blocks: this engine neither loads nor saves "
                "until they are; pause it, or reset with reset_running_requests"
            )
            self.side.suspend()
            return False
        version = self._weights.renewed()
        self._namespace = replace(self._namespace, weight_version=version)
        self._broker.renew_namespace(self._namespace)
        self.side.reset()
        if self._teller is not None:
            self._teller.forget()
        if self._pool is not None:
            self._pool.renew()
        return True

    # -------------------------------------------------------------------------------- the workers' side

    @property
    def worker(self) -> WorkerSide:
        """The worker's side; there once the KV caches are registered."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV memory: from here on pages can be moved."""
        rank = get_tensor_model_parallel_rank()
        layout = self._layout
        pages = TorchPages(kv_caches, layout.layer_groups, self._kv_cache_config.num_blocks)
        parts = RankParts(
            rank,
            layout.tp,
            layout.parts_of(rank),
            tuple(group.kind == "window" for group in layout.groups),
        )
        self._worker = WorkerSide(self._settings, parts, pages, Mover(self._settings))

    def get_handshake_metadata(self) -> Description:
        """What this rank knows of its cache; the scheduler's process does not see the layers."""
        return Description(describe(self._vllm_config, self._kv_cache_config, self._settings))

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.orders

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward overwrites anything: see WorkerSide.preempted."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.preempted(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """See WorkerSide.start_loads."""
        if self._worker is not None:
            self._worker.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pages are loaded whole, before the forward or beside it."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are saved whole, after the forward."""

    def wait_for_save(self) -> None:
        """After the forward: hands over what to save, and waits for none of it."""
        if self._worker is not None:
            self._worker.submit_saves(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The older form of `get_transfer_results`."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads and saves that ended; each is told once."""
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.take_results(finished_req_ids)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The engine's blocks that were not loaded; vLLM computes them, or fails the request, as its policy
        says."""
        return set() if self._worker is None else self._worker.load_errors()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """What this rank has to tell the scheduler's side."""
        report = None if self._worker is None else self._worker.report()
        return None if report is None else WorkerMetadata(report)

    # --------------------------------------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call, on this side."""
        if self._side is not None:
            steps_us, self._steps_us = self._steps_us, []
            counts: dict[str, Any] = {**self._broker.counters(), **self._side.counters()}
            if self._pool is not None:
                counts.update(self._pool.counters())
            if steps_us:
                counts["step_us"] = steps_us
        elif self._worker is not None:
            counts = self._worker.counters()
        else:
            return None
        return UcmStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Statistics from their data, in the process that logs them."""
        return UcmStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Our metrics in vLLM's own /metrics."""
        return UcmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Let go of everything; bounded."""
        if self._side is not None:
            if self._pool is not None:
                self._pool.close()
            self._broker.close()
            self._spans.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


def emptied(pool: BlockPool) -> bool:
    """Whether vLLM could reset its own prefix cache: nobody has a block but the null block's keeper."""
    return bool(pool.num_gpu_blocks - pool.get_num_free_blocks() == 1)


def only_async(vllm_config: VllmConfig, layout: Layout) -> str:
    """Why blocks cannot be loaded synchronously here; empty when they can.

    vLLM 0.32 notices a failed synchronous load after the step that used it. With a next step already under
    way, or with prompts that are computed in slices, it then delivers tokens that were computed from garbage.
    """
    scheduler = vllm_config.scheduler_config
    if len(layout.groups) > 1 or any(group.kind == "window" for group in layout.groups):
        return "the model has several KV cache groups, or a sliding window"
    if vllm_config.max_concurrent_batches > 1:
        return "steps overlap (async_scheduling)"
    if scheduler.long_prefill_token_threshold > 0:
        return "long prompts are computed in slices (long_prefill_token_threshold)"
    return ""


def engine_name(settings: Settings, vllm_config: VllmConfig) -> str:
    """The engine's id. Without a setting it is new with each start: what wrote under the old one then ends by
    its deadline, and two engines never take each other's name."""
    name = settings.engine or f"vllm-{vllm_config.kv_transfer_config.engine_id}"
    parallel = vllm_config.parallel_config
    if settings.engine and parallel.data_parallel_size > 1:
        name = f"{name}-dp{parallel.data_parallel_rank}"
    return name
