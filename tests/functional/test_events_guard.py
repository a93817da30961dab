"""Who may hear the streams, and where they may be heard."""

import time
from collections.abc import Iterator
from pathlib import Path
from socket import AF_INET, SOCK_STREAM, socket

import pytest
import zmq
import zmq.auth

from tests.functional.events_reader import Keys, Reader
from tests.functional.events_service import EventsService, Prompt, eventually, free_ports, running
from tests.torture.service_process import ServiceProcess

DEAF_S = 1.2
"""Long enough for a beat to have come."""


class Ring:
    """Key pairs in files, as an operator makes them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.pairs: dict[str, tuple[bytes, bytes]] = {}
        for name in ("server", "acme", "zeta", "auditor", "stranger"):
            zmq.auth.create_certificates(folder, name)
            public, secret = zmq.auth.load_certificate(folder / f"{name}.key_secret")
            assert secret is not None
            (folder / f"{name}.key_secret").chmod(0o600)
            self.pairs[name] = public, secret

    @property
    def secret_file(self) -> Path:
        return self.folder / "server.key_secret"

    def of(self, name: str) -> Keys:
        """What a consumer is given: its own pair and the server's public key."""
        return Keys(*self.pairs[name], self.pairs["server"][0])

    def row(self, name: str, tenant: str) -> str:
        """One row of the setting that says who may see what."""
        return f"{self.pairs[name][0].decode()}={tenant}"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    return Ring(tmp_path_factory.mktemp("keys") / "ring")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, ring: Ring) -> Iterator[EventsService]:
    """Two tenants with an instance each; `auditor` may see both."""
    clients = [ring.row("acme", "acme"), ring.row("zeta", "zeta"), ring.row("auditor", "*")]
    folder = tmp_path_factory.mktemp("curve")
    settings = {"events_curve_secret": ring.secret_file, "events_curve_clients": ",".join(clients)}
    with running(folder, **settings) as service:
        service.furnish("ours", publication={"model": "ours"}, tenant="acme")
        service.furnish("theirs", publication={"model": "theirs"}, storages=["other"], tenant="zeta")
        service.write(Prompt(700, 3), "ours")
        service.write(Prompt(701, 3), "theirs")
        yield service


def hears(service: EventsService, instance: str, keys: Keys | None) -> bool:
    """Whether a consumer hears anything of a stream within the time of a beat, live or as a replay."""
    view = service.stream(instance)
    with Reader(view["endpoint"], view["replay"], keys=keys) as reader:
        until_s = time.monotonic() + DEAF_S
        live = bool(reader._sub.poll(int(DEAF_S * 1000)))
        try:
            replayed = bool(reader.replayed(0, max(0.3, until_s - time.monotonic())))
        except AssertionError:
            replayed = False
    assert live == replayed, "both doors have the same lock"
    return live


def test_a_tenant_hears_its_own_instances_and_no_others(service: EventsService, ring: Ring) -> None:
    assert hears(service, "ours", ring.of("acme"))
    assert hears(service, "theirs", ring.of("zeta"))
    assert not hears(service, "theirs", ring.of("acme"))
    assert not hears(service, "ours", ring.of("zeta"))


def test_who_may_see_all_hears_all(service: EventsService, ring: Ring) -> None:
    assert hears(service, "ours", ring.of("auditor")) and hears(service, "theirs", ring.of("auditor"))


@pytest.mark.slow
def test_strangers_hear_nothing(service: EventsService, ring: Ring) -> None:
    assert not hears(service, "ours", ring.of("stranger"))
    assert not hears(service, "ours", None), "no keys at all"
    wrong = ring.of("acme")._replace(server=ring.pairs["stranger"][0])
    assert not hears(service, "ours", wrong), "who speaks to another server"


def test_an_admitted_router_follows_the_stream(service: EventsService, ring: Ring) -> None:
    reader = service.reader("ours", keys=ring.of("acme"))
    prompt = Prompt(702, 4)
    service.write(prompt, "ours")
    reader.pump(lambda: reader.has(prompt.hashes))


def test_no_topic_and_no_batch_names_a_tenant_or_group(service: EventsService, ring: Ring) -> None:
    reader = service.reader("ours", keys=ring.of("auditor"))
    reader.beats(2)
    for batch in reader.batches:
        assert "acme" not in batch.topic and "acme" not in str(batch.events)


def refusal(folder: Path, **settings: object) -> str:
    """What a service says that must not start."""
    status, said = ServiceProcess(folder, **settings).refused()
    assert status not in (0, None) and "Traceback" not in said, said
    return said


def test_other_machines_hear_nothing_unless_encrypted(tmp_path: Path) -> None:
    said = refusal(tmp_path, events_port_base=free_ports(8), events_channels_max=4, events_host="0.0.0.0")
    assert "events-host" in said and "events-curve-secret" in said


@pytest.mark.slow
def test_a_port_that_somebody_has_stops_nobody(tmp_path: Path) -> None:
    """Its stream comes when the port is free; everything else works meanwhile."""
    ports = free_ports(128)
    with socket(AF_INET, SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", ports))
        taken.listen(1)
        with running(tmp_path, events_port_base=ports) as service:
            service.furnish("first", publication={"model": "first"})
            service.furnish("second", publication={"model": "second"})
            prompt = Prompt(710, 2)
            service.write(prompt, "first")
            assert service.lookup(prompt, "first") == 2
            second = service.reader("second")
            second.beats(1)
            taken.close()
            view = next(one for one in service.streams() if one["instance"] == "first")
            assert view["endpoint"].endswith(f":{ports}")
            reader = Reader(view["endpoint"], view["replay"])
            reader.pump(lambda: reader.has(prompt.hashes), 15.0, "it is bound once the port is free")
            reader.close()


def test_without_events_nothing_listens_and_nothing_changes(tmp_path: Path) -> None:
    service = EventsService(tmp_path)
    ports = service.ports
    del service.process.settings["events_port_base"], service.process.settings["events_channels_max"]
    with service:
        service.ask("PUT", "/v1/tenants/acme", {})
        refused = service.refused("GET", "/v1/events")
        assert (refused.status, refused.code) == (409, "events_off")
        with socket(AF_INET, SOCK_STREAM) as probe:
            assert probe.connect_ex(("127.0.0.1", ports)) != 0


def test_the_secret_is_told_nowhere(service: EventsService, ring: Ring) -> None:
    secret = ring.pairs["server"][1].decode()
    eventually(service.process.log, "it wrote something")
    assert secret not in service.process.log()
    assert secret not in service.http.get("/metrics").text
