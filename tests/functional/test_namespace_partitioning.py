"""Engines that differ in one field of their namespace never meet each other's blocks: the real service."""

import hashlib
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine_adapters.namespace import COMPARED, Namespace, Refused, Registered, register
from engine_adapters.namespace.canary import canary
from engine_adapters.namespace.contents import adapter_folder
from metaservice.client import Client, ClientError
from tests.functional.client_service import Service, eventually, write
from tests.unit.namespace_house import PARTS, changed, make_namespace

FLAGS = ("--reclaim-delay-ms", "0", "--late-write-ms", "0", "--log-level", "warning")
PREFIX = "vllm"
FIELDS = Namespace.__struct_fields__
"""All of them: a field that is added is in the suite at once."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Iterator[Service]:
    one = Service(tmp_path_factory.mktemp("service"), free_port(), *FLAGS)
    one.start()
    with one.client() as client:
        client.put_tenant("t")
        client.put_storage("s", "posix", {"root": "/nowhere"})
        client.put_group("g", "t", ["s"])
    yield one
    one.stop()


def keys_of(seed: int, count: int = 4, length: int = 32) -> list[bytes]:
    """The keys that every engine would give the same tokens."""
    draw = random.Random(seed)
    return [draw.randbytes(length) for _ in range(count)]


def join(client: Client, namespace: Namespace, adapter: str = "") -> str:
    """Register what must be registrable; the instance."""
    answer = register(client, namespace, group="g", prefix=PREFIX, parts=PARTS, adapter=adapter)
    assert isinstance(answer, Registered), answer
    return answer.instance


def refusal(client: Client, namespace: Namespace) -> Refused:
    answer = register(client, namespace, group="g", prefix=PREFIX, parts=PARTS)
    assert isinstance(answer, Refused), answer
    return answer


def engine_of(service: Service, name: str, instance: str) -> Client:
    client = service.client()
    assert client.register_engine(name, instance=instance, keepalive=None).active
    return client


def usage(client: Client, instance: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get_json(f"/v1/instances/{instance}")["usage"]
    return found


def gauge(client: Client, instance: str) -> float:
    """Blocks of an instance as Prometheus reads them."""
    for line in client.get_text("/metrics").splitlines():
        if line.startswith("ucm_meta_usage_blocks{") and f'id="{instance}"' in line:
            return float(line.rpartition(" ")[2])
    return 0.0


def shown(client: Client, instance: str, key: bytes) -> bool:
    """Whether the view of operators has this block in this instance."""
    try:
        client.get_json(f"/v1/instances/{instance}/blocks/{key.hex()}")
    except ClientError as error:
        assert error.code in ("block_unknown", "invalid_key", "key_length"), error
        return False
    return True


class Sight:
    """All that one may see of an instance's blocks: lookups, views, counts and metrics."""

    def __init__(self, operator: Client, engine: Client, instance: str) -> None:
        self.operator = operator
        self.engine = engine
        self.instance = instance
        self.counts = self._counts()

    def _counts(self) -> tuple[dict[str, Any], float]:
        return usage(self.operator, self.instance), gauge(self.operator, self.instance)

    def assert_sees_none(self, keys: list[bytes]) -> None:
        """None of these keys is there, and nothing was counted since."""
        for mode in ("prefix", "each"):
            missed = self.engine.lookup(self.instance, keys, mode=mode, lease_ms=1_000)
            assert (missed.failure, missed.hits, missed.lease) == (None, 0, None), mode
            assert not missed.locations and not any(missed.hit)
        for key in keys:
            assert not shown(self.operator, self.instance, key)
        assert self._counts() == self.counts


def assert_apart(
    service: Service, one: Namespace, other: Namespace, seed: int, adapters: tuple[str, str] = ("", "")
) -> None:
    """What engines of `one` write is nowhere for engines of `other`, and what those do to their own blocks of
    the same keys changes nothing here."""
    keys = keys_of(seed)
    of_length = [key[: other.key_length].ljust(other.key_length, b"\0") for key in keys]
    with service.client() as operator:
        ours = join(operator, one, adapters[0])
        theirs = join(operator, other, adapters[1])
        assert ours != theirs
        with engine_of(service, f"a{seed}", ours) as us, engine_of(service, f"b{seed}", theirs) as them:
            sight = Sight(operator, them, theirs)
            write(us, keys, ours)
            assert us.lookup(ours, keys).hits == len(keys) and gauge(operator, ours) >= len(keys)
            sight.assert_sees_none(of_length)
            # the same keys are free for them, and theirs alone
            counted = usage(operator, ours)
            write(them, of_length, theirs)
            assert usage(operator, ours) == counted
            found, found_there = us.lookup(ours, keys), them.lookup(theirs, of_length)
            assert (found.hits, found_there.hits) == (len(keys), len(keys))
            assert not set(found.locations) & set(found_there.locations)
            them.remove(theirs, of_length)
            eventually(lambda: usage(operator, theirs)["blocks"] == sight.counts[0]["blocks"])
            assert us.lookup(ours, keys).hits == len(keys) and usage(operator, ours) == counted


@pytest.mark.parametrize("field", FIELDS)
def test_engines_that_differ_in_one_field_never_meet(service: Service, field: str) -> None:
    one = make_namespace()
    other = changed(one, field)
    if field not in COMPARED:
        assert_apart(service, one, other, seed=FIELDS.index(field))
        return
    with service.client() as operator:
        join(operator, one)
        refused = refusal(operator, other)
        assert refused.fields == (field,) and field in refused.reason
        assert str(getattr(one, field)) in refused.reason and str(getattr(other, field)) in refused.reason
        join(operator, one)


def test_the_suite_would_see_a_field_that_does_not_tell_apart(service: Service) -> None:
    class Blind(Namespace, frozen=True, kw_only=True, forbid_unknown_fields=True):
        def digest(self, adapter: str = "") -> str:
            return (
                replace(self, dtype="", canary="").digest(adapter) if self.dtype else super().digest(adapter)
            )

    same = {name: getattr(make_namespace(model="blind"), name) for name in FIELDS}
    one, other = Blind(**same), Blind(**{**same, "dtype": "float16"})
    assert one.digest() == other.digest()
    with service.client() as operator:
        join(operator, one)
        # two lines of defence: what is not in the name is still compared
        assert refusal(operator, other).fields == ("dtype",)
        with engine_of(service, "blind", one.instance_id(PREFIX)) as engine:
            sight, keys = Sight(operator, engine, other.instance_id(PREFIX)), keys_of(901)
            sight.assert_sees_none(keys)
            write(engine, keys, one.instance_id(PREFIX))
            with pytest.raises(AssertionError):
                sight.assert_sees_none(keys)


def test_row20_another_hash_root_is_refused_and_told(service: Service) -> None:
    """Two processes whose block hash starts elsewhere (PYTHONHASHSEED, a random root) would only ever miss
    each other's blocks; the second is told so."""
    probe = (
        "import hashlib, os, pickle\n"
        "from tests.functional.test_namespace_partitioning import pickled\n"
        "print(pickled(os.environ['PYTHONHASHSEED']))\n"
    )

    def of_process(seed: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", probe],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return run.stdout.strip()

    first, again, other = of_process("1"), of_process("1"), of_process("2")
    assert first == again != other
    with service.client() as operator:
        join(operator, make_namespace(model="row20", canary=first))
        join(operator, make_namespace(model="row20", canary=again))
        refused = refusal(operator, make_namespace(model="row20", canary=other))
        assert refused.fields == ("canary",)
        assert first in refused.reason and other in refused.reason


def pickled(seed: str) -> str:
    """The canary of an engine that hashes pickles, from a root made of a seed."""

    def block_hash(parent: bytes, tokens: Any, extra: Any) -> bytes:
        return hashlib.sha256(pickle.dumps((parent, tokens, extra))).digest()

    return canary(block_hash, hashlib.sha256(seed.encode()).digest())


def test_row21_an_adapter_is_its_content_not_its_name(service: Service, tmp_path: Path) -> None:
    """Neither the base model nor another adapter is served an adapter's KV, nor the adapter that is trained
    anew under the same name and path."""
    folder = tmp_path / "my-adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    digests = []
    for weights in (b"first training", b"later training"):
        (folder / "adapter_model.safetensors").write_bytes(weights)
        digests.append(adapter_folder(folder))
    base = make_namespace(model="row21")
    assert_apart(service, base, base, seed=210, adapters=("", digests[0]))
    assert_apart(service, base, base, seed=211, adapters=(digests[0], digests[1]))


@pytest.mark.parametrize("field", ["salt", "tenant"])
def test_row22_a_salt_or_tenant_is_never_dropped(service: Service, field: str) -> None:
    """Also not where it is empty, and the answer to a foreign block is the answer to no block."""
    one = make_namespace(model=f"row22-{field}")
    for number, value in enumerate(("", "A", "a")):
        assert_apart(service, one, replace(one, **{field: value}), seed=220 + number)
    keys, nobodys = keys_of(226), keys_of(227)
    with service.client() as operator:
        ours, theirs = join(operator, one), join(operator, replace(one, **{field: "other"}))
        with engine_of(service, f"e-{field}", ours) as us:
            write(us, keys, ours)
            foreign, none = us.lookup(theirs, keys), us.lookup(theirs, nobodys)
            for answer in (foreign, none):
                assert (answer.hits, answer.cut, answer.cut_at, answer.staleness_ms) == (0, "miss", 0, 0)
            assert foreign.seq == none.seq and foreign.parts == none.parts


def test_row23_new_weights_leave_old_keys_behind_and_fence_the_old_writer(service: Service) -> None:
    keys = keys_of(230, count=8)
    before = make_namespace(model="row23", weight_version="step-100")
    after = replace(before, weight_version="step-200")
    with service.client() as operator:
        old, new = join(operator, before), join(operator, after)
    with engine_of(service, "trainer", old) as writer:
        write(writer, keys[:4], old)
        begun = writer.start_write(old, keys[4:])
        assert begun.failure is None and len(begun.writable) == 4
        with engine_of(service, "trainer", new) as renewed:
            assert renewed.lookup(new, keys).hits == 0, "a key of the old weights was found"
            late = writer.finish(begun, begun.locations, begun.generations, checksums=[0] * 4 * len(PARTS))
            assert late.published == 0 and late.failure is not None
            refused = writer.start_write(old, keys_of(231))
            assert refused.failure is not None and not len(refused.writable)
            assert renewed.lookup(new, keys).hits == 0
            assert renewed.lookup(old, keys[4:]).hits == 0, "the fenced writer's blocks were published"
            write(renewed, keys, new)
            assert renewed.lookup(new, keys).hits == 8


@pytest.mark.parametrize("field", ["layout", "kv_format", "engine_version", "groups"])
def test_row24_pages_that_are_packed_otherwise_are_others(service: Service, field: str) -> None:
    one = make_namespace(model=f"row24-{field}")
    assert_apart(service, one, changed(one, field), seed=240)
