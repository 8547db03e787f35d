"""An engine with its tensor-parallel ranks on two hosts, to and from one on one host."""

from __future__ import annotations

import os

import pytest

from tests.security.network_namespaces import require_network_namespaces
from tests.security.other_host import HERE
from tests.vllm.conftest import RunJob
from tests.vllm.nodes import PROMPTS, Ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]
OTHER = "10.77.0.2"


@pytest.mark.parametrize(
    ("role", "kill", "cause"),
    [
        ("prefill", "other host", f"rank 1 on {OTHER}"),
        ("decode", "engine", "scheduler"),
    ],
)
def test_two_hosts_answer_as_one_and_end_together(
    run_job: RunJob, role: str, kill: str, cause: str
) -> None:
    require_network_namespaces("nsenter")
    if os.geteuid() != 0:
        pytest.skip("the job's own network namespace needs root")
    found = Ended(**run_job("tests.vllm.nodes:measure", model="tiny-llama", role=role, kill=kill))
    print(found)
    # vLLM's communicator in shared memory is off. Each rank has the address of its own host.
    assert found.communicators == ["torch.distributed"] * 2
    assert found.hosts == [HERE, OTHER]
    assert len(found.plain) == len(PROMPTS)
    assert all(found.plain)
    assert found.split == found.plain
    # Decode may detect a lost rank of prefill before prefill's service does.
    assert "vLLM has ended" in found.request_error or "stream of rank 1" in found.request_error
    assert f"vLLM has ended: the engine's {cause} has ended" in found.engine_error
    if kill == "engine":
        assert found.node_status == 1
        assert "the engine on the host with node_rank 0 has ended" in found.node_log
    assert found.left == []
