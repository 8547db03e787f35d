"""The way to the registry that everything of registry_client.py shares."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

import grpc.aio

from headrace.registry.v1 import registry_pb2_grpc
from headrace_common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    HeadraceError,
    RegistryUnavailable,
    WorkerGone,
)
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0

BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 1.0
_Result = TypeVar("_Result")
_AWAY = (WorkerGone, Draining, DeadlineExceeded, Cancelled, RegistryUnavailable)


class RegistryLink:
    """A stub of the registry, and what is to be done when it is away: wait, and say so once."""

    def __init__(self, registry: str | grpc.aio.Channel, purpose: str) -> None:
        self._owned = isinstance(registry, str)
        self._channel = open_channel(registry) if isinstance(registry, str) else registry
        self._name = f"the registry at {registry}" if isinstance(registry, str) else "the registry"
        self._purpose = purpose
        self._failure_count = 0
        self.stub = registry_pb2_grpc.RegistryServiceStub(self._channel)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Lets out HeadraceErrors only: RegistryUnavailable for whatever means that it is away."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            known = error_from_rpc(error)
            if isinstance(known, _AWAY):
                raise self.unavailable(known.detail) from error
            raise known from error
        except TimeoutError:
            raise self.unavailable("no answer in time") from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise self.unavailable(str(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self.unavailable("it gave the call up") from None

    def unavailable(self, cause: str) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self._name} is away: {cause}", metadata={"cause": cause})

    def succeeded(self) -> None:
        """Ends an outage."""
        if self._failure_count:
            _log.info("%s: %s is back", self._purpose, self._name)
        self._failure_count = 0

    async def back_off(self, error: HeadraceError) -> None:
        """Logs the first error of an outage, then waits longer each time."""
        if self._failure_count == 0:
            _log.warning("%s: %s", self._purpose, error.detail)
        delay_s = min(_BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self._failure_count, 16))
        self._failure_count += 1
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))

    async def close(self) -> None:
        if self._owned:
            await self._channel.close()


def run_forever(loop: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Starts a task that should end only when cancelled. If it fails all the same, the log says so."""
    task = asyncio.create_task(loop, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.critical("%s ended by a bug", task.get_name(), exc_info=task.exception())


async def end_task(task: asyncio.Task[_Result] | None) -> None:
    """Cancels a task and waits for its end."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
