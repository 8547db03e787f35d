"""A job: ranks of both engines report requests that vLLM does not await, in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.vllm.pair import prompt_of, running_pair

_PROMPTS = 3


@dataclass(slots=True)
class Result:
    """Of each prompt, the answer of decode alone, and that of the pair."""

    plain: list[list[int]] = field(default_factory=list)
    handed_over: list[list[int]] = field(default_factory=list)
    left_blocks: list[int] = field(default_factory=list)


def report_wrong_ids() -> None:
    """In each step, ranks of this process and of its forks also report an unknown request and all earlier ones."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )

    from headrace_engine.vllm.connector import HeadraceConnector

    true_results = HeadraceConnector.get_transfer_results
    earlier = {"unknown"}

    def results(connector: Any, ended: set[str]) -> Any:
        found = true_results(connector, ended)
        earlier.update(found.finished_sending, found.finished_recving)
        return KVConnectorTransferResults(
            finished_sending=found.finished_sending | earlier,
            finished_recving=found.finished_recving | (earlier - found.finished_sending),
            failed_recving=found.failed_recving,
        )

    HeadraceConnector.get_transfer_results = results  # type: ignore[method-assign, assignment]


async def answers(model: str) -> Result:
    """Engines are forked from this process, and report as it does."""
    report_wrong_ids()
    result = Result()
    async with running_pair(prefill={"model": model}, decode={"model": model}) as pair:
        for seed in range(_PROMPTS):
            prompt = prompt_of(100, seed)
            result.plain.append((await pair.plain(prompt)).token_ids)
            await pair.reset()
            result.handed_over.append((await pair.split(prompt)).token_ids)
        await pair.reset()
        result.left_blocks = await pair.left_blocks()
    return result
