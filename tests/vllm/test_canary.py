"""Engines that would name the same tokens otherwise are told so, with vLLM's own hash."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from engine_adapters.namespace import Namespace, Part, Refused, Registered, register
from engine_adapters.vllm.describe import HASHES, describe, hash_holds
from engine_adapters.vllm.layout import LayoutRefused
from engine_adapters.vllm.settings import Settings
from metaservice.client import ClientError
from tests.vllm.config_house import cache_configs, engine_config, llama_specs

pytestmark = pytest.mark.vllm

PARTS = (Part("tp0", 1),)


def described(algorithm: str = "sha256") -> Namespace:
    config = engine_config()
    scheduler, _ = cache_configs(config, llama_specs())
    config.cache_config.prefix_caching_hash_algo = algorithm
    return describe(config, scheduler, Settings(group="g"))


class Service:
    """Keeps what was registered, and refuses nothing by itself: that is the real service's test."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def put_instance(self, id: str, group: str, fingerprint: Mapping[str, Any], **_more: Any) -> Any:
        self.known[id] = {"fingerprint": dict(fingerprint), "group": group, "retiring": False}

    def get_json(self, path: str) -> Any:
        try:
            return self.known[path.rpartition("/")[2]]
        except KeyError:
            raise ClientError("instance_unknown", status=404) from None


def of_process(seed: str | None) -> Namespace:
    """The namespace of an engine in a process of its own, where PYTHONHASHSEED is this."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    program = (
        "from tests.vllm.test_canary import described\n"
        "import msgspec; print('SAID', msgspec.json.encode(described()).decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said = next(line for line in run.stdout.splitlines() if line.startswith("SAID "))
    return msgspec.json.decode(said.removeprefix("SAID "), type=Namespace)


def test_row20_processes_with_other_seeds_meet_and_the_second_is_refused() -> None:
    """They would share an instance and never a block: zero hits, and nobody would know why."""
    first, other = of_process(None), of_process("7")
    assert first.digest() == other.digest()
    service = Service()

    def ask(namespace: Namespace) -> Any:
        return register(service, namespace, group="g", prefix="vllm", parts=PARTS)

    assert isinstance(ask(first), Registered)
    refused = ask(other)
    assert isinstance(refused, Refused) and set(refused.fields) == {"canary", "hash_seed"}
    assert first.canary in refused.reason and other.canary in refused.reason
    # this process has no seed either
    assert isinstance(ask(described()), Registered)


@pytest.mark.parametrize("algorithm", sorted(HASHES))
def test_the_canary_is_vllms_own_hash(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    namespace = described(algorithm)
    assert len(bytes.fromhex(namespace.canary)) == namespace.key_length == HASHES[algorithm]
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    assert len(kv_cache_utils.NONE_HASH) == namespace.key_length
    assert hash_holds(namespace)
    monkeypatch.setenv("PYTHONHASHSEED", "6")
    kv_cache_utils.init_none_hash(function)
    assert not hash_holds(namespace)
    assert described(algorithm).canary != namespace.canary
    assert described(algorithm).digest() == namespace.digest()


def test_before_vllm_set_its_hash_up_nothing_is_held_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    assert hash_holds(described())


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_row20_a_random_root_in_each_process_is_refused(
    monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(LayoutRefused, match="set PYTHONHASHSEED"):
        described(algorithm)
