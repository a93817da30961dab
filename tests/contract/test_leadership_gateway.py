"""The client of etcd's JSON gateway: encryption, users, and servers that hang, drip, lie or are not there."""

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
import trustme

from metaservice.cli.local.etcd import LocalEtcd, ServerTls
from metaservice.clock import monotonic_s
from metaservice.leadership.addresses import Lookup
from metaservice.leadership.errors import LeadershipRefused, LeadershipUnavailable
from metaservice.leadership.etcd import EtcdLeadership, EtcdSettings
from metaservice.leadership.port import Holder
from tests.contract.leadership_benches import REPORT, TIMEOUT_MS, EtcdBench, new_life

CALL_MAX_S = 2 * TIMEOUT_MS / 1000 + 0.5


def leadership(
    settings: EtcdSettings,
    timeout_ms: int = TIMEOUT_MS,
    lookup: Lookup | None = None,
    seed: int = 1,
) -> EtcdLeadership:
    return EtcdLeadership(
        settings,
        replica=f"r{seed}",
        url="http://r",
        life=new_life(),
        shards=1,
        ttl_ms=5_000,
        timeout_ms=timeout_ms,
        now_s=monotonic_s,
        chance=Random(seed).random,
        lookup=lookup,
    )


# --- encryption ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


def written(authority: trustme.CA, folder: Path, name: str, *identities: str) -> tuple[str, str]:
    """The files of a new certificate and its key."""
    issued = authority.issue_cert(*identities)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    return str(cert), str(key)


@pytest.fixture(scope="module")
def encrypted(authority: trustme.CA, folder: Path) -> Iterator[LocalEtcd]:
    """An etcd that talks to holders of a certificate of the authority only."""
    authority.cert_pem.write_to_path(folder / "ca.pem")
    cert, key = written(authority, folder, "server", "localhost", "127.0.0.1")
    with LocalEtcd(tls=ServerTls(Path(cert), Path(key), folder / "ca.pem")) as etcd:
        yield etcd


def secured(etcd: LocalEtcd, folder: Path, cert: str, key: str, prefix: str) -> EtcdSettings:
    return EtcdSettings(etcd.endpoints, prefix, ca=str(folder / "ca.pem"), cert=cert, key=key)


async def test_both_sides_show_certificates(
    encrypted: LocalEtcd,
    authority: trustme.CA,
    folder: Path,
    etcd_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "/nowhere" if "PROXY" not in name else "http://127.0.0.1:1")
    cert, key = written(authority, folder, "replica", "replica@example.org")
    bench = EtcdBench(secured(encrypted, folder, cert, key, etcd_prefix))
    a, b = bench.replica("a"), bench.replica("b")
    await a.renew(REPORT)
    assert await a.acquire(0)
    assert (await b.renew(REPORT)).holders == {0: Holder("a", "http://a")}
    await bench.close()


async def test_the_host_name_is_checked_though_its_address_is_used(
    encrypted: LocalEtcd, authority: trustme.CA, folder: Path, etcd_prefix: str
) -> None:
    cert, key = written(authority, folder, "replica", "replica@example.org")
    port = encrypted.endpoints[0].rpartition(":")[2]

    async def lookup(host: str) -> list[str]:
        return ["127.0.0.1"]

    for host, known in (("localhost", True), ("other.example.org", False)):
        endpoint = f"https://{host}:{port}"
        settings = EtcdSettings((endpoint,), etcd_prefix, ca=str(folder / "ca.pem"), cert=cert, key=key)
        replica = leadership(settings, lookup=lookup)
        if known:
            assert set((await replica.renew(REPORT)).members) == {"r1"}
        else:
            with pytest.raises(LeadershipUnavailable, match=r"(?i)hostname mismatch|not valid for"):
                await replica.renew(REPORT)
        await replica.close()


async def test_strangers_get_no_answer_and_believe_none(
    encrypted: LocalEtcd, authority: trustme.CA, folder: Path, etcd_prefix: str
) -> None:
    ca = str(folder / "ca.pem")
    without = leadership(EtcdSettings(encrypted.endpoints, etcd_prefix, ca=ca))
    with pytest.raises(LeadershipUnavailable):
        await without.renew(REPORT)
    cert, key = written(authority, folder, "replica", "replica@example.org")
    other = folder / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    wrong = leadership(EtcdSettings(encrypted.endpoints, etcd_prefix, ca=str(other), cert=cert, key=key))
    with pytest.raises(LeadershipUnavailable, match=r"(?i)certificate verify failed"):
        await wrong.renew(REPORT)
    await asyncio.gather(without.close(), wrong.close())


async def test_a_renewed_certificate_is_used_with_the_next_connection(
    encrypted: LocalEtcd, authority: trustme.CA, folder: Path, etcd_prefix: str
) -> None:
    cert, key = written(trustme.CA(), folder, "rotating", "replica@example.org")
    replica = leadership(secured(encrypted, folder, cert, key, etcd_prefix))
    with pytest.raises(LeadershipUnavailable):
        await replica.renew(REPORT)
    written(authority, folder, "rotating", "replica@example.org")
    assert set((await replica.renew(REPORT)).members) == {"r1"}
    await replica.close()


async def test_d4_an_encrypted_member_that_is_frozen_costs_no_more(
    encrypted: LocalEtcd, authority: trustme.CA, folder: Path, etcd_prefix: str
) -> None:
    cert, key = written(authority, folder, "replica", "replica@example.org")
    known = leadership(secured(encrypted, folder, cert, key, etcd_prefix))
    await known.renew(REPORT)
    fresh = leadership(secured(encrypted, folder, cert, key, etcd_prefix), seed=2)
    encrypted.freeze()
    try:
        for replica in (known, fresh):  # one stops in an exchange, the other in the handshake
            started_s = monotonic_s()
            with pytest.raises(LeadershipUnavailable):
                await replica.renew(REPORT)
            assert monotonic_s() - started_s < CALL_MAX_S
    finally:
        encrypted.thaw()
    await asyncio.sleep(0.3)
    for replica in (known, fresh):
        await replica.renew(REPORT)
        await replica.close()


def test_a_certificate_file_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(OSError, match="nowhere"):
        leadership(EtcdSettings(("https://localhost:1",), ca="/nowhere/ca.pem"))


# --- users ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalEtcd]:
    """An etcd with users: `ucm` may use /own/, `guest` nothing."""
    with LocalEtcd() as etcd:
        call = _caller(etcd)
        for name, password in (("root", "r"), ("ucm", "u"), ("guest", "g")):
            call("auth/user/add", {"name": name, "password": password})
        call("auth/role/add", {"name": "root"})
        call("auth/role/add", {"name": "own"})
        _permit(call)
        call("auth/user/grant", {"user": "root", "role": "root"})
        call("auth/user/grant", {"user": "ucm", "role": "own"})
        call("auth/enable", {})
        yield etcd


def _caller(etcd: LocalEtcd, token: str = "") -> Callable[[str, object], dict[str, str]]:
    def call(path: str, body: object) -> dict[str, str]:
        headers = {"authorization": token} if token else {}
        reply = httpx.post(f"{etcd.endpoints[0]}/v3/{path}", json=body, headers=headers, trust_env=False)
        assert reply.status_code == 200, reply.text
        answer: dict[str, str] = reply.json()
        return answer

    return call


def _permit(call: Callable[[str, object], dict[str, str]]) -> None:
    span = {"key": base64.b64encode(b"/own/").decode(), "range_end": base64.b64encode(b"/own0").decode()}
    call("auth/role/grant", {"name": "own", "perm": {"permType": "READWRITE"} | span})


def as_user(etcd: LocalEtcd, username: str, password: str) -> EtcdSettings:
    return EtcdSettings(etcd.endpoints, "/own", username=username, password=password)


async def test_a_user_logs_in_and_again_when_users_change(guarded: LocalEtcd) -> None:
    replica = leadership(as_user(guarded, "ucm", "u"))
    await replica.renew(REPORT)
    assert await replica.acquire(0)
    admin = _caller(
        guarded, _caller(guarded)("auth/authenticate", {"name": "root", "password": "r"})["token"]
    )
    admin("auth/user/add", {"name": "another", "password": "x"})
    assert set((await replica.renew(REPORT)).holders) == {0}
    guarded.members[0].crash()  # and so are all tokens
    guarded.start()
    assert set((await replica.renew(REPORT)).holders) == {0}
    await replica.close()


@pytest.mark.parametrize(
    ("username", "password", "says"),
    [
        ("ucm", "wrong", "invalid user ID or password"),
        ("nobody", "u", "invalid user ID or password"),
        ("guest", "g", "permission denied"),
        ("", "", "user name is empty"),
    ],
)
async def test_what_etcd_will_not_allow_is_said(
    guarded: LocalEtcd, username: str, password: str, says: str
) -> None:
    replica = leadership(as_user(guarded, username, password))
    with pytest.raises(LeadershipRefused, match=says):
        await replica.renew(REPORT)
    await replica.close()


async def test_a_user_for_an_etcd_without_users_is_refused(etcd: tuple[str, ...], etcd_prefix: str) -> None:
    replica = leadership(EtcdSettings(etcd, etcd_prefix, username="ucm", password="u"))
    with pytest.raises(LeadershipRefused, match="authentication is not enabled"):
        await replica.renew(REPORT)
    await replica.close()


def test_settings_show_no_secret() -> None:
    text = repr(EtcdSettings(("http://e:1",), username="u", password="geheim", cert="c", key="schluessel"))
    assert "geheim" not in text
    assert "schluessel" not in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoints": ()},
        {"endpoints": ("localhost:2379",)},
        {"endpoints": ("http://localhost:2379/v3",)},
        {"endpoints": ("http://e:1",), "prefix": "/"},
        {"endpoints": ("http://e:1",), "cert": "c"},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="etcd"):
        EtcdSettings(**wrong)  # type: ignore[arg-type]


# --- servers that are none -----------------------------------------------------------------------------

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[str]:
    """A server that treats each connection as told, and its URL."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(one, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Each byte in time, the answer never: a deadline between two bytes would not end this."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(1000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
    while True:
        writer.write(b" " * 1_000_000)
        await writer.drain()


def answers(status: str, body: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body))
            await writer.drain()

    return talk


@pytest.mark.parametrize(
    "talk",
    [
        drips,
        says_nothing,
        floods,
        answers("200 OK", b"<html>"),
        answers("200 OK", b"[]"),
        answers("302 Found", b""),
        answers("502 Bad Gateway", b"no upstream"),
        answers(
            "503 Service Unavailable", b'{"error":"etcdserver: no leader","code":14,"message":"no leader"}'
        ),
        answers("200 OK", b'{"error":{"grpc_code":14,"http_code":503,"message":"no leader"}}'),
    ],
    ids=["drips", "silent", "floods", "html", "list", "redirect", "proxy", "no-leader", "no-leader-stream"],
)
async def test_a_server_that_is_of_no_use_costs_one_deadline_and_the_next_is_asked(
    talk: Talk, etcd: tuple[str, ...], etcd_prefix: str
) -> None:
    async with server(talk) as useless:
        both = EtcdSettings((useless, *etcd), etcd_prefix)
        replica = leadership(both, timeout_ms=300, seed=1)
        assert Random(1).random() < 0.5, "the useless one is asked first"
        started_s = monotonic_s()
        assert set((await replica.renew(REPORT)).members) == {"r1"}
        assert monotonic_s() - started_s < 0.85
        alone = leadership(EtcdSettings((useless,), etcd_prefix), timeout_ms=300, seed=2)
        started_s = monotonic_s()
        with pytest.raises(LeadershipUnavailable):
            await alone.renew(REPORT)
        assert monotonic_s() - started_s < 0.85
        await asyncio.gather(replica.close(), alone.close())


async def test_an_endless_answer_is_cut_off_by_its_size() -> None:
    async with server(floods) as url:
        replica = leadership(EtcdSettings((url,)), timeout_ms=5_000)
        with pytest.raises(LeadershipUnavailable, match=r"more than \d+ bytes"):
            await replica.renew(REPORT)
        await replica.close()


# --- names ---------------------------------------------------------------------------------------------


async def test_a_name_that_nobody_knows_is_said_in_time() -> None:
    replica = leadership(EtcdSettings(("http://etcd.invalid:2379",)))
    started_s = monotonic_s()
    with pytest.raises(LeadershipUnavailable, match=r"etcd\.invalid"):
        await replica.renew(REPORT)
    assert monotonic_s() - started_s < CALL_MAX_S
    await replica.close()


async def test_c9_a_name_service_that_hangs_is_asked_once_at_a_time(
    etcd: tuple[str, ...], etcd_prefix: str
) -> None:
    port = etcd[0].rpartition(":")[2]
    asked, answer = 0, asyncio.Event()

    async def lookup(host: str) -> list[str]:
        nonlocal asked
        asked += 1
        await answer.wait()
        return ["127.0.0.1"]

    replica = leadership(
        EtcdSettings((f"http://etcd.test:{port}",), etcd_prefix), timeout_ms=100, lookup=lookup
    )
    for _ in range(5):
        with pytest.raises(LeadershipUnavailable):
            await replica.renew(REPORT)
    assert asked == 1
    answer.set()
    await replica.renew(REPORT)
    assert asked == 1
    await replica.close()


async def test_c9_what_was_once_found_is_used_while_the_name_service_is_down() -> None:
    answers_now = ["127.0.0.1"]

    async def lookup(host: str) -> list[str]:
        if not answers_now:
            raise OSError("the name service is down")
        return list(answers_now)

    with LocalEtcd() as own:
        port = own.endpoints[0].rpartition(":")[2]
        settings = EtcdSettings((f"http://etcd.test:{port}",), "/c9")
        replica = leadership(settings, lookup=lookup)
        await replica.renew(REPORT)
        answers_now.clear()
        own.crash()
        for _ in range(2):
            with pytest.raises(LeadershipUnavailable):
                await replica.renew(REPORT)
        own.start()
        await replica.renew(REPORT)
        await replica.close()


async def test_a_server_that_moved_is_found_where_it_is_now(etcd: tuple[str, ...], etcd_prefix: str) -> None:
    port = etcd[0].rpartition(":")[2]
    where = ["127.99.99.99"]  # nobody listens there

    async def lookup(host: str) -> list[str]:
        return list(where)

    replica = leadership(EtcdSettings((f"http://etcd.test:{port}",), etcd_prefix), lookup=lookup)
    for _ in range(2):
        with pytest.raises(LeadershipUnavailable):
            await replica.renew(REPORT)
    await asyncio.sleep(0)  # for the look-up after the last failure
    where[:] = ["127.0.0.1"]
    with pytest.raises(LeadershipUnavailable):
        await replica.renew(REPORT)
    await replica.renew(REPORT)
    await replica.close()
