"""The names that consumers know engines and groups by."""

import xxhash

from metaservice.publish.feed import EngineUp, InstanceUp

DEFAULT_GROUP = "default"
"""What Dynamo's indexer calls the routing group of those who name none."""


def worker_number(engine: EngineUp) -> int:
    """The engine's number in Dynamo: the one it registered with, else one made from its id, below 2**53 so
    that every reader of JSON keeps it whole."""
    return engine.worker_id or xxhash.xxh3_64_intdigest(engine.engine.encode()) >> 11


def group_name(instance: InstanceUp) -> str:
    """The routing group at Dynamo's indexer."""
    group = instance.routing_group
    return DEFAULT_GROUP if group in ("", instance.model) else group
