"""The connection to the registry: a stub, its errors, and back-off during an outage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Final

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
from headrace_common.rpc.status import error_from_rpc

_log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
BACKOFF_MIN_S: Final = 0.1
_BACKOFF_MAX_S: Final = 1.0
_BACKOFF_EXPONENT_MAX: Final = 16
# Errors of an RPC that mean that the registry cannot be reached now.
_UNAVAILABLE: Final = (WorkerGone, Draining, DeadlineExceeded, Cancelled, RegistryUnavailable)


class RegistryLink:
    """A stub of the registry for one purpose, which log messages name."""

    def __init__(self, registry: grpc.aio.Channel, purpose: str) -> None:
        self._purpose = purpose
        self._failure_count = 0
        self.stub = registry_pb2_grpc.RegistryServiceStub(registry)

    @contextlib.contextmanager
    def converted_errors(self) -> Iterator[None]:
        """Converts every failure of a call to a HeadraceError.

        An error that means that the registry cannot be reached becomes RegistryUnavailable. A
        cancellation of the current task stays one.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            known = error_from_rpc(error)
            if isinstance(known, _UNAVAILABLE):
                raise self.unavailable(known.detail) from error
            raise known from error
        except TimeoutError:
            raise self.unavailable("no response in time") from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise self.unavailable(str(error)) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise self.unavailable("the call was cancelled") from None

    def unavailable(self, cause: str) -> RegistryUnavailable:
        """The error for a registry that cannot be reached."""
        return RegistryUnavailable(
            f"the registry is unavailable: {cause}", metadata={"cause": cause}
        )

    def record_success(self) -> None:
        """Ends an outage, if there was one."""
        if self._failure_count:
            _log.info("%s: the registry is available again", self._purpose)
        self._failure_count = 0

    async def back_off(self, error: HeadraceError) -> None:
        """Records a failure and waits, longer after each. Logs the first error of an outage."""
        if self._failure_count == 0:
            _log.warning("%s: %s", self._purpose, error.detail)
        exponent = min(self._failure_count, _BACKOFF_EXPONENT_MAX)
        delay_s = min(_BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0**exponent)
        self._failure_count += 1
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
