"""Requests that compute a received block again, and what the ranks report of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import count
from typing import TYPE_CHECKING, Final

from headrace.engine.v1 import link_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import DeadlineExceeded, InternalError
from headrace_common.tasks import end_task
from headrace_engine.interface import BlockErrors, ReceivedBlock, Sampling
from headrace_engine.vllm.service.adapters import EngineAdapters
from headrace_engine.vllm.service.prompts import engine_prompt
from headrace_engine.vllm.service.sampling import request_errors, sampling_params

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_TIMEOUT_S: Final = 20.0
_GREEDY: Final = Sampling(temperature=0.0, max_tokens=1)


class _Reports:
    """Of one comparison. `ended` is set with the last one."""

    def __init__(self, rank_count: int) -> None:
        self._missing = rank_count
        self._errors: dict[tuple[int, int], float] = {}
        self.ended: asyncio.Future[BlockErrors | None] = asyncio.get_running_loop().create_future()

    def add(self, message: link_pb2.BlocksCompared) -> None:
        """A message of a rank, or of the scheduler without layers."""
        if self.ended.done():
            return
        if not message.layers:
            self.ended.set_result(None)
            return
        for layer in message.layers:
            for head, error in enumerate(layer.head_errors, layer.first_head):
                key = layer.layer, head
                self._errors[key] = max(error, self._errors.get(key, 0.0))
        self._missing -= 1
        if not self._missing:
            self.ended.set_result(self._errors)


class BlockComparisons:
    """One event loop calls all methods."""

    def __init__(self, rank_count: int) -> None:
        self._rank_count = rank_count
        self._ids = count(1)
        self._reports: dict[str, _Reports] = {}

    def reported(self, message: link_pb2.BlocksCompared) -> None:
        """The link's callback. Ignores comparisons that have ended."""
        reports = self._reports.get(message.comparison_id)
        if reports is not None:
            reports.add(message)

    async def run(
        self, llm: AsyncLLM, adapters: EngineAdapters, block: ReceivedBlock
    ) -> BlockErrors | None:
        """See Engine.compare_block."""
        name = f"comparison-{next(self._ids)}"
        reports = self._reports[name] = _Reports(self._rank_count)
        with adapters.used(block.adapter) as lora_request:
            params = sampling_params(
                _GREEDY, None, compares=(name, block.block_id), priority=Priority.LOW
            )
            prompt = await engine_prompt(llm, block.token_ids, block.cache_salt, block.images)
            outputs = llm.generate(prompt, params, name, lora_request=lora_request)
            computing: asyncio.Task[None] | None = None

            async def compute() -> None:
                async with aclosing(outputs):
                    async for _ in outputs:
                        pass

            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    computing = asyncio.create_task(compute())
                    # The scheduler may drop it before it runs.
                    while not (computing.done() or reports.ended.done()):
                        await asyncio.wait(
                            (computing, reports.ended), return_when=asyncio.FIRST_COMPLETED
                        )
                    if not reports.ended.done():
                        await computing
                    return await reports.ended
            except TimeoutError:
                raise DeadlineExceeded(f"{name} did not end in {_TIMEOUT_S:g} s") from None
            except request_errors() as error:
                raise InternalError(f"vLLM rejects {name}: {error}") from error
            finally:
                del self._reports[name]
                await end_task(computing)
