"""The Engine that runs real models."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_common.errors import DuplicateTransfer, InternalError
from headrace_engine.config import EngineConfig
from headrace_engine.interface import (
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    Engine,
    EngineUsage,
    PrefillOutcome,
    PrefillWork,
)
from headrace_engine.prefix.event_publisher import PrefixEventPublisher
from headrace_engine.vllm.compat import (
    end_llm,
    max_model_len,
    reset_prefix_cache,
    runs_on_cpu,
)
from headrace_engine.vllm.link.messages import EngineLoad
from headrace_engine.vllm.service.decode_request import DecodeRun
from headrace_engine.vllm.service.launch import check_config, launch
from headrace_engine.vllm.service.prefill_request import PrefillRun
from headrace_kv.handoff.messages import Reservation, SendReport
from headrace_kv.receive.layer_overlap import LayerOverlap
from headrace_kv.receive.observer import TransferObserver

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_engine.vllm.service.first_token_sampler import FirstSampler
    from headrace_engine.vllm.service.kv_events import KvEventReader
    from headrace_kv.send.context import DescriptorSource

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 60.0


class VllmEngine(Engine):
    """vLLM in processes of its own, joined to this one by the link.

    When one of them ends unasked, this process is told to terminate: nothing can be served any more.
    """

    def __init__(self, config: EngineConfig, descriptors: DescriptorSource) -> None:
        self._config = config
        self._descriptors = descriptors
        self._llm: AsyncLLM | None = None
        self._link: LinkServer | None = None
        self._kv_events: KvEventReader | None = None
        self._link_path = Path(config.link_path)
        self._first_sampler: FirstSampler | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._prefills: dict[str, PrefillRun] = {}
        self._decodes: dict[str, DecodeRun] = {}
        self.load = EngineLoad()

    async def start(self) -> None:
        self.launch()
        await self.attach()

    def launch(self) -> None:
        """Loads the model in processes of its own; blocks. Comes before anything of gRPC exists in this process.

        Not awaitable on purpose: the processes are forked from the main thread, while nothing else runs.
        Raises ConfigError.
        """
        start_s = time.monotonic()
        folder = check_config(self._config)
        self._link_path = self._make_link_path()
        self._llm = launch(self._config, folder, self._link_path)
        log.info("model loaded %.1f s after the start", time.monotonic() - start_s)

    async def attach(self) -> None:
        """Joins the launched processes. Raises InternalError when they do not answer."""
        from headrace_engine.vllm.link.server import LinkEvents, LinkServer
        from headrace_engine.vllm.service.kv_events import KvEventReader, events_endpoint

        if self._llm is None:
            raise InternalError("the engine is not launched")
        self._link = LinkServer(
            self._link_path,
            LinkEvents(self._reserved, self._reported, self._lost, self._loaded),
            self._descriptors,
        )
        await self._link.start()
        self.descriptor = await self._link.wait_attached(
            self._config.tensor_parallel_size, ATTACH_TIMEOUT_S
        )
        self.max_model_len = max_model_len(self._llm)
        self.prefix_events = PrefixEventPublisher(
            self._config.ref, self.descriptor.layout.block_tokens
        )
        self._kv_events = KvEventReader(events_endpoint(self._link_path), self.prefix_events)
        self._kv_events.start()
        await self._prepare_logits()

    async def _prepare_logits(self) -> None:
        """On other devices the sampler is another one, and so are its random numbers: none of that is done there."""
        from headrace_engine.vllm.service.first_token_sampler import FirstSampler

        assert self._llm is not None
        if not runs_on_cpu():
            return
        sampler = FirstSampler(self._llm.vllm_config)
        self.logits_bytes = sampler.logits_bytes
        if self._config.role == "decode":
            self._first_sampler = sampler
            await sampler.warm()

    def _make_link_path(self) -> Path:
        if self._config.link_path:
            return Path(self._config.link_path)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        return Path(self._folder.name) / "link"

    async def prefill(
        self, work: PrefillWork, on_first_token: Callable[[DecodeTokens], None] | None = None
    ) -> PrefillOutcome:
        llm, link = self._require_started()
        transfer_id = work.target.transfer_id
        self._require_new(transfer_id)
        run = PrefillRun(llm, link, work, self._config.tensor_parallel_size, on_first_token)
        self._prefills[transfer_id] = run
        try:
            return await run.outcome()
        finally:
            del self._prefills[transfer_id]

    async def decode(self, work: DecodeWork) -> AsyncGenerator[DecodeEvent, None]:
        llm, link = self._require_started()
        self._require_new(work.transfer_id)
        run = DecodeRun(llm, link, work, self._first_sampler, self.max_model_len)
        self._decodes[work.transfer_id] = run
        try:
            async for event in run.events():
                yield event
        finally:
            del self._decodes[work.transfer_id]
            await run.close()

    def arrived(self, transfer_id: str) -> None:
        self._require_started()[1].arrived(transfer_id)

    def arrival_listener(self) -> TransferObserver | None:
        late = self._config.overlap_layers
        if not late.count:
            return None
        return LayerOverlap(
            self._require_started()[1],
            overlap_layers=late.count,
            layer_count=self.descriptor.layout.layer_count,
            rank_count=self._config.tensor_parallel_size,
        )

    def first_token(self, transfer_id: str, token_id: int) -> None:
        self._require_started()[1].first_token(transfer_id, token_id)

    def first_logits(self, transfer_id: str, logits: bytes) -> None:
        run = self._decodes.get(transfer_id)
        if run is not None:
            run.first_logits(logits)

    def released(self, transfer_id: str) -> None:
        self._require_started()[1].released(transfer_id)

    def usage(self) -> EngineUsage:
        held = len(self._decodes) + len(self._prefills)
        # The scheduler's word comes a moment later than what is known here.
        running = min(held, self.load.running_requests)
        return EngineUsage(running, held - running, self.load.used_blocks)

    async def reset_prefix_cache(self) -> bool:
        return await reset_prefix_cache(self._require_started()[0])

    async def close(self) -> None:
        if self._link is not None:
            self._link.begin_close()
        if self._kv_events is not None:
            await self._kv_events.close()
            self._kv_events = None
        if self._llm is not None:
            await end_llm(self._llm)
            self._llm = None
        if self._first_sampler is not None:
            self._first_sampler.close()
            self._first_sampler = None
        if self._link is not None:
            await self._link.close()
            self._link = None
        if self._folder is not None:
            self._folder.cleanup()

    def _require_started(self) -> tuple[AsyncLLM, LinkServer]:
        if self._llm is None or self._link is None:
            raise InternalError("the engine is not running")
        return self._llm, self._link

    def _require_new(self, transfer_id: str) -> None:
        if transfer_id in self._prefills or transfer_id in self._decodes:
            raise DuplicateTransfer(
                f"transfer {transfer_id} is known already", metadata={"transfer_id": transfer_id}
            )

    def _reserved(self, reservation: Reservation) -> None:
        run = self._decodes.get(reservation.transfer_id)
        if run is not None:
            run.reserved(reservation)
        elif self._link is not None and reservation.start_token < reservation.end_token:
            # Given up before anybody heard of the blocks, so nobody else will give them back.
            self._link.released(reservation.transfer_id)

    def _reported(self, report: SendReport) -> None:
        run = self._prefills.get(report.transfer_id)
        if run is not None:
            run.reported(report)

    def _loaded(self, load: EngineLoad) -> None:
        self.load = load

    def _lost(self, why: str) -> None:
        error = InternalError(f"vLLM has ended: {why}")
        for prefill in self._prefills.values():
            prefill.lost(error)
        for decode in self._decodes.values():
            decode.fail(error)
        log.critical("%s; this worker cannot serve any more and terminates", error.detail)
        with suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGTERM)
