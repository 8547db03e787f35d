"""A decode worker that computes a prompt gets the KV that another worker has of it: see docs/architecture/prefix-fetch.md."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace.kv.v1 import prefix_pb2
from headrace_common.errors import DecodeFull, HeadraceError, NotFound
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_kv.layout import STATE, WorkerRef
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_router.dispatch.warming import KvSource, Warming
from headrace_router.placement import Decision
from headrace_router.prefill_queue.task import SignTask
from headrace_router.prefix_cache.cached_prompts import CachedPrompts
from headrace_router.tracing.attempt_record import Fetch, RoutedAttempt
from headrace_router.workers.connection import LoadReservation
from headrace_router.workers.directory import WorkerDirectory

_LOG = logging.getLogger(__name__)

OF_SOURCE_MAX: Final = 2
"""Fetches at once from a worker, of this router."""
FETCH_S: Final = 2.0
"""The longest time that a fetch may delay a prompt."""
REFUSED: Final = "REFUSED"
"""The outcome of a fetch from a worker that does not send."""


@dataclass(eq=False, slots=True)
class PrefixFetches:
    """Fetches prefixes for prompts that decode workers compute. Any failure costs time only. One event loop owns it.

    `sign` makes the ticket with which a source sends. `count` gets the decode worker of each fetch, its error's reason, or "", and
    its tokens.
    """

    workers: WorkerDirectory
    prefixes: CachedPrompts
    ticket_key_id: bytes
    sign: SignTask
    count: Callable[[str, str, int], None]
    rule: FetchRule
    _sources: Counter[WorkerRef] = field(default_factory=Counter, init=False)

    async def fetch(
        self,
        request: AdmittedRequest,
        token_ids: array[int],
        decision: Decision,
        load: LoadReservation,
        record: RoutedAttempt,
    ) -> None:
        """Returns once the decode worker has in its cache what is worth to be fetched. `load` is reserved there."""
        found = self._source(request, token_ids, decision)
        if found is None:
            return
        ref, end_token = found
        target, start_ns = decision.worker, time.monotonic_ns()
        channel = self.workers.channel_of(ref.incarnation)
        if channel is None:
            return
        asked = prefix_pb2.SendPrefixRequest(
            generated_token_ids=token_ids[:end_token], cache_salt=request.prepared.cache_salt
        )
        warming = Warming(
            request, target, load, self.ticket_key_id, self.sign, record.charge_fetch
        )
        link, outcome, sent_bytes = f"{ref.worker_id}>{target.ref.worker_id}", "", 0
        never = asyncio.get_running_loop().create_future()
        self._sources[ref] += 1
        try:
            source = KvSource(ref, channel, asked)
            sent = await warming.run(token_ids[: end_token + 1], 1, source, FETCH_S, never)
            sent_bytes, outcome = sent or 0, "" if sent is not None else REFUSED
            self.rule.fetched(link, sent_bytes, 1e-9 * (time.monotonic_ns() - start_ns))
        except HeadraceError as error:
            outcome = error.reason
            _LOG.warning("%s computes a prefix: %s", target.ref, error.detail)
            if not isinstance(error, DecodeFull | NotFound):
                self.rule.failed(link)
        finally:
            self._sources[ref] -= 1
            self._sources += Counter()
        tokens = 0 if outcome else end_token - decision.decode_cached_tokens
        self.count(target.ref.worker_id, outcome, tokens)
        end_ns = time.monotonic_ns()
        record.fetched = Fetch(
            ref.worker_id, target.ref.worker_id, tokens, sent_bytes, outcome, start_ns, end_ns
        )

    def _source(
        self, request: AdmittedRequest, token_ids: array[int], decision: Decision
    ) -> tuple[WorkerRef, int] | None:
        """The worker to fetch from, and one past the last token. None where the prompt is to be computed."""
        prepared, target = request.prepared, decision.worker
        table = self.workers.table(prepared.model)
        layout, start = target.layout, decision.decode_cached_tokens
        if (
            decision.remote
            or self.rule.gain >= 1.0
            or decision.missing_tokens < self.rule.min_tokens
            or prepared.images
            or prepared.adapter is not None
            or prepared.sampling.HasField("prompt_logprobs")
            or any(group.kind == STATE for group in layout.groups)
        ):
            return None
        usable = table.reachable & ~table.draining
        refs = {
            worker.ref
            for worker, fit in zip(table.workers, usable, strict=True)
            if fit and worker is not target and self._sources[worker.ref] < OF_SOURCE_MAX
        }
        refs -= self.workers.distrusted(target.ref).keys()
        cached = self.prefixes.cached_refs(
            prepared.model, token_ids, prepared.cache_salt, frozenset(refs)
        )
        if not cached:
            return None
        ref = max(cached, key=cached.__getitem__)
        end = min(cached[ref], len(token_ids) - 1)
        end -= end % layout.block_tokens
        link = f"{ref.worker_id}>{target.ref.worker_id}"
        payload_bytes = (end - start) * layout.token_bytes
        times = table.load(target.ref)
        if times is None or not self.rule.prefers_fetch(
            link, start, end, payload_bytes, times.times.steps
        ):
            return None
        return ref, end
