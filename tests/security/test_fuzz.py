"""The fuzz runner on a service of its own: short by default, the full size when slow tests are asked for."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.security.fuzz import RSS_GROWTH_MIB_MAX, Findings, mutated_cases, schema_cases
from tests.security.raw_http import RawClient
from tests.security.service_child import ROOT, Child, running_service

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with running_service(tmp_path_factory.mktemp("service")) as child:
        yield child


def test_mutated_requests_meet_no_fault(child: Child, seed: int) -> None:
    findings = Findings()
    client = RawClient("127.0.0.1", child.port)
    mutated_cases(client, findings, 1500, Random(seed))
    assert client.request("GET", "/livez") == 200
    client.close()
    assert findings.faults == []
    assert child.tracebacks() == 0
    assert findings.statuses[200] > 100, "most requests never got past the door"
    assert findings.statuses[400] > 100 and findings.statuses[422] > 100


def test_cases_of_the_openapi_document_meet_no_fault(child: Child, seed: int) -> None:
    findings = Findings()
    client = RawClient("127.0.0.1", child.port)
    schema_cases(client, findings, 100, seed, operations_max=12)
    client.close()
    assert findings.requests >= 90
    assert findings.faults == []
    assert child.tracebacks() == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_requests_meet_no_fault_and_take_no_memory(seed: int) -> None:
    command = [
        sys.executable,
        str(Path("tests") / "security" / "fuzz.py"),
        "--requests",
        "10000",
        "--seed",
        str(seed),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    summary = msgspec.json.decode(run.stdout.strip().splitlines()[-1])
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert summary["requests"] >= 10_000
    assert (summary["status_5xx"], summary["tracebacks"]) == (0, 0)
    assert summary["rss_growth_mib"] < RSS_GROWTH_MIB_MAX
