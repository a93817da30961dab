"""The connector against the interface's real classes: nothing abstract is left, nothing takes other
arguments than vLLM gives, and what vLLM adds is noticed."""

import inspect
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
    supports_hma,
)

from engine_adapters.vllm.connector import UcmConnector
from engine_adapters.vllm.layout import LayoutRefused
from engine_adapters.vllm.settings import SettingsRefused
from metaservice.cli.local.places import free_port
from tests.accept.messages import CONNECTOR_CLASS, CONNECTOR_MODULE
from tests.vllm.config_house import cache_configs, engine_config, llama_specs

pytestmark = pytest.mark.vllm

INHERITED = {
    "bind_connector_metadata",
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_finished_count",
    "get_kv_connector_kv_cache_events",
    "get_loaded_kv_cache_group_ids",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "has_connector_metadata",
    "has_pending_block_frees",
    "has_pending_push_work",
    "register_finished_partial_tail",
    "requires_piecewise_for_cudagraph",
    "reset_capture_state",
    "role",
    "set_host_xfer_buffer_ops",
    "set_xfer_handshake_metadata_pp_aware",
    "supports_divergent_local_hybrid_hits",
}
"""What the interface's own does for us. A name that vLLM adds is in neither list until somebody has thought
about it."""


def public(kind: type) -> dict[str, Any]:
    return {
        name: inspect.getattr_static(kind, name)
        for name in dir(kind)
        if not name.startswith("_") and not hasattr(object, name)
    }


OFFERED = {**public(KVConnectorBase_V1), **public(SupportsHMA)}
OVERRIDDEN = sorted(set(OFFERED) & set(vars(UcmConnector)))


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(UcmConnector)
    assert supports_hma(UcmConnector)


def test_every_method_of_the_interface_was_thought_about() -> None:
    assert set(OVERRIDDEN) | INHERITED == set(OFFERED)
    assert not set(OVERRIDDEN) & INHERITED


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_an_overridden_method_takes_what_vllm_gives(name: str) -> None:
    theirs, ours = OFFERED[name], inspect.getattr_static(UcmConnector, name)
    assert type(theirs) is type(ours)
    if isinstance(theirs, property):
        return
    told = inspect.signature(getattr(theirs, "__func__", theirs)).parameters
    taken = inspect.signature(getattr(ours, "__func__", ours)).parameters
    assert list(taken)[: len(told)] == list(told), "other names, or another order"
    for parameter in told:
        assert taken[parameter].kind is told[parameter].kind
        assert (taken[parameter].default is inspect.Parameter.empty) or (
            told[parameter].default is not inspect.Parameter.empty
        )
    for parameter in list(taken)[len(told) :]:
        assert taken[parameter].default is not inspect.Parameter.empty, "more than vLLM gives"


@pytest.mark.parametrize("name", sorted(base.KVConnectorBase_V1.__abstractmethods__))
def test_an_abstract_method_is_ours(name: str) -> None:
    assert name in vars(UcmConnector)


def transfer(**settings: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=CONNECTOR_CLASS,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        kv_connector_extra_config={
            "url": f"http://127.0.0.1:{free_port()}",
            "group": "g",
            "start_wait_ms": 1,
            **settings,
        },
    )


def configured(**settings: Any) -> VllmConfig:
    config = engine_config()
    config.kv_transfer_config = transfer(**settings)
    return config


def test_vllms_factory_makes_both_sides_and_nobody_waits_for_a_service_that_is_not_there() -> None:
    config = configured()
    scheduler, (worker,) = cache_configs(config, llama_specs())
    for role, caches in ((KVConnectorRole.SCHEDULER, scheduler), (KVConnectorRole.WORKER, worker)):
        made = KVConnectorFactory.create_connector(config, role, caches)
        try:
            assert isinstance(made, UcmConnector)
            assert made.role == role
            assert made.get_transfer_results(set()).finished_recving == set()
            assert not made.requires_kv_delivery
        finally:
            made.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grup": "g"}, "grup"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"load": "lazy"}, "load"),
        ({"url": "nowhere"}, "url"),
    ],
)
def test_a_wrong_setting_ends_the_start_and_is_named(settings: dict[str, Any], words: str) -> None:
    config = configured(**settings)
    scheduler, _ = cache_configs(config, llama_specs())
    with pytest.raises(SettingsRefused, match=words):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, scheduler)


def test_a_layout_that_is_not_handled_ends_the_start() -> None:
    config = configured()
    scheduler, _ = cache_configs(config, llama_specs())
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(LayoutRefused, match="pipeline"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, scheduler)
