"""An admitted attempt with its span and its result."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from opentelemetry.trace import Span

from headrace.decode.v1 import decode_pb2
from headrace_common.errors import Cancelled, HeadraceError, InternalError
from headrace_common.telemetry.setup import Telemetry
from headrace_decode.attempt import DecodeAttempt, Progress
from headrace_decode.proto import tokens_to_proto
from headrace_decode.spans import record_transfer

AttemptEvent: TypeAlias = decode_pb2.Reserved | decode_pb2.Tokens | decode_pb2.Finished


class RunningAttempt:
    """Runs an attempt for one caller. `error` is the result; None once the attempt has reached its end.

    The HTTP API reads `events`. A link calls `start`, then `take` whenever the attempt is readable.
    """

    def __init__(
        self,
        attempt: DecodeAttempt,
        span: Span,
        telemetry: Telemetry,
        on_end: Callable[[RunningAttempt], None],
    ) -> None:
        """`on_end` is called once, with this object."""
        self.attempt = attempt
        self.span = span
        self.error: HeadraceError | None = Cancelled("the caller cancelled or disconnected")
        self._on_transfer_free = partial(record_transfer, telemetry, span)
        self._on_end = on_end

    async def start(self) -> decode_pb2.Reserved:
        """Reserves blocks. Raises HeadraceError."""
        with self._recorded():
            return await self.attempt.reserve(self._on_transfer_free)

    async def wait_ready(self) -> None:
        """Returns once the engine may generate. Raises HeadraceError."""
        with self._recorded():
            await self.attempt.wait_ready()

    def take(self) -> Progress:
        """What the engine has yielded since the last call, without waiting. Raises HeadraceError."""
        try:
            progress = self.attempt.take()
        except Exception as failure:
            self._record(failure)
            raise
        return self._noted(progress)

    async def events(self) -> AsyncGenerator[AttemptEvent, None]:
        """Reserved, then tokens as they come, and Finished. Raises HeadraceError."""
        yield await self.start()
        await self.wait_ready()
        while True:
            with self._recorded():
                progress = self._noted(await self.attempt.read())
            if progress.tokens:
                yield tokens_to_proto(progress.tokens)
            if progress.finished is not None:
                yield progress.finished
                return

    def end(self) -> None:
        """Gives back the attempt's resources. Repeats are ignored."""
        if self.attempt.end():
            self._on_end(self)

    def _noted(self, progress: Progress) -> Progress:
        if progress.finished is not None:
            # The caller may disconnect as soon as it has read this.
            self.error = None
        return progress

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except Exception as failure:
            self._record(failure)
            raise

    def _record(self, failure: Exception) -> None:
        if isinstance(failure, HeadraceError):
            self.error = failure
        else:
            self.error = InternalError(f"{type(failure).__name__}: {failure}")
