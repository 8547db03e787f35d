"""Drafts change no token, and a draft model drafts after a hand-over what it drafts on one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import jobs
from tests.vllm.conftest import RunJob
from tests.vllm.draft_heads import Heads
from tests.vllm.drafts import ALONE, CONTEXT_TOKENS, LENGTHS, TOGETHER, WAYS
from tests.vllm.drafts import SAMPLING as DRAFTED
from tests.vllm.pair import STEPS_AHEAD, prompt_of
from tests.vllm.speculation import SAMPLING

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

JOB = "tests.vllm.drafts:answers"
MODEL = "models/tiny-llama"
LATENT_MODEL = "models/tiny-deepseek-v3"
# Prefill chooses the first token. Then EAGLE and MTP heads have read it too.
HANDED_OVER = [way for way in WAYS if way not in ALONE and way != "split"]
# Prefill has the whole blocks of each prompt.
CACHED_BLOCKS = [(length - 1) // 32 * 32 for length in LENGTHS]


def test_decode_may_draft_tokens_from_the_request(run_job: RunJob) -> None:
    result = run_job("tests.vllm.speculation:measure", model="tiny-llama")
    assert all(len(token_ids) == SAMPLING.max_tokens for token_ids in result["plain"])
    for way in ("split", "after_first", "together"):
        assert result[way] == result["plain"], way
    # Accepted drafts: an output has several tokens.
    assert sum(result["steps"]) < 0.8 * sum(map(len, result["split"]))


def require_plain_tokens(found: dict[str, Any], model: str, **more: bool) -> None:
    """All answers are those of vLLM alone, which drafts nothing."""
    prompts = [prompt_of(length, seed=4) for length in LENGTHS]
    plain = jobs.run_job(
        "tests.vllm.plain:greedy_tokens",
        model=model,
        prompts=prompts,
        max_tokens=[DRAFTED.max_tokens] * len(prompts),
        **more,
    )
    assert found["tokens"].keys() == {*WAYS, TOGETHER}
    for way, tokens in found["tokens"].items():
        assert tokens == plain["tokens"], way
    assert found["left_blocks"] == [0, 0]


def require_all_accepted(found: dict[str, Any], drafts: int) -> None:
    """Each step has all drafts. The first one has none, and the last one may have less room."""
    for way, answers in found["steps"].items():
        for steps in answers:
            assert steps[0] == 1, way
            assert set(steps[1:-1]) == {1 + drafts}, way


def require_equal_drafts(found: dict[str, Any], *ways: str) -> None:
    """In these ways, each step has as many tokens as on one engine, so the draft has found the same ones."""
    for way in ways:
        alone = "alone" if way == "split" else "alone after first"
        assert found["steps"][way] == found["steps"][alone], way


@pytest.mark.core
def test_a_draft_model_continues_after_a_hand_over(run_job: RunJob) -> None:
    """It drafts what it drafts on one engine. A model that drafts for itself has every draft accepted."""
    drafts = 3
    found = run_job(
        JOB,
        model="tiny-llama",
        speculation={"method": "draft_model", "model": MODEL, "num_speculative_tokens": drafts},
        ways=["alone", "split", "after first"],
        lengths=LENGTHS[:3],
    )
    assert found["tokens"].keys() == {"alone", "split", "after first", TOGETHER}
    for way, tokens in found["tokens"].items():
        assert tokens == found["tokens"]["alone"], way
    require_all_accepted(found, drafts)
    assert found["left_blocks"] == [0, 0]


@pytest.mark.parametrize(
    ("prefill", "decode", "args"),
    [
        ({}, {}, ""),
        ({}, {}, STEPS_AHEAD),
        ({"tensor_parallel_size": 2}, {}, ""),
    ],
    ids=["in turn", "planned ahead", "two ranks to one"],
)
def test_a_model_that_drafts_for_itself_has_every_draft_accepted(
    run_job: RunJob, prefill: dict[str, Any], decode: dict[str, Any], args: str
) -> None:
    drafts = 3
    found = run_job(
        JOB,
        model="tiny-llama",
        speculation={"method": "draft_model", "model": MODEL, "num_speculative_tokens": drafts},
        prefill=prefill,
        decode=decode,
        args=args,
    )
    require_plain_tokens(found, MODEL)
    assert found["groups"] == [["attention", 4, 4], ["draft-attention", 4, 4]]
    assert ";draft=draft_model:tiny-llama:" in found["model"]
    require_all_accepted(found, drafts)
    assert found["prefill_cached"]["prefill has it"] == CACHED_BLOCKS


def test_a_draft_model_may_have_other_heads(run_job: RunJob) -> None:
    found = run_job(
        JOB,
        model="tiny-llama",
        speculation={
            "method": "draft_model",
            "model": "models/tiny-llama-mqa",
            "num_speculative_tokens": 2,
        },
        prefill={"max_num_batched_tokens": 256},
    )
    require_plain_tokens(found, MODEL)
    assert found["groups"] == [["attention", 4, 4], ["draft-attention", 4, 1]]
    require_equal_drafts(found, "split", *HANDED_OVER)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_draft_what_they_draft_on_one_engine(tmp_path: Path, method: str) -> None:
    heads = Heads(Path("models/tiny-llama-deep"), tmp_path)
    model = heads.target()
    head = heads.eagle() if method == "eagle" else heads.eagle3()
    speculation = {"method": method, "model": head, "num_speculative_tokens": 3}
    found = jobs.run_job(JOB, model=model, speculation=speculation)
    require_plain_tokens(found, model)
    assert found["groups"] == [["attention", 12, 4], ["draft-attention", 1, 4]]
    require_equal_drafts(found, *HANDED_OVER)
    # Some drafts are accepted.
    assert max(map(max, found["steps"]["alone"])) > 1


def test_a_model_with_an_mtp_layer_drafts_what_it_drafts_on_one_engine(tmp_path: Path) -> None:
    model = Heads(Path(LATENT_MODEL), tmp_path).with_mtp()
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    # On processors, vLLM computes a prompt with latent attention in one step.
    whole = {"max_num_batched_tokens": CONTEXT_TOKENS}
    found = jobs.run_job(
        JOB,
        model=model,
        speculation=speculation,
        prefill=whole,
        decode=whole,
        mends_rotation=True,
    )
    require_plain_tokens(found, model, mends_rotation=True)
    assert found["groups"] == [["attention", 3, 1], ["draft-attention", 1, 1]]
    assert found["model"].endswith(";draft=mtp")
    require_equal_drafts(found, *HANDED_OVER)
    assert max(map(max, found["steps"]["alone"])) > 1
