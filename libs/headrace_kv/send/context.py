"""The environment of one prefill rank's sender."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace_common.access.credentials import Credentials
from headrace_common.deadlines import Deadline
from headrace_common.process.kill_timer import KillTimer
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.leases import Clock
from headrace_kv.messages import SendReport
from headrace_kv.transport.base import KvTransport

DescriptorSource = Callable[[WorkerRef, Deadline], Awaitable[KvDescriptor]]
"""Finds the KV memory of a worker incarnation. Raises StaleIncarnation when that incarnation is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderContext:
    """What a sender and its handoff streams share.

    `ref` is the prefill worker, `layout` its KV layout, `memory` the rank's part of it, registered with `transport`.
    `host_memory` has blocks of the same layout that the rank keeps below its KV memory, registered too.
    `hidden_format` is that of the model's hidden states, None where none are sent.
    The streams run on `event_loop` and present `credentials`. A handshake with a decode worker takes
    `handshake_timeout_s` at most. `on_quiet` is called once for each opened transfer, on the sender's thread, when
    nothing of the transfer is or will be written. `kill_timer` ends the process when it writes too late (I1).
    """

    ref: WorkerRef
    rank: int
    layout: KvLayout
    memory: RankMemory
    transport: KvTransport
    descriptors: DescriptorSource
    event_loop: asyncio.AbstractEventLoop
    on_quiet: Callable[[SendReport], None]
    handshake_timeout_s: float = 10.0
    credentials: Credentials = field(default_factory=Credentials)
    clock: Clock = field(default_factory=Clock)
    kill_timer: KillTimer | None = None
    host_memory: RankMemory | None = None
    hidden_format: HiddenFormat | None = None
