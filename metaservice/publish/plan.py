"""Which streams there are: they follow from the engines that are alive and the instances they use."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from .channel import ChannelPlan
from .emitters.port import Stream
from .feed import EngineUp, InstanceUp

POOL: Final = "pool"
"""What stands in a topic for everybody's storage."""


def plan(
    engines: Iterable[EngineUp], instances: Mapping[str, InstanceUp], channels_max: int
) -> dict[int, ChannelPlan]:
    """Channel -> what it is for. An engine whose instance is not announced (yet) has no streams, and numbers
    from `channels_max` on are not served."""
    adapters: dict[str, list[InstanceUp]] = {}
    for instance in instances.values():
        if instance.base and instance.base != instance.instance:
            adapters.setdefault(instance.base, []).append(instance)
    plans: dict[int, ChannelPlan] = {}
    for engine in engines:
        base = instances.get(engine.instance)
        if base is None:
            continue
        family = [base, *sorted(adapters.get(engine.instance, ()), key=lambda one: one.instance)]
        for channel, node in ((engine.pool_channel, ""), (engine.local_channel, engine.node)):
            if 0 <= channel < channels_max and channel not in plans:
                streams = tuple(_stream(channel, one, base.model, node, engine.rank) for one in family)
                plans[channel] = ChannelPlan(engine.shard, base.tenant, streams)
    return plans


def numbers(engines: Iterable[EngineUp]) -> Iterator[int]:
    """The channels that these engines have."""
    for engine in engines:
        yield from (one for one in (engine.pool_channel, engine.local_channel) if one >= 0)


def _stream(channel: int, instance: InstanceUp, model: str, node: str, rank: int) -> Stream:
    return Stream(
        channel=channel,
        instance=instance.instance,
        model=model,
        node=node,
        rank=rank,
        block_size_tokens=instance.block_size_tokens,
        key_length=instance.key_length,
        hash_of=instance.hash_of,
        lora=instance.lora,
        topic=topic(node or POOL, model),
    )


def topic(owner: str, model: str) -> bytes:
    """`kv@owner@model`. Consumers part it at the `@`, so neither may have one."""
    return f"kv@{owner.replace('@', '_')}@{model.replace('@', '_')}".encode()
