"""The listener of the Endpoint Picker."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace_common.access.authorizer import Authorizer
from headrace_common.access.credentials import Credentials
from headrace_common.access.table import PICKER_METHOD, Listener
from headrace_common.rpc.access import InternalAccess
from headrace_common.rpc.listener import Address, RpcListener, internal_options
from headrace_common.rpc.status import ErrorInterceptor
from headrace_common.tasks import end_task, run_forever
from headrace_router.config import RouterConfig
from headrace_router.picker.picker import EndpointPicker
from headrace_router.picker.service import PickerService

_HEALTH_NAMES: Final = ("liveness", "readiness", PICKER_METHOD.strip("/").partition("/")[0])
_READY_CHECK_S: Final = 1.0


class PickerServer:
    """Serves `endpoint_picker_listen` to callers with the role gateway."""

    def __init__(self, picker: EndpointPicker, config: RouterConfig) -> None:
        """Raises ConfigError when a file of the settings cannot be read."""
        self._picker = picker
        self._listener = RpcListener(
            Address(Listener.PICKER, config.endpoint_picker_listen),
            (),
            [
                ErrorInterceptor(),
                InternalAccess(Authorizer.from_config(config), Listener.PICKER),
            ],
            tls=Credentials.from_config(config).tls,
            options=internal_options(config.connections_max()),
            further_health=_HEALTH_NAMES,
        )
        PickerService(picker).add_to(self._listener.server)
        self.endpoint = ""
        """The "host:port" on which it listens, after `start`."""
        self._ready = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serves from now on. Raises ConfigError when it cannot listen."""
        self.endpoint = self._listener.bind()
        await self._listener.start()
        await self._report_ready()
        self._task = run_forever(self._follow_readiness(), "picker-readiness")

    async def stop(self) -> None:
        """Ends every stream."""
        if self._task is not None:
            await end_task(self._task)
        await self._listener.server.stop(None)

    async def _follow_readiness(self) -> None:
        while True:
            await asyncio.sleep(_READY_CHECK_S)
            if self._picker.ready != self._ready:
                await self._report_ready()

    async def _report_ready(self) -> None:
        self._ready = self._picker.ready
        await self._listener.set_health_of("readiness", serving=self._ready)
