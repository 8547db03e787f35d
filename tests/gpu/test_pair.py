"""Prefill and decode with vLLM on one CUDA device, compared with vLLM alone. Slow: engines compile and load."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.pair import LENGTHS, PairResult, Tokens
from tests.vllm.jobs import run_job

MODEL = "models/tiny-llama"
# Kernels for a chunk of a prompt and for a single token round differently.
NEAR_TIE = 0.02

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


def require_device(model: Path) -> None:
    """Skips the test without a CUDA device, vLLM or the model folder."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        pytest.skip("there is no CUDA device" if built else "this torch is built without CUDA")
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    if not model.is_dir():
        pytest.skip(f"the model folder {model} is missing: scripts/make_tiny_model.py makes it")


@pytest.fixture(scope="module", autouse=True)
def _require_device() -> None:
    require_device(Path(MODEL))


def tokens(values: dict[str, Any]) -> Tokens:
    return Tokens(values["token_ids"], [[(t, p) for t, p in e] for e in values["likeliest"]])


def measured(**settings: object) -> PairResult:
    found = run_job("tests.gpu.pair:measure", model=MODEL, **settings)
    lists = {
        name: [tokens(values) for values in found[name]]
        for name in ("plain", "split", "after_first")
    }
    return PairResult(found["session"], **lists)


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
    ("dtype", "eager", "engine_args"),
    [
        # On CUDA, vLLM plans steps ahead unless its user turns that off.
        pytest.param("float32", True, "", id="eager"),
        pytest.param("float32", True, "--no-async-scheduling", id="one-at-a-time"),
        pytest.param("bfloat16", False, "", id="graphs"),
    ],
)
def test_tokens_equal_plain_vllm(dtype: str, eager: bool, engine_args: str) -> None:
    result = measured(dtype=dtype, enforce_eager=eager, gpu_direct=True, engine_args=engine_args)
    assert len(result.plain) == len(LENGTHS)
    for length, plain, split, after_first in zip(
        LENGTHS, result.plain, result.split, result.after_first, strict=True
    ):
        assert len(plain.token_ids) == 16
        assert not differ(plain, split), f"{length} tokens"
        assert not differ(plain, after_first), f"{length} tokens, the first from prefill"


def test_staged_on_request() -> None:
    result = measured(dtype="float32", enforce_eager=True, gpu_direct=False)
    assert "landing=" in result.session
    for plain, split in zip(result.plain, result.split, strict=True):
        assert not differ(plain, split)
