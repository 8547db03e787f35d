"""Requests as the router has prepared them."""

from __future__ import annotations

from typing import Any

from headrace.inference.v1 import inference_pb2
from headrace_frontend.request.validation import PreparedRequest, prepare
from headrace_text.codec import TextCodec
from headrace_text.load import ByteCodec


def prepared(
    request: inference_pb2.GenerateRequest,
    codec: TextCodec | None = None,
    context: int = 4_096,
    **more: Any,
) -> PreparedRequest:
    """The request to the model "sim" with this context. Raises InvalidRequest."""
    return prepare(
        request,
        request_id=request.request_id or "r1",
        codecs={"sim": codec or ByteCodec()},
        max_model_len={"sim": context},
        **more,
    )
