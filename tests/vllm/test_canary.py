"""The canary with real engines: planted faults, honest pairs, and a whole deployment."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_engine.vllm.model_folder import read_model_folder
from headrace_engine.vllm.rank.comparison import head_errors
from tests.suite.deployment import Suite, greedy, suite
from tests.vllm.canary import Found, Honest, Overwritten, change_weights, prompt_of_blocks
from tests.vllm.conftest import RunJob
from tests.vllm.pair import BLOCK_TOKENS
from tests.waiting import until

JOB = "tests.vllm.canary"
MODEL = "tiny-llama-deep"
FP8 = "--kv-cache-dtype fp8"
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("fault", "model", "layer", "engine_args"),
    [("heads", MODEL, 5, ""), ("stale", MODEL, 0, ""), ("scale", "tiny-llama", 1, FP8)],
)
def test_a_fault_in_what_has_arrived_is_found_in_its_layer(
    run_job: RunJob, fault: str, model: str, layer: int, engine_args: str
) -> None:
    found = Found(
        **run_job(
            f"{JOB}:planted_in_memory",
            model=model,
            fault=fault,
            layer=layer,
            engine_args=engine_args,
            dtype="bfloat16" if engine_args else "float32",
        )
    )
    assert not found.before
    assert found.requests == 2
    assert found.layers == [layer, layer]
    assert f"layer {layer}, head {found.heads[1]}" in found.detail


@pytest.mark.parametrize(
    ("fault", "layer", "dtype"),
    [("rope", 0, "float32"), ("rope", 0, "bfloat16"), ("weights", 4, "float32")],
)
def test_another_model_that_passes_the_fingerprint_is_found_from_its_start(
    run_job: RunJob, fault: str, layer: int, dtype: str
) -> None:
    found = Found(
        **run_job(f"{JOB}:planted_in_model", model=MODEL, fault=fault, layer=layer, dtype=dtype)
    )
    assert found.requests == 2
    assert found.layers == [layer, layer]


def test_writes_into_received_and_into_cached_blocks_are_found(run_job: RunJob) -> None:
    found = Overwritten(**run_job(f"{JOB}:overwritten", model=MODEL))
    assert set(found.honest) == {"same"}
    assert found.written == ["overwritten"]
    # The second one rejects the only worker that has a lease.
    assert found.reused == ["quarantined"]
    assert found.rejected == ["prefill"]


@pytest.mark.parametrize(
    ("dtype", "ranks", "engine_args"),
    [("float32", 1, ""), ("bfloat16", 2, ""), ("bfloat16", 1, FP8)],
)
def test_honest_requests_raise_no_alarm(
    run_job: RunJob, dtype: str, ranks: int, engine_args: str
) -> None:
    """Chunks, shared prefixes and blocks of any place."""
    honest = Honest(
        **run_job(
            f"{JOB}:honest",
            model="tiny-llama" if engine_args else MODEL,
            requests=30,
            dtype=dtype,
            ranks=ranks,
            engine_args=engine_args,
        )
    )
    assert honest.alarms == []
    assert honest.blocks > 60
    assert honest.dropped == 0


@pytest.mark.usefixtures("vllm_environment")
def test_a_fault_in_the_small_values_of_a_head_counts_as_much() -> None:
    """V is often much smaller than K. Some kernels keep them in other columns, and some in other rows."""
    import torch

    generator = torch.Generator().manual_seed(1)
    computed = torch.randn((3, 32, 64), generator=generator)
    computed[:, :, 32:] /= 30.0
    assert head_errors(computed, computed) == [0.0, 0.0, 0.0]
    received = computed.clone()
    received[1, :, 32:] = computed[2, :, 32:]
    for columns in ((0, 1, 2), (0, 2, 1)):
        same, other, untouched = head_errors(received.permute(columns), computed.permute(columns))
        assert (same, untouched) == (0.0, 0.0)
        assert other > 0.6
    received[0, 0, 0] = torch.nan
    assert head_errors(received, computed)[0] == math.inf
    # Broken weights make no numbers on both sides.
    assert head_errors(received, received)[0] == 0.0
    zeros = torch.zeros((1, 4, 4))
    assert head_errors(zeros, zeros) == [0.0]


def has_differed(it: Suite, times: int) -> bool:
    log = it.child("decode-0").spec.log_file.read_text()
    return log.count("is not what this worker computes: layer") >= times


@pytest.mark.skipif(not Path("models", MODEL).is_dir(), reason="make test-vllm makes the model")
async def test_a_deployment_goes_on_with_local_prefill_and_names_the_pair(tmp_path: Path) -> None:
    """A prefill worker with other weights, which pass the fingerprint."""
    model = Path("models", MODEL)
    changed = tmp_path / "changed" / MODEL
    shutil.copytree(model, changed)
    change_weights(changed, layer=3)
    one, other = (read_model_folder(str(folder), 0) for folder in (model, changed))
    assert one.fingerprint == other.fingerprint
    settings = (
        ("decode", "canary_interval_requests", "1"),
        *((role, "block_size", str(BLOCK_TOKENS)) for role in ("prefill", "decode")),
    )
    async with suite(
        tmp_path, engine="vllm", model=str(model), prefill_count=1, settings=settings
    ) as it:
        await it.terminate("prefill-0")
        await it.add("prefill-1", "prefill-0", f"--model={changed}")
        await it.wait_joined(1, 1)
        local = inference_pb2.PREFILL_PLACEMENT_LOCAL
        remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
        for count in (1, 2):
            outcome = await it.ask(greedy(prompt_of_blocks(count), 4, remote), 90)
            assert outcome.last.timing.prefill_worker_id == "prefill-1"
            await until(partial(has_differed, it, count), 20.0)
        status = await it.status("decode-0")
        (named,) = status.distrusted_workers
        assert named.worker_id == "prefill-1"
        assert "layer 3, head" in named.detail

        async def ask() -> bool:
            prompt = prompt_of_blocks(9)
            outcome = await it.ask(greedy(prompt, 4, remote), 90)
            assert outcome.token_ids
            if outcome.last.timing.prefill_worker_id or outcome.last.timing.attempts > 1:
                # The router still paired them, and decode rejected the transfer.
                return False
            plain = await it.ask(greedy(prompt, 4, local), 90)
            assert outcome.token_ids == plain.token_ids
            trace = await it.trace(outcome.trace_id)
            assert "layer 3, head" in str(trace)
            return True

        # The router reads the status a moment later.
        await until(ask, 30.0)
