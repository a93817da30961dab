"""`ucm-meta status`: what a running service says of itself."""

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from metaservice.client import Client, ClientConfig, ClientError

KINDS = ("tenants", "storages", "groups", "instances", "engines", "workers")
PAGE_SIZE = 1_000

EXIT_READY = 0
EXIT_NOT_READY = 1
EXIT_UNREACHABLE = 2


def show(url: str, *, as_json: bool) -> int:
    """Print the status of the service at `url` to stdout. Exit status 0: it is ready; 1: it answers and is
    not; 2: it does not answer, which is said on stderr."""
    try:
        status = collect(url)
    except (ClientError, ValueError) as error:
        sys.stderr.write(f"error: no status from {url}: {error}\n")
        return EXIT_UNREACHABLE
    if as_json:
        print(msgspec.json.encode(status).decode())
    else:
        draw(status, Console())
    return EXIT_READY if status["service"]["ready"] else EXIT_NOT_READY


def collect(url: str) -> dict[str, Any]:
    """`service` (what it is), one list for each of `KINDS`, and `switches` that are not normal. A service
    that is not ready has no lists. Raises `ClientError`, and `ValueError` for a malformed URL."""
    with Client(ClientConfig(url=url, raise_errors=True)) as client:
        service = client.get_json("/v1/status")
        status: dict[str, Any] = {"service": service}
        for kind in (*KINDS, "switches"):
            status[kind] = _all(client, kind) if service["ready"] else []
    return status


def _all(client: Client, kind: str) -> list[dict[str, Any]]:
    path = f"/v1/{kind}" if kind == "switches" else f"/v1/{kind}?page_size={PAGE_SIZE}"
    items: list[dict[str, Any]] = []
    token = ""
    while True:
        page = client.get_json(f"{path}&page_token={token}" if token else path)
        items += page["items"]
        token = page["next_page_token"]
        if not token:
            return items


def draw(status: dict[str, Any], console: Console) -> None:
    """The status as text for people."""
    service = status["service"]
    console.print(
        f"replica {service['replica']} of cluster {service['cluster']}, {service['role']} of shard"
        f" {service['shard']}: {service['status']} (epoch {service['epoch']}, durable up to {service['seq']},"
        f" version {service['versions']['service']})",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if service["reason"]:
        console.print(service["reason"], highlight=False, markup=False, soft_wrap=True)
    for kind in KINDS:
        if status[kind]:
            table = _usage_table if "usage" in status[kind][0] else _table
            console.print(table(kind, status[kind]))
    for switch in status["switches"]:
        scope = f"{switch['scope']} {switch['id']}".strip()
        console.print(
            f"switch: {scope} is {switch['mode']}  {switch['reason']}", highlight=False, markup=False
        )


def _usage_table(kind: str, items: list[dict[str, Any]]) -> Table:
    table = Table(title=kind, title_justify="left")
    table.add_column("id", overflow="fold")
    for name in ("blocks", "of", "bytes", "of", "deleting"):
        table.add_column(name, justify="right")
    for item in items:
        usage = item["usage"]
        cells = (usage[name] for name in ("blocks", "blocks_max", "bytes", "bytes_max", "deleting_blocks"))
        table.add_row(item["id"], *("-" if cell is None else f"{cell:,}" for cell in cells))
    return table


def _table(kind: str, items: list[dict[str, Any]]) -> Table:
    table = Table(title=kind, title_justify="left")
    columns = [name for name, value in items[0].items() if isinstance(value, str | int)]
    for name in columns:
        table.add_column(name, overflow="fold")
    for item in items:
        table.add_row(*(str(item.get(name, "")) for name in columns))
    return table
