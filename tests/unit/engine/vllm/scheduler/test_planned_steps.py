"""The steps of vLLM, as its scheduler's hooks show them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace_common.time_model.model import Step
from headrace_engine.vllm.scheduler.load import step_of


def output(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """A step, with the computed tokens and the tokens of each request."""
    new, cached = new or {}, cached or {}
    counts = {name: count for name, (_, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed)
            for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        preempted_req_ids=preempted,
    )


def test_answers_count_with_their_context() -> None:
    step = step_of(output({"a": (99, 1)}, {"b": (10, 1), "c": (20, 1)}))
    assert step == Step(running=3, context_tokens=129)


def test_a_part_of_a_prompt_attends_to_what_is_before_it() -> None:
    assert step_of(output(cached={"a": (512, 256)})) == Step(256, 256 * (512 + 128))


def test_prompts_and_answers_share_a_step() -> None:
    step = step_of(output({"a": (0, 100)}, {"b": (300, 1)}))
    assert step == Step(100, 100 * 50, 1, 300)


def test_prompts_of_others_are_sent() -> None:
    step = step_of(output({"a": (0, 100), "b": (0, 60)}), sending={"b"})
    assert (step.prompt_tokens, step.sent_tokens) == (160, 60)


def test_drafts_make_no_prompt_of_an_answer() -> None:
    step = step_of(output(cached={"a": (300, 4)}, drafts={"a": [1, 2, 3]}))
    assert step == Step(running=1, context_tokens=300)
