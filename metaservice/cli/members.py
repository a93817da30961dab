"""`ucm-meta members`: the engines and workers that are registered, and what is gone taken away."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metaservice.client import Client, ClientConfig, ClientError

EXIT_DONE = 0
EXIT_NOT_DONE = 1
EXIT_UNREACHABLE = 2
PAGE_SIZE = 1_000
KINDS = {"engine": "engines", "worker": "workers"}
COLUMNS = ("kind", "id", "incarnation", "status", "silent s", "instance", "storages", "sessions")


def show(url: str, kinds: Sequence[str], status: str, *, as_json: bool) -> int:
    """Print those of `kinds` that are in `status` ("": in any) to stdout. Exit status 2: nobody answers."""

    def print_all(client: Client) -> int:
        found = [{"kind": kind, **member} for kind in kinds for member in _all(client, kind, status)]
        if as_json:
            print(msgspec.json.encode(found).decode())
        else:
            Console().print(_table(found))
        return EXIT_DONE

    return _with(url, print_all)


def forget(url: str, kind: str, id: str, incarnation: str) -> int:
    """Take one away that has expired, or, with its incarnation, whatever it is. Exit status 1: refused."""

    def take_away(client: Client) -> int:
        named = f"?{urlencode({'incarnation': incarnation})}" if incarnation else ""
        client.delete(f"/v1/{KINDS[kind]}/{quote(id, safe='')}{named}")
        print(f"{kind} {id} is forgotten")
        return EXIT_DONE

    return _with(url, take_away)


def forget_expired(url: str) -> int:
    """Take away all that have expired; who comes back meanwhile stays."""

    def take_away(client: Client) -> int:
        count = 0
        for kind, plural in KINDS.items():
            for member in list(_all(client, kind, "expired")):
                try:
                    client.delete(f"/v1/{plural}/{quote(member['id'], safe='')}")
                except ClientError as error:
                    if error.code not in ("not_expired", f"{kind}_unknown"):
                        raise
                else:
                    count += 1
        print(f"{count} forgotten")
        return EXIT_DONE

    return _with(url, take_away)


def _with(url: str, do: Callable[[Client], int]) -> int:
    try:
        with Client(ClientConfig(url=url, raise_errors=True)) as client:
            return do(client)
    except (ClientError, ValueError) as error:
        sys.stderr.write(f"error: {url}: {error}\n")
        answered = isinstance(error, ClientError) and error.status in (404, 409, 422)
        return EXIT_NOT_DONE if answered else EXIT_UNREACHABLE


def _all(client: Client, kind: str, status: str) -> Iterator[dict[str, Any]]:
    query = {"page_size": str(PAGE_SIZE)} | ({"status": status} if status else {})
    while True:
        page = client.get_json(f"/v1/{KINDS[kind]}?{urlencode(query)}")
        yield from page["items"]
        if not page["next_page_token"]:
            return
        query["page_token"] = page["next_page_token"]


def _table(members: list[dict[str, Any]]) -> Table:
    table = Table(*COLUMNS, title="members", title_justify="left")
    for one in members:
        silent, storages = f"{one['silent_ms'] / 1_000:,.1f}", ", ".join(one["storages"])
        row = (one["kind"], one["id"], one["incarnation"], one["status"], silent, one["instance"], storages)
        table.add_row(*map(escape, (*row, str(one["sessions"]))))
    return table
