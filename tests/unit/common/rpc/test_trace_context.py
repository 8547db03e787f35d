"""The trace context of a message."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace_common.rpc.trace_context import context_of_carrier

ID = st.text("0123456789abcdef", min_size=16, max_size=16)
FIELDS = st.tuples(st.sampled_from(["00", "01", "ff"]), ID, ID, st.sampled_from(["00", "01", "ff"]))


@given(FIELDS, ID, st.sampled_from(["", " ", "-more", "x"]), st.sampled_from(["", "a=1", "=", " "]))
def test_a_message_has_the_context_that_the_propagator_finds(
    fields: tuple[str, str, str, str], more: str, end: str, state: str
) -> None:
    version, first, second, flags = fields
    for trace_id in (first + more, "0" * 32):
        for span_id in (second, "0" * 16):
            text = f"{version}-{trace_id}-{span_id}-{flags}{end}"
            carrier = {"traceparent": text, "tracestate": state}
            expected = TraceContextTextMapPropagator().extract(carrier, context=Context())
            found = context_of_carrier(text, state)
            assert get_current_span(found).get_span_context() == (
                get_current_span(expected).get_span_context()
            )
            assert bool(found) == bool(expected)
