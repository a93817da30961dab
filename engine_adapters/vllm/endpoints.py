"""Where vLLM publishes its own KV cache events, as others can reach it."""

import logging
import re
from typing import Any

from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.utils.network_utils import get_ip

from engine_adapters.vllm.publishing import Presence, presence_of
from engine_adapters.vllm.settings import Settings

log = logging.getLogger("ucm.vllm")

_EVERY_ADDRESS = re.compile(r"tcp://(\*|\[::\]|::)(?=:\d+$)")


def presence(settings: Settings, vllm_config: Any) -> Presence:
    """This engine as it registers with the service."""
    rank = vllm_config.parallel_config.data_parallel_index
    events, replay = event_endpoints(settings, vllm_config.kv_events_config, rank)
    return presence_of(
        settings,
        model=str(vllm_config.model_config.served_model_name),
        rank=rank,
        events=events,
        replay=replay,
    )


def event_endpoints(settings: Settings, config: Any, rank: int) -> tuple[str, str]:
    """Where the events of data-parallel rank `rank` can be subscribed to and asked for again; empty where
    they cannot."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return "", ""
    if not ZmqEventPublisher._is_bind_endpoint(config.endpoint):
        log.info("vLLM's KV cache events go to %s: the service does not follow them", config.endpoint)
        return "", ""
    events = reachable(settings, config.endpoint, rank)
    return events, reachable(settings, config.replay_endpoint, rank) if events else ""


def reachable(settings: Settings, endpoint: str | None, rank: int) -> str:
    """What others connect to where vLLM binds `endpoint`; empty when nobody can know or reach it."""
    if not endpoint or endpoint.startswith("inproc://"):
        return ""
    if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
        log.warning("%s gets another port with each start: the service does not follow it", endpoint)
        return ""
    host = settings.address.rpartition(":")[0] or get_ip()
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    bound = ZmqEventPublisher.offset_endpoint_port(endpoint, rank) or ""
    return _EVERY_ADDRESS.sub(lambda _: f"tcp://{host}", bound)
