"""The order of checks of a client's RPC: key, bytes, fields."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import HeadraceError, InvalidRequest, Unauthenticated
from headrace_common.limits import CHAT_MESSAGES_MAX, REQUEST_FIELDS_MAX, UNKNOWN_CONTEXT_TOKENS
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.running.runner import RequestCounter
from headrace_frontend.tenants import load_tenants
from headrace_router.rpc_services import ClientGate

_GENERATE, _LIST = (
    f"/headrace.inference.v1.InferenceService/{name}" for name in ("Generate", "ListModels")
)
_MEBIBYTE = 1024 * 1024


class _Metrics(RequestCounter):
    def __init__(self) -> None:
        self.failures: list[str] = []

    def count_failure(self, error: BaseException) -> None:
        assert isinstance(error, HeadraceError)
        self.failures.append(error.reason)


def _gate(
    contexts: dict[str, int], keys_file: str = "", metrics: _Metrics | None = None
) -> ClientGate:
    runner, size = (
        SimpleNamespace(counter=metrics or _Metrics()),
        RequestSizeCheck(lambda: contexts),
    )
    parts: Any = SimpleNamespace(tenants=load_tenants(keys_file), runner=runner, size=size)
    return ClientGate(parts)


def test_requests_need_a_key_and_a_refused_answer_is_counted(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret tenant-a\n")
    metrics = _Metrics()
    gate = _gate({}, str(keys), metrics)
    with pytest.raises(Unauthenticated):
        gate.check_call(_GENERATE, ())
    gate.check_call(_GENERATE, (("x-api-key", "secret"),))
    with pytest.raises(Unauthenticated):
        gate.check_call(_LIST, ())
    gate.check_call(_LIST, (("x-api-key", "secret"),))
    assert metrics.failures == ["UNAUTHENTICATED"]
    gate.check_call("/headrace.inference.v1.TraceService/GetTrace", ())


@pytest.mark.parametrize("method", [_GENERATE, _LIST])
@pytest.mark.parametrize(
    "contexts,tokens", [({"a": 1_024, "b": 4_096}, 4_096), ({"a": 0}, UNKNOWN_CONTEXT_TOKENS)]
)
def test_bytes_are_bounded_by_the_longest_context(
    method: str, contexts: dict[str, int], tokens: int
) -> None:
    gate = _gate(contexts)
    bytes_max = _MEBIBYTE + 26 * tokens
    # Protobuf rejects these bytes later.
    gate.check_request(method, b"\xff" * bytes_max)
    with pytest.raises(InvalidRequest, match=f"needs at most {bytes_max}") as caught:
        gate.check_request(method, b"\xff" * (bytes_max + 1))
    assert list(caught.value.violations) == ["request"]


def test_a_text_beyond_the_longest_context_is_rejected_unparsed() -> None:
    def data(count: int, *, ends: bytes = b"") -> bytes:
        request = inference_pb2.GenerateRequest(model="a", text="x" * count)
        return request.SerializeToString() + ends

    gate = _gate({"a": 1_024, "b": 8_192})
    bytes_max = 16 * 8_192
    gate.check_request(_GENERATE, data(bytes_max))
    with pytest.raises(InvalidRequest, match=f"has {bytes_max + 1} bytes of text") as caught:
        gate.check_request(_GENERATE, data(bytes_max + 1))
    assert list(caught.value.violations) == ["text"]
    # Protobuf rejects what has an incomplete field. Without any model, no context is known.
    gate.check_request(_GENERATE, data(bytes_max + 1, ends=b"\x0a"))
    _gate({}).check_request(_GENERATE, data(bytes_max + 1))


def test_other_long_fields_are_no_texts() -> None:
    gate = _gate({"a": 1_024})
    ids = inference_pb2.TokenIds(ids=[100_000] * 60_000)
    gate.check_request(_GENERATE, inference_pb2.GenerateRequest(tokens=ids).SerializeToString())


def test_a_chat_of_the_most_messages_passes_and_millions_do_not() -> None:
    def data(count: int) -> bytes:
        message = inference_pb2.ChatMessage(role="user", content="hello")
        chat: Any = inference_pb2.Chat(messages=[message] * count)
        return inference_pb2.GenerateRequest(chat=chat).SerializeToString()

    gate = _gate({"a": 1_000_000})
    gate.check_request(_GENERATE, data(CHAT_MESSAGES_MAX))
    with pytest.raises(InvalidRequest, match=str(REQUEST_FIELDS_MAX)) as caught:
        gate.check_request(_GENERATE, data(300_000))
    assert list(caught.value.violations) == ["chat.messages"]


def test_other_services_are_not_bounded_here() -> None:
    _gate({"a": 1}).check_request(
        "/headrace.prefill.v1.PrefillQueueService/Pull", bytes(_MEBIBYTE * 4)
    )
