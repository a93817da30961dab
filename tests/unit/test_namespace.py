"""The namespace: every field tells instances apart, or is compared by the service."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_adapters.namespace import COMPARED, Away, Namespace, Refused, Registered, register
from engine_adapters.namespace.canary import canary
from engine_adapters.namespace.namespace import our_name
from metaservice.client import ClientError
from metaservice.core.model import Fingerprint
from tests.unit.namespace_house import PARTS, changed, make_namespace

FIELDS = Namespace.__struct_fields__
DOCUMENT = Path(__file__).parents[2] / "docs/engines/namespace.md"
KNOWN_DIGEST = "5c2ac89056db9b3adfb410788e98089f"
"""Of the namespace as the house makes it. When it changes every cache is cold after an upgrade."""


@pytest.mark.parametrize("field", FIELDS)
def test_one_field_makes_another_instance_or_is_compared(field: str) -> None:
    one = make_namespace()
    other = changed(one, field)
    assert other != one
    assert (other.digest() == one.digest()) == (field in COMPARED)
    assert other.fingerprint(PARTS) != one.fingerprint(PARTS), "the service would not see the difference"


def test_values_never_run_into_each_other() -> None:
    digests = {
        make_namespace(tenant=tenant, salt=salt).digest()
        for tenant, salt in (("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"))
    }
    assert len(digests) == 4


def test_a_patch_of_the_connector_keeps_the_instance() -> None:
    one, other = make_namespace(), make_namespace(connector_version="1.2.9")
    assert one.digest() == other.digest() and one.fingerprint(PARTS) == other.fingerprint(PARTS)


def test_an_adapter_has_an_instance_of_its_own() -> None:
    base = make_namespace()
    assert base.digest("d1") == msgspec.structs.replace(base, adapter="d1").digest()
    assert len({base.digest(), base.digest("d1"), base.digest("d2")}) == 3
    assert base.fingerprint(PARTS, "d1")["extra"]["adapter"] == "d1"


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert make_namespace().instance_id("vllm") == "vllm-" + KNOWN_DIGEST


def test_the_fingerprint_is_one_that_the_service_takes() -> None:
    fingerprint = make_namespace().fingerprint(PARTS)
    taken = msgspec.convert(
        {**fingerprint, "groups": [{**one, "kind": 0} for one in fingerprint["groups"]]}, Fingerprint
    )
    assert (taken.hash_scheme, taken.canary, taken.extra["tp"]) == ("sha256", "ab" * 32, "2")
    assert [part.name for part in taken.parts] == ["tp0", "tp1"]
    named = {our_name(f"fingerprint.{name}") for name in fingerprint} | set(fingerprint["extra"])
    assert named >= set(FIELDS), "a field is not in the fingerprint"
    assert "s3cret" not in json.dumps(fingerprint), "a salt would stand in the views of operators"


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "m" * 513), ("revision", "a\nb"), ("groups", "g" * 4097), ("tenant", "\x7f")],
)
def test_what_the_service_would_not_take_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected at most"):
        make_namespace(**{field: value})


@pytest.mark.parametrize("prefix", ["", "-a", "a b", "a/b", "p" * 65, "ä"])
def test_a_prefix_is_the_beginning_of_a_name(prefix: str) -> None:
    with pytest.raises(ValueError, match="instance_prefix"):
        make_namespace().instance_id(prefix)


def test_the_canary_sees_root_and_function() -> None:
    def plain(parent: bytes, tokens: Any, extra: Any) -> bytes:
        return repr((parent, tuple(tokens), extra)).encode()[-64:]

    def without_extra(parent: bytes, tokens: Any, extra: Any) -> bytes:
        return plain(parent, tokens, None)

    probes = {canary(plain, b"a"), canary(plain, b"b"), canary(without_extra, b"a")}
    assert len(probes) >= 2 and canary(plain, b"a") == canary(plain, b"a")
    chained = []

    def recording(parent: bytes, tokens: Any, extra: Any) -> bytes:
        chained.append((parent, tuple(tokens), extra))
        return bytes([len(chained)])

    assert canary(recording, b"root") == "03"
    assert [parent for parent, _, _ in chained] == [b"root", b"\1", b"\2"]
    assert chained[0][2] is None and all(extra for _, _, extra in chained[1:])


class Service:
    """Answers as told."""

    def __init__(self, known: Any = None, refusal: ClientError | None = None) -> None:
        self.known = known
        self.refusal = refusal
        self.put: list[tuple[str, str]] = []
        self.publications: list[Mapping[str, Any] | None] = []
        self.quotas: list[tuple[int | None, int | None]] = []

    def put_instance(
        self,
        id: str,
        group: str,
        fingerprint: Mapping[str, Any],
        *,
        bytes_max: int | None = None,
        blocks_max: int | None = None,
        publication: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.put.append((id, group))
        self.quotas.append((bytes_max, blocks_max))
        self.publications.append(publication)

    def get_json(self, path: str) -> Any:
        if isinstance(self.known, ClientError):
            raise self.known
        if self.known is None:
            raise ClientError("instance_unknown", status=404)
        return self.known


def view(namespace: Namespace, **changes: Any) -> dict[str, Any]:
    return {
        "fingerprint": namespace.fingerprint(PARTS),
        "group": "g",
        "retiring": False,
        "publication": None,
        "quota": {"bytes": 7, "blocks": None},
        **changes,
    }


def ask(service: Service, publication: Mapping[str, Any] | None = None) -> Registered | Refused | Away:
    return register(service, make_namespace(), group="g", prefix="vllm", parts=PARTS, publication=publication)


def test_a_known_instance_is_not_put_again() -> None:
    service = Service(view(make_namespace()))
    assert isinstance(ask(service), Registered) and not service.put, "an operator's quota would be undone"


def test_a_publication_comes_with_an_instance_and_with_one_that_has_none_yet() -> None:
    wanted = {"model": "m"}
    service = Service()
    assert isinstance(ask(service, wanted), Registered)
    assert service.publications == [wanted]
    service = Service(view(make_namespace()))
    assert isinstance(ask(service, wanted), Registered)
    assert (service.publications, service.quotas) == ([wanted], [(7, None)]), "an operator's quota stays"
    service = Service(view(make_namespace(), publication={"model": "another"}))
    assert isinstance(ask(service, wanted), Registered) and not service.put, "an operator's word holds"


def test_row_06_an_engine_whose_routers_know_another_hash_is_refused_for_good() -> None:
    refusal = ClientError("hash_space_mixed", status=409, detail="i-2 hashes otherwise", field="publication")
    answer = ask(Service(refusal=refusal), {"model": "m"})
    assert isinstance(answer, Refused) and "hash" in answer.reason


def test_a_mismatch_names_every_field_with_both_values() -> None:
    other = make_namespace(canary="cd" * 32, hash_seed="other")
    answer = ask(Service(view(other)))
    assert isinstance(answer, Refused) and set(answer.fields) == {"canary", "hash_seed"}
    assert "cd" * 32 in answer.reason and "ab" * 32 in answer.reason
    ranks = view(make_namespace())
    ranks["fingerprint"]["extra"] = {**ranks["fingerprint"]["extra"], "tp": "4", "more": "x"}
    answer = ask(Service(ranks))
    assert isinstance(answer, Refused) and answer.fields == ("more", "tp")


@pytest.mark.parametrize(
    "service",
    [
        Service(ClientError("timeout")),
        Service(ClientError("overloaded", status=503)),
        Service(refusal=ClientError("group_unknown", "no group", status=404)),
        Service(refusal=ClientError("fingerprint_mismatch", status=409)),
        Service(view(make_namespace(), group="another")),
        Service(view(make_namespace(), retiring=True)),
        Service({"id": "who?"}),
        Service(["nonsense"]),
    ],
)
def test_what_may_pass_is_no_refusal(service: Service) -> None:
    answer = ask(service)
    assert isinstance(answer, Away) and answer.failure


def test_what_the_service_will_never_take_is_refused() -> None:
    wrong = ClientError(
        "invalid_fingerprint", "expected 16..64 bytes", status=422, field="fingerprint.key_length"
    )
    answer = ask(Service(refusal=wrong))
    assert isinstance(answer, Refused) and answer.fields == ("key_length",) and "16..64" in answer.reason


def test_the_documentation_has_every_field() -> None:
    rows = [row for row in DOCUMENT.read_text().splitlines() if row.startswith("| `")]
    documented = {field for row in rows for field in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == set(FIELDS)
    compared = [row for row in rows if "compared, not named" in row]
    assert {field for row in compared for field in re.findall(r"`(\w+)`", row.split("|")[1])} == COMPARED
