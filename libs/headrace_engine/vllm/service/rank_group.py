"""Data-parallel ranks compute the experts of a model together, so they end together.

Each rank's worker holds a connection to rank 0's. It shows at once that a rank has ended. vLLM would detect that in the
next step, or wait for the rank in a step that is under way.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from headrace_common.errors import HeadraceError, InternalError, WorkerGone
from headrace_engine.vllm.parallel import GroupPlace

log = logging.getLogger(__name__)

JOIN_S: Final = 60.0
LEAVE_S: Final = 20.0
"""How long a rank that has drained waits for the others. As long as they drain, unless drain_grace_s is set."""
LOSS_LAG_S: Final = 0.5
"""How much later than the engine's end the end of its cause may be detected."""
_RETRY_S: Final = 0.1
_ANSWER_S: Final = 1.0
_WELCOME: Final = b"headrace data-parallel ranks\n"
_LEAVES: Final = b"leaves\n"
_ALL_LEAVE: Final = b"all leave\n"
_LOST: Final = b"lost "
# A host that is lost closes no connection.
_RANK: Final = re.compile(rb"[0-9]{1,8}")
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class RankGroup:
    """Detects that another rank has ended. One event loop owns it."""

    def __init__(
        self, place: GroupPlace, on_lost: Callable[[], None], coordinator: int | None = None
    ) -> None:
        """`on_lost` is called once, unless this rank leaves. It must not block.

        `coordinator`: readable once vLLM's coordinator has ended, which is as the end of a rank.
        """
        self._place = place
        self._on_lost = on_lost
        self._coordinator = coordinator
        self._problem = "not all ranks have connected"
        # By rank: on rank 0 all others, on the others rank 0.
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._left: set[int] = set()
        self._all_leave = False
        self._changed = asyncio.Condition()
        self._lost: asyncio.Future[HeadraceError] = asyncio.get_running_loop().create_future()
        self._leaving = False

    async def join(self, timeout_s: float = JOIN_S) -> None:
        """Connects the ranks. Raises InternalError when they do not all come in time."""
        join = self._connect if self._place.rank else self._accept_all
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if await join():
                        break
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            await self.close()
            raise InternalError(
                f"the data-parallel ranks have not joined on port {self._place.port} of {self._place.address} within "
                f"{timeout_s:g} s ({self._problem}): keep data_parallel_rpc_port and the port after it free"
            ) from None
        if self._coordinator is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(self._coordinator, self._lose, "vLLM's coordinator")

    async def _accept_all(self) -> bool:
        try:
            server = await asyncio.start_server(self._accept, self._place.address, self._place.port)
        except OSError as error:
            self._problem = str(error)
            return False
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._peers) == self._place.size - 1)
        finally:
            server.close()
        return True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_WELCOME)
        rank = await _line(reader)
        number = int(rank) if _RANK.fullmatch(rank.strip()) else 0
        if 0 < number < self._place.size and number not in self._peers:
            await self._add(number, reader, writer)
        else:
            writer.close()

    async def _connect(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(self._place.address, self._place.port)
        except OSError as error:
            self._problem = str(error)
            return False
        if await _line(reader) != _WELCOME:
            self._problem = "another program listens there"
            writer.close()
            return False
        writer.write(b"%d\n" % self._place.rank)
        await self._add(0, reader, writer)
        return True

    async def _add(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            connection.setsockopt(level, option, value)
        self._peers[rank] = writer
        self._readers.add(asyncio.create_task(self._read(rank, reader), name=f"rank {rank}"))
        async with self._changed:
            self._changed.notify_all()

    async def _read(self, rank: int, reader: asyncio.StreamReader) -> None:
        lost = f"data-parallel rank {rank}"
        with suppress(OSError, ValueError):
            while line := await reader.readline():
                if line.startswith(_LOST):
                    lost = line.removeprefix(_LOST).decode(errors="replace").strip()
                if line == _LEAVES:
                    self._left.add(rank)
                self._all_leave |= line == _ALL_LEAVE
                async with self._changed:
                    self._changed.notify_all()
        self._peers.pop(rank).close()
        self._lose(lost)
        async with self._changed:
            self._changed.notify_all()

    def _lose(self, what: str) -> None:
        self._forget_coordinator()
        if self._leaving or self._lost.done():
            return
        error = WorkerGone(f"{what} has ended, and no rank can compute without it")
        log.critical("%s", error.detail)
        self._lost.set_result(error)
        # Only rank 0 is connected to all.
        self._write(_LOST + what.encode() + b"\n")
        for writer in self._peers.values():
            writer.close()
        self._on_lost()

    def _forget_coordinator(self) -> None:
        if self._coordinator is not None:
            asyncio.get_running_loop().remove_reader(self._coordinator)
            self._coordinator = None

    async def loss(self) -> HeadraceError | None:
        """The error of requests when the engine has ended because another rank has."""
        await asyncio.wait({self._lost}, timeout=LOSS_LAG_S)
        return self._lost.result() if self._lost.done() else None

    async def leave(self, timeout_s: float = LEAVE_S, *, waits: bool = True) -> None:
        """This rank has drained. Waits until all have, because the engines of the others step with this one's.

        `waits`: False when this rank's engine has ended.
        """
        self._leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s if waits else 0), self._changed:
                if self._place.rank:
                    self._write(_LEAVES)
                    await self._changed.wait_for(lambda: self._all_leave or not self._peers)
                else:
                    await self._changed.wait_for(lambda: self._peers.keys() <= self._left)
                    self._write(_ALL_LEAVE)
        await self.close()

    def _write(self, line: bytes) -> None:
        for writer in self._peers.values():
            writer.write(line)

    async def close(self) -> None:
        """Ends the connections."""
        self._leaving = True
        self._forget_coordinator()
        for writer in self._peers.values():
            writer.close()
        if self._readers:
            await asyncio.wait(self._readers, timeout=_ANSWER_S)
        for reader in self._readers:
            reader.cancel()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The peer's first line. Empty when none comes within a moment."""
    try:
        return await asyncio.wait_for(reader.readline(), _ANSWER_S)
    except (TimeoutError, OSError, ValueError):
        return b""
