"""What a prefill rank's sender is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_common.rpc.channel import TlsFiles
from headrace_kv.handoff.clock import Clock
from headrace_kv.handoff.messages import SendReport
from headrace_kv.layout.layout import KvLayout, RankMemory, WorkerRef
from headrace_kv.send.stream import DescriptorSource, HandoffLink
from headrace_kv.transport.base import KvTransport


@dataclass(frozen=True, slots=True)
class SenderContext:
    """See RankSender. `link` makes the streams."""

    ref: WorkerRef
    rank: int
    layout: KvLayout
    memory: RankMemory
    transport: KvTransport
    descriptors: DescriptorSource
    loop: asyncio.AbstractEventLoop
    on_quiet: Callable[[SendReport], None]
    handshake_timeout_s: float
    tls: TlsFiles | None = None
    clock: Clock = field(default_factory=Clock)
    link: Callable[..., HandoffLink] = HandoffLink
