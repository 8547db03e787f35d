"""Hidden states in a rank, with the tensors of a processor and without an engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM


def batch_of(*drafts: int) -> Any:
    """A batch of requests r0, r1 and so on, of which each verifies so many drafts."""
    ids = [f"r{number}" for number in range(len(drafts))]
    return SimpleNamespace(
        req_ids=ids,
        req_id_to_index={name: number for number, name in enumerate(ids)},
        # vLLM has a list for each request that the batch has room for.
        spec_token_ids=[[7] * count for count in drafts] + [[]],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_requests_row_follows_those_of_its_drafts(dtype: torch.dtype) -> None:
    from headrace_engine.vllm.rank.hidden_states import copy_row

    rows = torch.arange(18, dtype=dtype).reshape(6, 3)
    for request_id, row in (("r0", 0), ("r1", 3), ("r2", 5)):
        data = copy_row(batch_of(0, 2, 1), rows, request_id)()
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=dtype), rows[row])


def test_rows_of_another_batch_are_an_error() -> None:
    from headrace_engine.vllm.rank.hidden_states import copy_row

    with pytest.raises(RuntimeError, match="4 hidden states where 3"):
        copy_row(batch_of(0, 1), torch.zeros(4, 3), "r0")


@pytest.fixture
def on_last_stage(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, in a process that is the only rank, without a listener afterwards."""
    from headrace_engine.vllm.rank import hidden_states

    monkeypatch.setattr(hidden_states, "_listener", None)
    monkeypatch.setattr(hidden_states, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    monkeypatch.setattr(hidden_states, "tensor_parallel_rank", lambda: 0)
    return hidden_states


class FirstBatch:
    def __init__(self, *_: object) -> None:
        pass

    def replace(self, prompt: list[int], params: object) -> list[int]:
        return prompt


def test_a_step_is_watched_and_a_first_token_beside_it_is_not(
    on_last_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of both roles has both."""
    import msgspec
    from vllm.sampling_params import SamplingParams

    monkeypatch.setattr(on_last_stage, "FirstBatch", FirstBatch)
    seen: list[bytes] = []

    def listener(reader_of: Callable[[str], Callable[[], bytes]]) -> None:
        seen.append(reader_of("r1")())

    def sampler(logits: torch.Tensor, prompt: list[int]) -> Any:
        assert prompt == [4, 5]
        return SimpleNamespace(
            sampled_token_ids=logits.argmax(-1, keepdim=True), logprobs_tensors=None
        )

    head = torch.eye(3)
    worker = on_last_stage.HiddenStates()
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    worker.model_runner = SimpleNamespace(
        model=SimpleNamespace(compute_logits=lambda rows: rows @ head),
        input_batch=batch_of(0, 0),
        device=torch.device("cpu"),
        lora_config=None,
        sampler=sampler,
    )
    on_last_stage.listen(listener)
    worker.headrace_watch_hidden_states()
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(worker.model_runner.model.compute_logits(rows), rows)
    assert seen == [rows[1].numpy().tobytes()]
    params = msgspec.msgpack.encode(SamplingParams(temperature=0.0))
    state = torch.tensor([0.0, 1.0, 0.0]).numpy().tobytes()
    assert worker.headrace_first_token(state, [4, 5], params, b"", ()) == (1, [], [])
    # Only the first and the last token may begin the answer.
    allowed = (0b101).to_bytes(4, "little")
    state = torch.tensor([0.0, 1.0, 0.5]).numpy().tobytes()
    assert worker.headrace_first_token(state, [4, 5], params, allowed, ()) == (2, [], [])
    assert len(seen) == 1
