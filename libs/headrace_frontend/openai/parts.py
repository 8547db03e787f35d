"""The parts of a process that the HTTP API uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.running.runner import RequestRunner
from headrace_frontend.tenants import Tenants
from headrace_text.codec import TextCodec


class ModelLister(Protocol):
    """Lists the models that can serve requests."""

    def list_models(self) -> Sequence[inference_pb2.Model]:
        """The models with at least one live decode worker, by name."""
        ...


@dataclass(frozen=True, slots=True)
class OpenAiParts:
    """The parts of a process that the HTTP API uses."""

    codecs: Mapping[str, TextCodec]
    parsers: Mapping[str, ModelParsers]
    """By served model."""
    models: ModelLister
    tenants: Tenants
    runner: RequestRunner[Any]
    preparer: RequestPreparer
    size: RequestSizeCheck
    count_failures: Callable[[], AbstractContextManager[None]]
    """Counts a request that the block fails or cancels."""
    callers: CallerBounds
    rejects_unknown_fields: bool = False
