"""Requests that compute a received block again, as a scheduler sees them. Uses no vLLM types at run time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_plan import BlockComparison
from headrace_engine.connector.transfers import ScheduledRequest
from headrace_engine.vllm.compat import cached_block, caches_block
from headrace_engine.vllm.settings import COMPARISON_KEY

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

# A draft makes vLLM compute the block before the last one too.
_COMPUTED_BLOCKS_MAX = 2


@dataclass(frozen=True, slots=True)
class _Compared:
    comparison_id: str
    received_block: int | None
    """None where no block is cached with the tokens."""
    request: Request


class ComparisonPlanner:
    """The scheduling thread calls all methods.

    The prompt of such a request ends with the block. vLLM finds the blocks before in its prefix cache. It computes the
    last one into a block of its own, since it needs the last token's logits. A comparison is dropped when the
    received block or its prefix is not cached any more.
    """

    def __init__(self, group: LayerGroup, on_dropped: Callable[[str], None]) -> None:
        """`group`: the layers that are compared. `on_dropped` gets the comparison."""
        self._group = group
        self._on_dropped = on_dropped
        self._manager: KVCacheManager | None = None
        self._waiting: dict[str, _Compared] = {}
        self._dropped: set[str] = set()

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Sets vLLM's blocks, once."""
        self._manager = kv_cache_manager

    def request_added(self, request: Request) -> None:
        """The scheduler has a new request, which may be of another kind."""
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        if COMPARISON_KEY in extra:
            assert self._manager is not None
            comparison_id, received_block = extra[COMPARISON_KEY]
            if received_block is None:
                number = request.num_prompt_tokens // self._group.block_tokens - 1
                received_block = cached_block(self._manager, request, number, self._group.index)
            self._waiting[request.request_id] = _Compared(comparison_id, received_block, request)

    def may_run(self, request_id: str, cached_tokens: int) -> bool:
        """Whether the request computes few tokens. If not, its comparison is dropped: the service aborts it."""
        compared = self._waiting.get(request_id)
        if compared is not None:
            missing_tokens = compared.request.num_tokens - cached_tokens
            if missing_tokens > _COMPUTED_BLOCKS_MAX * self._group.block_tokens:
                self._drop(request_id)
        return request_id not in self._dropped

    def plan(self, scheduled: Iterable[ScheduledRequest]) -> list[BlockComparison]:
        """The comparisons of a step that computes the last tokens of such requests."""
        if not self._waiting:
            return []
        found: list[BlockComparison] = []
        for one in scheduled:
            compared = self._waiting.get(one.request_id)
            if compared is None:
                continue
            prompt_tokens = compared.request.num_prompt_tokens
            first_token = prompt_tokens - self._group.block_tokens
            if one.computed_tokens + one.step_tokens < prompt_tokens:
                continue
            comparison = self._comparison(compared, first_token // self._group.block_tokens)
            # Of a block that vLLM had in part, nothing is known.
            if comparison is None or one.computed_tokens > first_token:
                self._drop(one.request_id)
            else:
                found.append(comparison)
                del self._waiting[one.request_id]
        return found

    def _comparison(self, compared: _Compared, number: int) -> BlockComparison | None:
        assert self._manager is not None
        computed = self._manager.get_block_ids(compared.request.request_id)
        computed_block = computed[self._group.index][number]
        received_block = compared.received_block
        if (
            received_block is None
            or computed_block == received_block
            or not caches_block(self._manager, received_block, compared.request, number)
        ):
            return None
        return BlockComparison(compared.comparison_id, received_block, computed_block)

    def _drop(self, request_id: str) -> None:
        self._dropped.add(request_id)
        self._on_dropped(self._waiting.pop(request_id).comparison_id)

    def request_finished(self, request_id: str) -> None:
        """The request has ended."""
        self._waiting.pop(request_id, None)
        self._dropped.discard(request_id)
