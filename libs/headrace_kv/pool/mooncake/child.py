"""The worker's end of its process of the pool."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Final

from headrace_kv.pool.mooncake.messages import (
    PACKET_BYTES_MAX,
    PoolCall,
    PoolReply,
    PoolSetup,
    call_to_packet,
    reply_from_packet,
    setup_to_packet,
)
from headrace_kv.transport.mooncake.transport import protocol_environment

_MODULE: Final = "headrace_kv.pool.mooncake.process"
_BUFFER_BYTES: Final = 4 * PACKET_BYTES_MAX
_RPC_TIMEOUT_S: Final = 5.0


class PoolChild:
    """A process that was started. One thread reads its replies; any thread may send calls."""

    def __init__(self, setup: PoolSetup) -> None:
        """Starts it. Raises OSError when the host has no room for another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=_environment(setup.protocol),
                    pass_fds=(theirs.fileno(), *(one.descriptor for one in setup.memories)),
                )
            except OSError:
                ours.close()
                raise
        self._channel = ours
        self._channel.setblocking(False)
        self._channel.send(setup_to_packet(setup))

    def fileno(self) -> int:
        """For select: readable when replies have come, or when the process has ended."""
        return self._channel.fileno()

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, call: PoolCall) -> bool:
        """Whether the process will get the call. It does not while it reads too slowly."""
        try:
            self._channel.send(call_to_packet(call))
        except OSError:
            return False
        return True

    def read(self) -> PoolReply | None:
        """The next reply. None when there is none yet. Raises EOFError when the process has ended."""
        try:
            packet = self._channel.recv(PACKET_BYTES_MAX)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise EOFError from error
        if not packet:
            raise EOFError
        return reply_from_packet(packet)

    def kill(self) -> None:
        """Ends the process. When it returns, the process uses no memory any more."""
        self._process.kill()
        self._process.wait()
        self._channel.close()


def _environment(protocol: str) -> dict[str, str]:
    _, variables = protocol_environment(protocol)
    milliseconds = str(round(_RPC_TIMEOUT_S * 1_000))
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("MC_FORCE_")},
        **variables,
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": os.environ.get("MC_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": "1",
    }
