"""`ucm-meta events attach`: what is printed is what the other side accepts."""

import json
import re
from pathlib import Path

import pytest

from engine_adapters.vllm.settings import settings_of
from metaservice.cli.events import Consumer
from metaservice.cli.events_read import EventsUnreadable, collect, places
from metaservice.cli.events_recipes import RECIPES
from metaservice.publish.attach import rows
from metaservice.publish.curve import make_keys
from metaservice.wire.schemas_events import EngineView, EventsReply, StreamView


def stream(channel: int, host: str, *, live: bool, engine: str = "", instance: str = "i") -> StreamView:
    return StreamView(
        channel=channel,
        shard=0,
        kind="merged" if engine else "shared",
        instance=instance,
        model="m",
        node="",
        rank=0,
        topic=f"kv@{engine or 'pool'}@m",
        endpoint=f"tcp://{host}:{7000 if engine else 20000}",
        replay=f"tcp://{host}:{7001 if engine else 20001}",
        live=live,
        number=2**20,
        block_size_tokens=16,
        announced=0,
        engine=engine,
    )


ENGINE = EngineView(
    engine="e-1",
    incarnation="a",
    instance="i",
    rank=0,
    node="n",
    address="10.0.0.1:8000",
    worker_id=7,
    events="",
    replay="",
    dialect="",
    pool_channel=0,
    local_channel=-1,
)
REPLIES = [
    EventsReply(
        replica="standby",
        streams=[stream(0, "standby", live=False), stream(-1, "standby", live=False, engine="e-1")],
        engines=[ENGINE],
    ),
    EventsReply(
        replica="leader",
        streams=[stream(0, "leader", live=True), stream(0, "leader", live=True, engine="e-1")],
        engines=[ENGINE],
    ),
]


def told(consumer: str) -> str:
    return "\n".join(RECIPES[consumer](REPLIES))


def test_every_consumer_has_a_recipe() -> None:
    assert {one.value for one in Consumer} == RECIPES.keys()


@pytest.mark.parametrize("consumer", sorted(RECIPES))
def test_printed_attachments_are_ones_that_the_service_takes(consumer: str) -> None:
    for listed in re.findall(r"^events_attachments = (.*)$", told(consumer), re.MULTILINE):
        for text in json.loads(listed):
            rows.parse(text)


def test_the_connector_takes_what_is_printed_for_dynamos_frontend() -> None:
    (extra,) = re.findall(r"kv_connector_extra_config = (.*)", told("dynamo-frontend"))
    assert settings_of(json.loads(extra) | {"url": "http://h:1", "group": "g"}).pool_events is True


@pytest.mark.parametrize("consumer", ["generic", "dynamo-frontend"])
def test_a_merged_stream_is_listed_once_as_the_leader_has_it(consumer: str) -> None:
    """A standby does not know its channel."""
    assert told(consumer).count("tcp://leader:7000") == 1
    assert "standby" not in told(consumer)


def test_merged_streams_are_not_for_dynamos_indexer() -> None:
    assert told("dynamo-indexer").count("# channel") == 1
    assert ":7000" not in told("dynamo-indexer")


@pytest.mark.parametrize("consumer", ["aibrix", "hicache"])
def test_instances_are_filled_in(consumer: str) -> None:
    assert "instance=i " in told(consumer)


def test_a_stream_is_followed_at_all_replicas_the_leader_first() -> None:
    pool, merged = places(REPLIES, None, "", merged=True)
    assert pool.endpoints == ("tcp://leader:20000", "tcp://standby:20000")
    assert [desk.replica for desk in pool.replays] == ["leader", "standby"]
    assert merged.endpoints == ("tcp://leader:7000", "tcp://standby:7000")
    assert pool.live
    assert not places(REPLIES[:1], None, "", merged=False)[0].live


@pytest.mark.parametrize("urls", [[], ["nonsense"]])
def test_what_is_no_url_is_said(urls: list[str]) -> None:
    with pytest.raises(EventsUnreadable, match=r"(?i)url"):
        collect(urls, 100)


def test_a_key_pair_is_never_overwritten(tmp_path: Path) -> None:
    path, _ = make_keys(tmp_path, "server")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="there already"):
        make_keys(tmp_path, "server")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", "a\n"])
def test_a_key_pair_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    with pytest.raises(ValueError, match="no name of a key pair"):
        make_keys(folder, name)
    assert not list(tmp_path.rglob("*.key*"))
