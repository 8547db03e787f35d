"""A prefill rank of the model: the real RankSender over modelled transport and streams."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from headrace_kv.copy_plan import Runs
from headrace_kv.layout import WorkerRef
from headrace_kv.leases import Clock
from headrace_kv.messages import SendReport
from headrace_kv.send.sender import RankSender
from headrace_kv.send.stream import SenderContext, SenderLimits
from headrace_kv.transport.base import KvTransport, WriteResult
from tests.manual_thread import ManualThread
from tests.model.ground import HANDSHAKE_S
from tests.model.streams import ModelStream, SenderEnd

if TYPE_CHECKING:
    from tests.model.world import World


class ModelTransport(KvTransport):
    """Accepts writes. The world decides when they land."""

    name = "model"
    pending_limit = (
        4  # as Mooncake: an acknowledgement before the write has landed shows only with several
    )

    def __init__(self, world: World, rank: int) -> None:
        self.quiet_after_failure_s = world.settings.quiet_after_failure_s
        self._world = world
        self.rank = rank

    @property
    def session(self) -> str:
        return f"prefill-{self.rank}"

    def register(self, base_address: int, nbytes: int) -> None:
        pass

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        return self._world.submit(self, session, runs, timeout_s)

    def close(self) -> None:
        pass


class Rank:
    """A prefill rank: the real RankSender, and the script that its engine follows."""

    def __init__(self, world: World, rank: int, incarnation: int) -> None:
        self.rank = rank
        self.ref = WorkerRef("prefill-0", f"{incarnation:016x}")
        self.transport = ModelTransport(world, rank)
        self.opened: set[str] = set()
        self.reports: dict[str, SendReport] = {}
        self.streams: list[ModelStream] = []
        context = SenderContext(
            ref=self.ref,
            rank=rank,
            layout=world.prefill,
            memory=world.sources[rank],
            transport=self.transport,
            descriptors=cast("Any", None),
            event_loop=cast("Any", None),
            on_quiet=partial(world.check_quiet, self),
            handshake_timeout_s=HANDSHAKE_S,
            clock=Clock(world.timers.time, world.timers.time),
        )
        connect = partial(world.connect, self)
        make_stream = partial(SenderEnd, timers=world.timers, connect=connect)
        thread = ManualThread()
        limits = SenderLimits(64, 64)
        self.sender = RankSender(context, limits=limits, thread=thread, make_stream=make_stream)
        self.loop = thread.loop
