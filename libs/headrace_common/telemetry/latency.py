"""Spans of a decode worker, and attributes of spans: the sums of a request, and the call that is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from headrace_common.latency.breakdown import Breakdown
from headrace_common.latency.parts import Sum, TimePart
from headrace_common.latency.steps import DecodeSteps, FirstTokenBy
from headrace_common.rpc.trace_context import ServedCall
from headrace_common.telemetry import schema

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

PART_ATTRIBUTES: Final[Mapping[TimePart, str]] = {
    part: getattr(schema, f"ATTRIBUTE_LATENCY_{part.name}_US") for part in TimePart
}
"""The attribute of each part."""
_QUEUED: Final = (TimePart.ADMISSION, TimePart.QUEUE, TimePart.BATCH_WAIT, TimePart.DECODE_WAIT)


def sum_attributes(one: Sum) -> dict[str, AttributeValue]:
    """The parts of a sum, and its total."""
    attributes: dict[str, AttributeValue] = {
        PART_ATTRIBUTES[part]: duration for part, duration in one.parts_us.items()
    }
    attributes[schema.ATTRIBUTE_LATENCY_TOTAL_US] = one.total_us
    return attributes


def gen_ai_attributes(one: Breakdown, duration_ns: int) -> dict[str, AttributeValue]:
    """The latencies of an answered request by the names that other servers use too, in seconds."""
    first = one.first
    queue_us = sum(map(first.__getitem__, _QUEUED))
    attributes: dict[str, AttributeValue] = {
        schema.ATTRIBUTE_GEN_AI_TTFT_S: first.total_us / 1e6,
        schema.ATTRIBUTE_GEN_AI_E2E_S: duration_ns / 1e9,
        schema.ATTRIBUTE_GEN_AI_QUEUE_S: queue_us / 1e6,
        schema.ATTRIBUTE_GEN_AI_PREFILL_S: first[TimePart.PREFILL] / 1e6,
    }
    if one.owner:
        transfer_us = one.hidden_us + one.exposed_us
        attributes[schema.ATTRIBUTE_GEN_AI_TRANSFER_S] = transfer_us / 1e6
    return attributes


def breakdown_attributes(one: Breakdown) -> dict[str, AttributeValue]:
    """The attributes of a root span."""
    attributes = sum_attributes(one.first)
    if one.owner:
        attributes[schema.ATTRIBUTE_TRANSFER_OWNER] = one.owner.value
        attributes[schema.ATTRIBUTE_TRANSFER_EXPOSED_MS] = one.exposed_us / 1e3
        attributes[schema.ATTRIBUTE_TRANSFER_HIDDEN_US] = one.hidden_us
    if one.clock_error_us:
        attributes[schema.ATTRIBUTE_CLOCK_ERROR_MS] = one.clock_error_us / 1e3
    return attributes


def server_attributes(call: ServedCall | None) -> dict[str, str]:
    """A served call, by the conventions' names. Empty for none."""
    if call is None:
        return {}
    if call.http_method:
        return {
            schema.ATTRIBUTE_HTTP_METHOD: call.http_method,
            schema.ATTRIBUTE_HTTP_ROUTE: call.name,
        }
    return {schema.ATTRIBUTE_RPC_SYSTEM: "grpc", schema.ATTRIBUTE_RPC_METHOD: call.name}


def decode_intervals(
    steps: DecodeSteps, first_token_by: FirstTokenBy, *, awaits_kv: bool
) -> Iterator[tuple[str, int, int | None]]:
    """The steps until the first token that an attempt has begun: span, start, and end or None.

    `awaits_kv`: whether there is a transfer.
    """
    yield schema.SPAN_DECODE_RESERVE, steps.received, steps.reserved
    ready = steps.reserved
    if awaits_kv and ready:
        yield schema.SPAN_DECODE_KV_WAIT, ready, steps.kv_arrived
        if first_token_by == FirstTokenBy.HIDDEN:
            yield schema.SPAN_DECODE_HIDDEN_STATE_WAIT, ready, steps.hidden_state_arrived
        ready = steps.kv_arrived
    token = steps.sampled
    if steps.hidden_state_arrived:
        yield schema.SPAN_DECODE_SAMPLE, steps.hidden_state_arrived, token
    if ready and first_token_by == FirstTokenBy.PREFILL:
        token = max(steps.token_received, ready) if steps.token_received else None
        yield schema.SPAN_DECODE_TOKEN_WAIT, ready, token
        ready = token
    begun = steps.step_start
    if begun and ready and begun < ready and first_token_by == FirstTokenBy.DECODE:
        # Its KV arrived while it computed.
        yield schema.SPAN_DECODE_BESIDE, begun, steps.first_token
    elif ready:
        yield schema.SPAN_DECODE_FIRST_TOKEN, max(ready, token or 0), steps.first_token
