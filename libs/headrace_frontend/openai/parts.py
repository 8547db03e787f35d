"""The parts of a process that the HTTP API uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.deadlines import Deadline
from headrace_frontend.answers import Outlets, ResponseWriter
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.request.preparation import RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck
from headrace_frontend.tenants import Tenants
from headrace_text.codec import TextCodec


class RequestRunner(Protocol):
    """Runs the requests of clients."""

    async def run(
        self,
        request: inference_pb2.GenerateRequest,
        tenant: str,
        deadline: Deadline,
        write: ResponseWriter,
        outlets: Outlets | None = None,
    ) -> None:
        """Writes the response to `request`, message by message. Cancellation ends all work for the request.

        `outlets` may get all messages of a single answer but the last, instead of `write`. Raises HeadraceError, before
        or between messages.
        """
        ...

    def admitted(self, tenant: str, deadline: Deadline) -> AbstractAsyncContextManager[None]:
        """A place over the block, for work that is not a request, such as tokenizing."""
        ...

    def reject_when_draining(self) -> None:
        """Raises Draining while the process shuts down."""
        ...


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
    runner: RequestRunner
    preparer: RequestPreparer
    size: RequestSizeCheck
    count_failures: Callable[[], AbstractContextManager[None]]
    """Counts a request that the block fails or cancels."""
    callers: CallerBounds
    rejects_unknown_fields: bool = False
