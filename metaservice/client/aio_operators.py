"""What operators and tools ask for, awaited: the methods of `Operators`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from . import admin
from .http import JSON, Reply


class AsyncOperators(ABC):
    """The calls of operators. Any replica takes them and passes them on to the leader; all raise
    `ClientError`."""

    @abstractmethod
    async def _ask(self, ask: admin.Ask, accept: str = JSON) -> Reply:
        """The reply to one request, whatever its status. Raises ClientError when there is none."""

    async def put_tenant(
        self, id: str, *, bytes_max: int | None = None, blocks_max: int | None = None
    ) -> Any:
        """Create or change a tenant; quotas None: no limit."""
        return admin.json_of(await self._ask(admin.tenant(id, bytes_max, blocks_max)))

    async def put_storage(
        self,
        id: str,
        kind: str,
        options: Mapping[str, str],
        *,
        capacity_bytes: int | None = None,
        fault_domain: str = "",
        reach: str = "",
    ) -> Any:
        """Register a storage; kind and options cannot change while groups name it. `reach`: `pool` or
        `node`, which engines reach it; "": as is usual for its kind."""
        ask = admin.storage(id, kind, options, capacity_bytes, fault_domain, reach)
        return admin.json_of(await self._ask(ask))

    async def put_group(
        self,
        id: str,
        tenant: str,
        storages: Sequence[str],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
        high_permille: int = 950,
        low_permille: int = 900,
        eviction: str = "lru",
    ) -> Any:
        """Create or change a group of instances; `eviction` is `lru` or `reject`."""
        ask = admin.group(id, tenant, storages, bytes_max, blocks_max, high_permille, low_permille, eviction)
        return admin.json_of(await self._ask(ask))

    async def put_instance(
        self,
        id: str,
        group: str,
        fingerprint: Mapping[str, Any],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
        shard: int | None = None,
        publication: Mapping[str, Any] | None = None,
    ) -> Any:
        """Register an instance; the same id with another fingerprint is refused, naming each field that
        differs. It lives in `shard`, or where the fewest do. `publication`: how routers are told of its
        blocks (`model`, `routing_group`, `lora`, `hash_of`, `entries_max`, `base`); None: not at all."""
        ask = admin.instance(id, group, fingerprint, bytes_max, blocks_max, shard, publication)
        return admin.json_of(await self._ask(ask))

    async def set_switch(self, scope: str, id: str, mode: str, *, reason: str = "") -> Any:
        """Set the switch of a scope (`cluster` with id "", `tenant`, `group`, `instance`, `storage`)."""
        return admin.json_of(await self._ask(admin.switch(scope, id, mode, reason)))

    async def get_json(self, path: str) -> Any:
        """`GET` of any route that answers with JSON; `path` as `/v1/...`."""
        return admin.json_of(await self._ask(admin.Ask("GET", path)))

    async def get_text(self, path: str) -> str:
        """`GET` of any other route, such as `/metrics`."""
        return admin.text_of(await self._ask(admin.Ask("GET", path), "*/*"))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """`POST` to a route of operators, such as `/v1/cluster/shards/{n}/handover`."""
        return admin.json_of(await self._ask(admin.Ask("POST", path, dict(body))))

    async def delete(self, path: str) -> Any:
        """`DELETE` of a route such as `/v1/instances/{id}`."""
        return admin.json_of(await self._ask(admin.Ask("DELETE", path)))
