"""The parts of a process that the HTTP API uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.registry.adapters import Adapter
from headrace_common.version import version
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.promises import Keep
from headrace_frontend.request.model_names import ModelChoice
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

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """OpenAI's field of responses. Empty while no decode worker serves the model."""
        ...


def system_fingerprint(layout_hashes: Iterable[bytes], adapter: Adapter | None) -> str:
    """One text for equal models, weights, engines and versions. The hashes are those of all decode workers."""
    parts = sorted(layout.hex() for layout in layout_hashes)
    if not parts:
        return ""
    named = (version(), "" if adapter is None else adapter.digest, *parts)
    return f"fp_{hashlib.sha256(chr(10).join(named).encode()).hexdigest()[:16]}"


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
    conversations: ConversationStore
    keep: Keep
    images: ImageFetcher
    rejects_unknown_fields: bool = False
