"""Registering an instance, and saying which field is wrong when the service will not have it.

An instance may be registered with how routers are told of its blocks (its publication). One that has none yet
is given it; one that has another keeps it, for an operator may have said so.

A refusal is final: an engine whose blocks are not what its instance's name says must neither read nor write.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from metaservice.client import ClientError
from metaservice.client.errors import PROTOCOL

from .namespace import Namespace, Part, our_name

UNPROCESSABLE = 422
UNKNOWN = "instance_unknown"
FINAL = frozenset({"hash_space_mixed"})
"""Refusals of other kinds that asking again does not change."""


class Registered(msgspec.Struct, frozen=True):
    """The service knows the instance, and all fields agree."""

    instance: str


class Refused(msgspec.Struct, frozen=True):
    """This engine is not what the instance is: `fields` differ, or cannot be. Asking again is no use."""

    instance: str
    fields: tuple[str, ...]
    reason: str


class Away(msgspec.Struct, frozen=True):
    """The service could not be asked, or may answer otherwise later, perhaps after an operator did something
    (made the group): ask again. `failure` is a word of `metaservice.client.errors` or a problem code."""

    instance: str
    failure: str
    detail: str = ""


class Registrar(Protocol):
    """What is needed of a client."""

    def put_instance(
        self,
        id: str,
        group: str,
        fingerprint: Mapping[str, Any],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
        publication: Mapping[str, Any] | None = None,
    ) -> Any: ...

    def get_json(self, path: str) -> Any: ...


def register(
    client: Registrar,
    namespace: Namespace,
    *,
    group: str,
    prefix: str,
    parts: Sequence[Part],
    adapter: str = "",
    publication: Mapping[str, Any] | None = None,
) -> Registered | Refused | Away:
    """Register the instance of `namespace` (and of the adapter with this digest) in a group, to be announced
    as `publication` says (None: as it is).

    Blocks for two calls to the service; raises nothing but ValueError for an impossible `prefix`.
    """
    instance = namespace.instance_id(prefix, adapter)
    asked = namespace.fingerprint(parts, adapter)
    try:
        known = _known(client, instance)
        if known is None:
            client.put_instance(instance, group, asked, publication=publication)
            return Registered(instance)
        if differs := _differences(known["fingerprint"], asked):
            return _mismatch(instance, differs)
        if known["group"] != group:
            return Away(instance, "group_mismatch", f"it is in group {known['group']!r}, not {group!r}")
        if known["retiring"]:
            return Away(instance, "instance_retiring", "it is being removed")
        if publication is not None and known["publication"] is None:
            # with the quota that an operator gave it: what is not said is taken away
            quota = known["quota"]
            client.put_instance(
                instance,
                group,
                asked,
                bytes_max=quota["bytes"],
                blocks_max=quota["blocks"],
                publication=publication,
            )
        return Registered(instance)
    except ClientError as error:
        if error.status != UNPROCESSABLE and error.code not in FINAL:
            return Away(instance, error.code, error.detail)
        field = our_name(error.field)
        return Refused(instance, (field,) if field else (), f"{instance}: {error}")
    except (KeyError, TypeError, AttributeError) as error:
        return Away(instance, PROTOCOL, repr(error))


def _known(client: Registrar, instance: str) -> Any:
    """What the service has under this name, or None. Raises ClientError."""
    try:
        return client.get_json(f"/v1/instances/{instance}")
    except ClientError as error:
        if error.code == UNKNOWN:
            return None
        raise


def _mismatch(instance: str, differs: Mapping[str, tuple[Any, Any]]) -> Refused:
    told = "; ".join(
        f"{field} is {have!r} there and {want!r} here" for field, (have, want) in differs.items()
    )
    return Refused(
        instance, tuple(differs), f"{instance} is registered with another {', '.join(differs)}: {told}"
    )


def _differences(known: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Our names of the fields that differ -> (registered, asked)."""
    differs = {
        our_name(name): (known[name], wanted)
        for name, wanted in asked.items()
        if name != "extra" and known[name] != wanted
    }
    have, want = known["extra"], asked["extra"]
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            differs[name] = (have.get(name), want.get(name))
    return differs
