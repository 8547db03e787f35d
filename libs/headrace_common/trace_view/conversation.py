"""The turns of one conversation, and what of each prompt was computed again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_common.durations import unix_ns_from_timestamp
from headrace_common.telemetry import schema
from headrace_common.trace_view.reading import whole_number

# A prompt's last block is computed in any case, and so is what the template adds to an answer.
_UNSEEN_TOKENS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `cached_tokens`: of the prompt, in the decode worker's tiers. `computed_tokens`: by any worker.
    `kept_tokens`: of prompt and answer, with a promise.

    `reason` says why tokens of earlier turns were computed again. Empty if they were not.
    """

    request_id: str
    start_unix_ns: int
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    transferred_tokens: int
    computed_tokens: int
    decode_worker: str
    prefill_worker: str
    reason: str = ""
    kept_tokens: int = 0


def turns_of(traces: Iterable[trace_pb2.Trace], conversation_id: str) -> list[Turn]:
    """The turns of a conversation among the traces, oldest first."""
    turns = [
        _turn(trace, root.attributes)
        for trace in traces
        for root in trace.spans
        if root.name == schema.SPAN_REQUEST
        and root.attributes.get(schema.ATTRIBUTE_CONVERSATION_ID) == conversation_id
    ]
    turns.sort(key=lambda turn: turn.start_unix_ns)
    return [*turns[:1], *(_explained(before, turn) for before, turn in pairwise(turns))]


def _turn(trace: trace_pb2.Trace, root: Mapping[str, str]) -> Turn:
    request_id = root.get(schema.ATTRIBUTE_REQUEST_ID, trace.request_id)
    prompt, cached = (
        _number(root, schema.ATTRIBUTE_PROMPT_TOKENS),
        _number(root, schema.ATTRIBUTE_CACHED_TOKENS),
    )
    own = [span for span in trace.spans if _is_of(span, request_id)]
    attempt = next((s for s in reversed(own) if s.name == schema.SPAN_ATTEMPT), trace_pb2.Span())
    prefills = [
        span
        for span in own
        if span.name == schema.SPAN_PREFILL and span.parent_span_id == attempt.span_id
    ]
    found = max(
        (_number(one.attributes, schema.ATTRIBUTE_CACHED_TOKENS) for one in prefills), default=0
    )
    return Turn(
        request_id=request_id,
        start_unix_ns=unix_ns_from_timestamp(trace.start_time),
        prompt_tokens=prompt,
        answer_tokens=_number(root, schema.ATTRIBUTE_COMPLETION_TOKENS),
        cached_tokens=cached,
        transferred_tokens=_number(root, schema.ATTRIBUTE_TRANSFERRED_TOKENS),
        computed_tokens=max(0, prompt - max(cached, found)),
        decode_worker=attempt.attributes.get(schema.ATTRIBUTE_DECODE_WORKER_ID, ""),
        prefill_worker=attempt.attributes.get(schema.ATTRIBUTE_PREFILL_WORKER_ID, ""),
        kept_tokens=_number(root, schema.ATTRIBUTE_KEPT_TOKENS),
    )


def _explained(before: Turn, turn: Turn) -> Turn:
    seen = min(before.prompt_tokens + before.answer_tokens, turn.prompt_tokens)
    again = turn.computed_tokens - (turn.prompt_tokens - seen)
    if again <= _UNSEEN_TOKENS_MAX:
        return turn
    workers = {turn.decode_worker, turn.prefill_worker}
    if before.decode_worker not in workers:
        reason = f"{again} tokens again: placed away from {before.decode_worker}"
    else:
        reason = f"{again} tokens again: evicted, or the history changed"
    return replace(turn, reason=reason)


def _is_of(span: trace_pb2.Span, request_id: str) -> bool:
    return span.attributes.get(schema.ATTRIBUTE_REQUEST_ID, request_id) == request_id


def _number(attributes: Mapping[str, str], name: str) -> int:
    return whole_number(attributes.get(name, "")) or 0
