"""The Engine that runs models on vLLM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engine.v1 import link_pb2
from headrace_common.errors import DuplicateTransfer, HeadraceError, InternalError, from_reason
from headrace_common.process.run import interruptible
from headrace_common.registry.adapters import Adapter
from headrace_common.tasks import Recent
from headrace_common.time_model.model import StepTimes
from headrace_engine.config import EngineConfig
from headrace_engine.interface import (
    AnswerSink,
    BlockErrors,
    DecodeTokens,
    DecodeWork,
    Engine,
    EngineUsage,
    FirstHiddenState,
    PrefillOutcome,
    PrefillWork,
    ReceivedBlock,
    Released,
    TransferEvent,
)
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.steps import StepWatch
from headrace_engine.vllm.compat import (
    end_llm,
    hidden_format,
    loads_beside,
    max_model_len,
    pass_tokens,
    reset_prefix_cache,
    vocabulary_size,
)
from headrace_engine.vllm.link.messages import (
    EngineLoad,
    kept_from_proto,
    load_from_proto,
    report_from_proto,
    steps_from_proto,
    terms_to_proto,
    tier_load_from_proto,
)
from headrace_engine.vllm.parallel import GroupPlace, coordinator_sentinel, kill_engine
from headrace_engine.vllm.service.adapters import EngineAdapters
from headrace_engine.vllm.service.comparisons import BlockComparisons
from headrace_engine.vllm.service.constraints import ConstraintCheck
from headrace_engine.vllm.service.decode_request import DecodeRequest
from headrace_engine.vllm.service.launch import check_config, launch
from headrace_engine.vllm.service.local_broadcast import open_broadcast
from headrace_engine.vllm.service.prefill_request import PrefillRequest
from headrace_engine.vllm.service.prompts import engine_prompt
from headrace_engine.vllm.service.rank_group import RankGroup
from headrace_engine.vllm.settings import WATCH_METHOD, ConnectorSettings
from headrace_kv.layout import KvLayout, layout_to_proto
from headrace_kv.messages import Reservation, SendReport, reservation_from_proto
from headrace_kv.tiers.load_times import LoadTimes
from headrace_kv.tiers.promises import KeepTerms, Kept, PromiseCounts

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from headrace_engine.vllm.link.server import LinkServer
    from headrace_engine.vllm.service.first_token_sampler import FirstTokenSampler
    from headrace_engine.vllm.service.kv_events import KvEventReader
    from headrace_kv.send.stream import DescriptorSource
    from headrace_kv.transport.guard import Networks

log = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 60.0
_ABORTED_MAX = 256


class VllmEngine(Engine):
    """vLLM in processes of its own, which the link connects to this one.

    When one of them ends before `close`, this process gets SIGTERM: it has nothing to serve with. Then `close` raises.
    """

    def __init__(self, config: EngineConfig, descriptors: DescriptorSource) -> None:
        self._config = config
        self._descriptors = descriptors
        self._llm: AsyncLLM | None = None
        self._adapters: EngineAdapters | None = None
        self._settings: ConnectorSettings | None = None
        self._place: GroupPlace | None = None
        self._group: RankGroup | None = None
        self._failure: HeadraceError | None = None
        self._link: LinkServer | None = None
        self._kv_events: KvEventReader | None = None
        self._published: KVEventsConfig | None = None
        self._link_path = Path()
        self._first_token_sampler: FirstTokenSampler | None = None
        self._constraints = ConstraintCheck()
        self._comparisons = BlockComparisons(config.rank_count)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._prefills: dict[str, PrefillRequest] = {}
        self._decodes: dict[str, DecodeRequest] = {}
        # The last ones that were aborted. Their cost comes later.
        self._aborted: Recent[str, DecodeRequest] = Recent(_ABORTED_MAX)
        # Those with tokens from KV, by vLLM's id.
        self._takers: dict[str, AnswerSink] = {}
        # Those that may fetch a prefix, by the transfer that brings it.
        self._fetching: dict[str, PrefillRequest] = {}
        self.tier_loads = LoadTimes()
        self.load = EngineLoad()
        self.steps = StepWatch(config.step_stall_s)

    async def start(self) -> None:
        with interruptible():
            self.launch()
        await self.attach()

    def launch(self) -> None:
        """Loads the model in processes of its own. Blocks. Must run before this process uses gRPC. Raises ConfigError.

        Not a coroutine, because the processes are forked from the main thread while no other code runs.
        """
        start_s = time.monotonic()
        folder = check_config(self._config)
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True)
        self._link_path = Path(self._folder.name) / "link"
        launched = launch(self._config, folder, self._link_path)
        self._llm, self._adapters, self._place = launched.llm, launched.adapters, launched.place
        self._settings, self._published = launched.settings, launched.kv_events
        log.info("model loaded %.1f s after the start", time.monotonic() - start_s)

    async def attach(self) -> None:
        """Connects to the launched processes. Raises InternalError when they do not attach in time."""
        from headrace_engine.vllm.link.server import LinkServer, RankSums
        from headrace_engine.vllm.service.kv_events import KvEventReader, events_endpoint

        if self._llm is None or self._adapters is None or self._settings is None:
            raise InternalError("the engine is not launched")
        self._link = LinkServer(
            self._link_path,
            self._message_received,
            self._engine_lost,
            self._descriptors,
            self._settings.link_address,
            self._settings.link_secret,
        )
        await self._link.start()
        self.descriptor = await self._link.wait_attached(self._config.rank_count, ATTACH_TIMEOUT_S)
        layout = self.descriptor.layout
        self.compares_blocks = layout.keeps_all_tokens
        # Tiers, also vLLM's own, would store blocks before all of their layers are whole.
        tiers = self._config.tiers.names or loads_beside(self._llm.vllm_config)
        # Graphs of a decode worker replay steps without the layer hooks, which wait.
        self.computes_beside = self._config.sends and layout.keeps_all_tokens and not tiers
        mapped = self._link.shared_memories()
        self.landed_memories = mapped
        ranks = (one.rank for one in self.descriptor.ranks)
        self.landed_sums = {rank: RankSums(self._link, rank) for rank in ranks}
        if self._config.role == "decode" and self._config.local_broadcast:
            self.descriptor, self.broadcast = open_broadcast(self.descriptor, mapped)
        pass_tokens(self._llm, self._takers)
        await self._adapters.start(self._llm)
        self.adapters = self._adapters.identities
        self.max_model_len = max_model_len(self._llm)
        self.vocabulary_size = vocabulary_size(self._llm.vllm_config)
        self.prefix_events = PrefixEventPublisher(
            self._config.ref,
            self.descriptor.layout.block_tokens,
            tiers=self._config.tiers.announced,
        )
        if self._config.tiers.pooled:
            self.prefix_events.on_hash_key(partial(_open_pool, self._link, layout))
        endpoint = events_endpoint(self._link_path, self._place.rank if self._place else 0)
        self._kv_events = KvEventReader(endpoint, self.prefix_events, self._published)
        self._kv_events.start()
        await self._prepare_hidden_states()
        if self._place is not None:
            # Without a rank or vLLM's coordinator, a step of this engine might never end.
            kill, sentinel = partial(kill_engine, self._llm), coordinator_sentinel(self._llm)
            self._group = RankGroup(self._place, kill, sentinel)
            await self._group.join()

    async def _prepare_hidden_states(self) -> None:
        from headrace_engine.vllm.service.first_token_sampler import FirstTokenSampler

        assert self._llm is not None
        assert self._link is not None
        self.hidden_format = hidden_format(self._llm.vllm_config)
        if self.hidden_format is None:
            return
        if self._config.sends:
            await self._llm.collective_rpc(WATCH_METHOD)
        if self._config.receives:
            sampler = FirstTokenSampler(self._llm, self._link, self.hidden_format)
            try:
                await sampler.start()
            except InternalError as error:
                # A head that takes something else. Requests for it are refused by name.
                log.warning("no first token is made from hidden states: %s", error.detail)
                self.hidden_format = None
                return
            self._first_token_sampler = sampler

    async def prefill(
        self,
        work: PrefillWork,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> PrefillOutcome:
        transfer_id = work.target.transfer_id
        llm, link = self._require_started(transfer_id)
        assert self._adapters is not None
        with self._adapters.used(work.adapter) as lora_request:
            request = PrefillRequest(
                llm=llm,
                link=link,
                work=work,
                rank_count=self._config.rank_count,
                on_first_token=on_first_token,
                lora_request=lora_request,
            )
            self._prefills[transfer_id] = request
            if work.prefix is not None:
                self._fetching[work.prefix.transfer_id] = request
            try:
                return await request.outcome()
            except InternalError as error:
                await self._raise_loss(error)
                raise
            finally:
                del self._prefills[transfer_id]
                if work.prefix is not None:
                    del self._fetching[work.prefix.transfer_id]
                for report in request.sending.reports:
                    if on_report is not None:
                        on_report(report)

    async def decode(self, work: DecodeWork, sink: AnswerSink) -> None:
        llm, link = self._require_started(work.transfer_id)
        if work.sampling.structured_outputs is not None:
            await self._constraints.check(work.sampling.structured_outputs, work.tenant_salt)
        prompt = await engine_prompt(
            llm,
            work.token_ids[: work.prompt_tokens],
            work.cache_salt,
            work.images,
            tenant=work.tenant_salt,
        )
        llm, link = self._require_started(work.transfer_id)
        assert self._adapters is not None
        with self._adapters.used(work.adapter) as lora_request:
            request = DecodeRequest(
                llm=llm,
                link=link,
                work=work,
                sink=sink,
                takers=self._takers,
                prompt=prompt,
                sampler=self._first_token_sampler,
                max_model_len=self.max_model_len,
                lora_request=lora_request,
            )
            self._decodes[work.transfer_id] = request
            try:
                await request.run()
            except InternalError as error:
                await self._raise_loss(error)
                raise
            except asyncio.CancelledError:
                self._aborted[work.transfer_id] = request
                raise
            finally:
                del self._decodes[work.transfer_id]

    async def _raise_loss(self, error: InternalError) -> None:
        """Raises WorkerGone when another data-parallel rank has ended: that ends this engine, and is no bug of it."""
        loss = None if self._group is None else await self._group.loss()
        if loss is not None:
            raise loss from error

    def transfer_event(self, event: TransferEvent) -> None:
        request = self._decodes.get(event.transfer_id)
        if isinstance(event, FirstHiddenState):
            if request is not None:
                request.first_hidden_state(event.state)
            return
        if isinstance(event, Released) and request is not None:
            request.transfer_failed()
        self._require_started()[1].transfer_event(event)

    async def compare_block(self, block: ReceivedBlock) -> BlockErrors | None:
        llm, _ = self._require_started()
        assert self._adapters is not None
        return await self._comparisons.run(llm, self._adapters, block)

    async def admit_transfer_peers(self, networks: Networks) -> None:
        _, link = self._require_started()
        update = link_pb2.AdmitNetworks(networks=map(str, networks))
        message = link_pb2.AttachResponse(admit_networks=update)
        ranks = (link.ask_rank(one.rank, message) for one in self.descriptor.ranks)
        for answer in await asyncio.gather(*ranks):
            admitted = answer.networks_admitted
            if admitted.reason:
                raise from_reason(admitted.reason, admitted.detail)

    def usage(self) -> EngineUsage:
        held = len(self._decodes) + len(self._prefills)
        # The scheduler reports its load a moment later than requests start and end here.
        running = min(held, self.load.running_requests)
        return EngineUsage(running, held - running, self.load.used_blocks)

    @property
    def step_times(self) -> StepTimes:
        return self.load.step_times

    @property
    def promises(self) -> PromiseCounts:
        return self.load.promises

    async def keep(self, terms: KeepTerms) -> Kept | None:
        query = link_pb2.AttachResponse(keep_query=terms_to_proto(terms))
        answer = await self._require_started()[1].ask_scheduler(query)
        return kept_from_proto(answer.keep_answer)

    async def load_adapter(self, name: str, folder: Path, *, is_3d_lora_weight: bool) -> Adapter:
        llm, _ = self._require_started()
        assert self._adapters is not None
        try:
            return await self._adapters.load(llm, name, folder, is_3d_lora_weight=is_3d_lora_weight)
        finally:
            self.adapters = self._adapters.identities

    def unload_adapter(self, adapter: Adapter) -> None:
        assert self._adapters is not None
        self._adapters.unload(adapter)

    async def reset_prefix_cache(self) -> bool:
        return await reset_prefix_cache(self._require_started()[0])

    async def close(self) -> None:
        if self._link is not None:
            self._link.begin_close()
        if self._group is not None:
            if self._failure is not None:
                self._failure = await self._group.loss() or self._failure
            await self._group.leave(waits=self._failure is None)
            self._group = None
        if self._kv_events is not None:
            await self._kv_events.close()
            self._kv_events = None
        self._constraints.close()
        if self.broadcast is not None:
            await asyncio.to_thread(self.broadcast.close)
        if self._llm is not None:
            await end_llm(self._llm)
            self._llm = None
        if self._first_token_sampler is not None:
            self._first_token_sampler.close()
            self._first_token_sampler = None
        if self._link is not None:
            await self._link.close()
            self._link = None
        self.landed_memories = {}
        if self._folder is not None:
            self._folder.cleanup()
        if self._failure is not None:
            # The status of the process shows that it is to be started again.
            raise self._failure

    def _require_started(self, new_transfer: str = "") -> tuple[AsyncLLM, LinkServer]:
        """`new_transfer` must not be in use, if it is given."""
        if self._llm is None or self._link is None:
            raise InternalError("the engine is not running")
        if new_transfer in self._prefills or new_transfer in self._decodes:
            raise DuplicateTransfer(
                f"transfer {new_transfer} is in use already",
                metadata={"transfer_id": new_transfer},
            )
        return self._llm, self._link

    def _message_received(self, rank: int, message: link_pb2.AttachRequest) -> None:
        match message.WhichOneof("message"):
            case "reservation":
                self._blocks_reserved(reservation_from_proto(message.reservation))
            case "report":
                report = report_from_proto(message.report)
                if report.transfer_id in self._prefills:
                    self._prefills[report.transfer_id].sending.rank_quiet(report)
            case "step_started":
                started = message.step_started
                if started.transfer_id in self._decodes:
                    self._decodes[started.transfer_id].step_started(started.monotonic_ns)
            case "request_failed":
                failed = message.request_failed
                name = failed.transfer_id
                ending = self._decodes.get(name) or self._aborted.pop(name, None)
                if ending is not None:
                    ending.failure_reported(failed.cost, load_failed=failed.load_failed)
            case "load":
                self.load = load_from_proto(message.load)
            case "steps":
                self.steps.report(steps_from_proto(message.steps))
            case "blocks_compared":
                self._comparisons.reported(message.blocks_compared)
            case "tier_loaded":
                self.tier_loaded(tier_load_from_proto(message.tier_loaded), rank)
            case other:
                log.error("rank %d of the engine has sent %s", rank, other)

    def _blocks_reserved(self, reservation: Reservation) -> None:
        name = reservation.transfer_id
        request = self._decodes.get(name) or self._fetching.get(name)
        if request is not None:
            request.blocks_reserved(reservation)
        elif self._link is not None and reservation.start_token < reservation.end_token:
            # The request was closed before its reservation arrived, so it cannot release the blocks itself.
            self._link.transfer_event(Released(reservation.transfer_id))

    def _engine_lost(self, why: str) -> None:
        error = InternalError(f"vLLM has ended: {why}")
        self._failure = self._failure or error
        for prefill in self._prefills.values():
            prefill.sending.ranks_lost(error)
        for decode in self._decodes.values():
            decode.fail(error)
        log.critical("%s; this worker cannot serve any more and terminates", error.detail)
        with suppress(ProcessLookupError):
            os.kill(os.getpid(), signal.SIGTERM)


def _open_pool(link: LinkServer, layout: KvLayout, prefix_hash_key: int) -> None:
    """Lets the scheduler and every rank use the remote pool."""
    opened = link_pb2.OpenPool(prefix_hash_key=prefix_hash_key, layout=layout_to_proto(layout))
    message = link_pb2.AttachResponse(open_pool=opened)
    link.send_to_scheduler(message)
    link.send_to_ranks(message)
