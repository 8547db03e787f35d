"""The best other placement in words, and sums of it."""

from __future__ import annotations

from headrace.inference.v1 import trace_pb2
from headrace_cli.commands.explain import regrets_table
from headrace_common.telemetry import schema
from headrace_common.trace_view.regret import NO_ESTIMATE, Regrets, regret_text, regrets_of


def root(kind: str, gain_ms: str, prefill: str = "w1") -> dict[str, str]:
    return {
        schema.ATTRIBUTE_OTHER_DECISION: kind,
        schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID: "w1",
        schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID: prefill,
        schema.ATTRIBUTE_OTHER_GAIN_MS: gain_ms,
    }


def trace(request_id: str, attributes: dict[str, str]) -> trace_pb2.Trace:
    span = trace_pb2.Span(name=schema.SPAN_REQUEST, attributes=attributes)
    return trace_pb2.Trace(request_id=request_id, spans=[span])


def test_a_request_states_the_other_decision_or_that_there_is_no_estimate() -> None:
    assert regret_text(root("local prefill", "310.2")) == "local prefill on w1: 310 ms earlier"
    assert (
        regret_text(root("remote prefill", "-20.5", "w2"))
        == "remote prefill on w1, prompt on w2: 20 ms later"
    )
    assert regret_text({}) == ""


def test_sums_count_only_what_would_have_been_earlier() -> None:
    found = regrets_of(
        [
            trace("r1", root("local prefill", "310")),
            trace("r2", root("local prefill", "-90")),
            trace("r3", root("local prefill", "400")),
            trace("r4", root("other decode worker", "5")),
            trace("r5", {}),
        ]
    )
    assert found == [
        Regrets("local prefill", 3, 2, 710.0, 400.0, "r3"),
        Regrets("other decode worker", 1, 1, 5.0, 5.0, "r4"),
        Regrets(NO_ESTIMATE, 1, 0, 0.0, 0.0, ""),
    ]
    assert regrets_table(found).row_count == 3
