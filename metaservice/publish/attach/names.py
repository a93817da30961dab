"""The names that consumers know engines and groups by."""

import xxhash

from metaservice.publish.feed import EngineUp, InstanceUp

_QUOTED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
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


def metric(name: str, **labels: str) -> str:
    """A metric's name with its labels, as the publisher tells it."""
    quoted = (f'{label}="{value.translate(_QUOTED)}"' for label, value in labels.items())
    return f"{name}{{{','.join(quoted)}}}"
