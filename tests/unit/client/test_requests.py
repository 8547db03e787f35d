"""Requests from plain values."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.inference.v1 import sampling_pb2, tools_pb2
from headrace_client import InvalidRequest, SamplingFields, build_request


def test_every_field_of_sampling_can_be_given() -> None:
    known = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    # The router makes it from bad_words.
    assert set(SamplingFields.__annotations__) == known - {"bad_token_sequences"}


def test_messages_may_be_those_of_openai() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = build_request(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
        ]
    ).chat
    assert [message.content for message in chat.messages] == ["a\nb", "", "4"]
    assert chat.messages[1].tool_calls[0] == tools_pb2.ToolCall(id="c1", name="add", arguments="{}")
    assert chat.messages[2].tool_call_id == "c1"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages"),
        ({"messages": [5]}, "messages"),
        ({}, "prompt"),
        ({"prompt": "x", "tokens": [1]}, "prompt"),
        ({"prompt": "x", "top_p": "much"}, "top_p: has a wrong value"),
        ({"prompt": "x", "maxtokens": 1}, "maxtokens: is no keyword: did you mean max_tokens?"),
        ({"tokens": [-1]}, "request"),
        ({"prompt": "x", "n": -1}, "request"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request(**values)
    assert field in caught.value.detail


def test_targets_are_durations_and_absent_unless_given() -> None:
    request = build_request("Hello", ttft_target_s=1.5, tpot_target_s=0.05)
    assert (request.ttft_target.seconds, request.ttft_target.nanos) == (1, 500_000_000)
    assert request.tpot_target.nanos == 50_000_000
    plain = build_request("Hello")
    assert not plain.HasField("ttft_target")
    assert not plain.HasField("tpot_target")
