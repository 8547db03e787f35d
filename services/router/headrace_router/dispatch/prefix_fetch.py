"""A decode worker that computes a prompt gets the KV that another one has: docs/architecture/prefix-fetch.md."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.inference.v1 import receipt_pb2
from headrace.kv.v1 import prefix_pb2
from headrace_common.errors import DecodeFull, HeadraceError
from headrace_common.time_model.model import NO_STEPS
from headrace_frontend.running.attempt import AdmittedRequest
from headrace_kv.layout import STATE, WorkerRef
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_router.dispatch.warming import KvSource, Warming
from headrace_router.placement import Decision
from headrace_router.prefill_queue.task import SignTask
from headrace_router.tracing.attempt_record import Move, RoutedAttempt
from headrace_router.workers.connection import LoadReservation

if TYPE_CHECKING:
    from headrace_router.dispatch.dispatcher import RequestDispatcher

_LOG = logging.getLogger(__name__)

FETCH_S: Final = 2.0
"""The longest time that a fetch may delay a prompt."""
REFUSED: Final = "REFUSED"
"""The outcome of a fetch from a worker that does not send."""


@dataclass(eq=False, slots=True)
class PrefixFetches:
    """Fetches prefixes for prompts that decode workers compute. Any failure costs time only. One event loop owns it.

    `sign` makes the ticket with which a source sends. `count` gets the decode worker of each fetch, its error's reason,
    or "", and its tokens.
    """

    sign: SignTask
    count: Callable[[str, str, int], None]
    rule: FetchRule

    async def fetch(
        self,
        dispatcher: RequestDispatcher,
        request: AdmittedRequest,
        token_ids: array[int],
        decision: Decision,
        load: LoadReservation,
        record: RoutedAttempt,
    ) -> None:
        """Returns once the decode worker, which has `load`, has in its cache what is worth to be fetched."""
        source = self._source(dispatcher, request, token_ids, decision)
        if source is None:
            return
        ref, asked = source.ref, source.asked
        target, start_ns = decision.worker.ref, time.monotonic_ns()
        tokens = len(asked.generated_token_ids)
        reason, sent_bytes = "", None

        def charge(receipt: receipt_pb2.Receipt) -> None:
            # The attempt counts the tokens as cached.
            receipt.cached_tokens = 0
            record.more_receipts.append(receipt)
            record.charge_late(receipt)

        warming = Warming(
            request, decision.worker, load, dispatcher.ticket_key_id, self.sign, charge
        )
        never = asyncio.get_running_loop().create_future()
        try:
            sent_bytes = await warming.run(token_ids[: tokens + 1], 1, source, FETCH_S, never)
        except HeadraceError as error:
            reason = error.reason
            _LOG.warning("%s computes a prefix: %s", target, error.detail)
        end_ns, link = time.monotonic_ns(), _link(ref, target)
        if sent_bytes is not None:
            self.rule.fetched(link, sent_bytes, 1e-9 * (end_ns - start_ns))
        elif reason and reason != DecodeFull.reason:
            self.rule.failed(link)
        reason = reason or ("" if sent_bytes is not None else REFUSED)
        tokens = 0 if reason else tokens - decision.decode_cached_tokens
        self.count(target.worker_id, reason, tokens)
        names = ref.worker_id, target.worker_id
        record.fetched = Move(
            *names, sent_bytes or 0, start_ns, end_ns, tokens=tokens, reason=reason
        )

    def _source(
        self,
        dispatcher: RequestDispatcher,
        request: AdmittedRequest,
        token_ids: array[int],
        decision: Decision,
    ) -> KvSource | None:
        """Where to fetch how many tokens from. None where the prompt is to be computed."""
        prepared, target, start = request.prepared, decision.worker, decision.decode_cached_tokens
        workers, layout, needed = dispatcher.workers, target.layout, len(token_ids) - 1
        if (
            decision.remote
            or needed - start < self.rule.min_tokens
            or prepared.images
            or prepared.adapter is not None
            or prepared.sampling.HasField("prompt_logprobs")
            or any(group.kind == STATE for group in layout.groups)
        ):
            return None
        table = workers.table(prepared.model)
        usable = table.reachable & ~table.draining
        refs = {table.workers[row].ref for row in usable.nonzero()[0]} - {target.ref}
        refs -= workers.distrusted(target.ref).keys()
        salt = prepared.cache_salt
        cached = dispatcher.prefixes.cached_refs(prepared.model, token_ids, salt, frozenset(refs))
        ref = max(cached, key=cached.__getitem__, default=None)
        channel = None if ref is None else workers.channel_of(ref.incarnation)
        if ref is None or channel is None:
            return None
        end = min(cached[ref], needed)
        end -= end % layout.block_tokens
        load, link = table.load(target.ref), _link(ref, target.ref)
        steps = NO_STEPS if load is None else load.times.steps
        payload_bytes = (end - start) * layout.token_bytes
        if not self.rule.prefers_fetch(link, start, end, payload_bytes, steps):
            return None
        asked = prefix_pb2.SendPrefixRequest(generated_token_ids=token_ids[:end], cache_salt=salt)
        return KvSource(ref, channel, asked)


def _link(source: WorkerRef, target: WorkerRef) -> str:
    return f"{source.worker_id}>{target.worker_id}"
