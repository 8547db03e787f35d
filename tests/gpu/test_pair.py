"""Prefill and decode with vLLM on one device, compared with vLLM alone. Slow: engines compile and load."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.devices import CPU, CUDA, require
from tests.gpu.pair import LENGTHS, PairResult, Tokens
from tests.vllm.jobs import run_job
from tests.vllm.pair import DRAFTS, STEPS_AHEAD

MODEL = "models/tiny-llama"
# Kernels for a chunk of a prompt and for a single token round differently.
NEAR_TIE = 0.02
GPU = pytest.mark.gpu

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def require_engines(device: str, model: Path) -> None:
    """Skips the test without the device, vLLM or the model folder."""
    require(device)
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if not model.is_dir():
        pytest.skip(f"the model folder {model} is missing: scripts/make_tiny_model.py makes it")


def tokens(values: dict[str, Any]) -> Tokens:
    return Tokens(values["token_ids"], [[(t, p) for t, p in e] for e in values["likeliest"]])


def measured(model: str = MODEL, **settings: object) -> PairResult:
    found = run_job("tests.gpu.pair:measure", model=model, **settings)
    lists = {
        name: [tokens(values) for values in found[name]]
        for name in ("plain", "split", "after_first", "from_hidden_state")
    }
    return PairResult(found["session"], found["schedulers"], found["graphs"], **lists)


def differ(plain: Tokens, other: Tokens) -> str:
    """The first difference of the answers. Empty without one, and for a near tie."""
    pairs = list(zip(plain.token_ids, other.token_ids, strict=True))
    apart = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs]
    if not apart:
        return ""
    at = apart[0]
    likeliest = dict(plain.likeliest[at])
    ours, theirs = pairs[at]
    lead = likeliest[ours] - likeliest.get(theirs, float("-inf"))
    return "" if lead < NEAR_TIE else f"token {at} is {theirs}, not {ours}, which leads by {lead:g}"


@pytest.mark.parametrize(
    ("device", "dtype", "eager", "engine_args", "kv_cache_gib"),
    [
        (CPU, "float32", True, STEPS_AHEAD, 1.0),
        # On CUDA, vLLM plans steps ahead unless its user turns that off.
        pytest.param(CUDA, "float32", True, "", 1.0, id="eager", marks=GPU),
        pytest.param(
            CUDA, "float32", True, "--no-async-scheduling", 1.0, id="one-at-a-time", marks=GPU
        ),
        pytest.param(CUDA, "bfloat16", False, "", 1.0, id="graphs", marks=GPU),
        pytest.param(CUDA, "bfloat16", False, "", 0.0, id="shares-of-the-memory", marks=GPU),
        pytest.param(CUDA, "float32", True, DRAFTS, 1.0, id="drafts", marks=GPU),
        pytest.param(CUDA, "bfloat16", False, DRAFTS, 1.0, id="drafts-with-graphs", marks=GPU),
    ],
)
def test_tokens_equal_plain_vllm(
    device: str, dtype: str, eager: bool, engine_args: str, kv_cache_gib: float
) -> None:
    require_engines(device, Path(MODEL))
    result = measured(
        dtype=dtype,
        enforce_eager=eager,
        gpu_direct=True,
        engine_args=engine_args,
        kv_cache_gib=kv_cache_gib,
    )
    ahead = "no-async" not in engine_args
    names = ["BudgetAsyncScheduler" if ahead else "BudgetScheduler"] * 2
    assert result.schedulers == names
    assert [mode == "NONE" for mode in result.graphs] == [eager, eager], result.graphs
    assert len(result.plain) == len(LENGTHS)
    for length, plain, split, after_first, from_hidden_state in zip(
        LENGTHS,
        result.plain,
        result.split,
        result.after_first,
        result.from_hidden_state,
        strict=True,
    ):
        assert len(plain.token_ids) == 16
        assert not differ(plain, split), f"{length} tokens"
        assert not differ(plain, after_first), f"{length} tokens, the first from prefill"
        assert not differ(plain, from_hidden_state), f"{length} tokens, from a hidden state"


@pytest.mark.gpu
def test_staged_on_request() -> None:
    require_engines(CUDA, Path(MODEL))
    result = measured(dtype="float32", enforce_eager=True, gpu_direct=False)
    assert "landing=" in result.session
    for plain, split in zip(result.plain, result.split, strict=True):
        assert not differ(plain, split)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "engine_args"),
    [
        ("models/tiny-gemma3", ""),
        ("models/tiny-lfm2", ""),
        # On Hopper, vLLM's own choice is FlashInfer's kernel, also where FlashInfer is not installed.
        ("models/tiny-qwen3-next", "--gdn-prefill-backend triton"),
    ],
)
def test_windows_and_states_equal_plain_vllm(model: str, engine_args: str) -> None:
    require_engines(CUDA, Path(model))
    result = measured(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        gpu_direct=True,
        engine_args=engine_args,
        block_size=0,
        num_gpu_blocks_override=0,
    )
    for length, plain, split in zip(LENGTHS, result.plain, result.split, strict=True):
        assert not differ(plain, split), f"{length} tokens"
