"""The cached prefixes of all workers and models, as the workers announce them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import grpc
import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import ProtocolViolation
from headrace_common.process.pacing import SHORTEST_S, heartbeat_interval_s, must_change
from headrace_common.registry.duties import WORKERS
from headrace_common.tasks import BackgroundTasks, end_task, run_forever
from headrace_kv.layout import WorkerRef, layout_from_proto
from headrace_kv.prefix.events import Tier, event_from_proto, load_time_from_proto
from headrace_kv.prefix.hashing import key_fingerprint
from headrace_router.prefix_cache.cached_prompts import CachedPrompts, TierPrices
from headrace_router.prefix_cache.index import SLOTS_MAX, ApplyResult, PrefixIndex
from headrace_router.workers.dials import Dials, RetryDelay

# A worker that should send every second loses the credit for its cache without an event for this long.
EVENT_TIMEOUT_S: Final = 5.0
_BACKOFF_MIN_S: Final = 0.05
_BACKOFF_MAX_S: Final = 5.0

_EndReason = Literal["broken", "paced", "resync", "unserved"]


class KvEventFeed:
    """Applies the events of one incarnation of a worker to an index, until closed.

    After a lost event, a different digest or a broken stream it subscribes again. The delay grows with each attempt
    until a heartbeat matches. A worker that serves no events gets no credit, and neither does another incarnation.
    `on_heartbeat` receives every heartbeat.

    `find_index` is called when the first event arrives. It returns None when the index is full. Until then the worker
    has no place in an index, and between two tries no channel.
    """

    def __init__(
        self,
        ref: WorkerRef,
        endpoint: str,
        find_index: Callable[[], PrefixIndex | None],
        open_channel: Callable[[str], grpc.aio.Channel],
        dials: Dials,
        event_timeout_s: float = EVENT_TIMEOUT_S,
        on_heartbeat: Callable[[worker_pb2.SubscribeKvEventsResponse], None] | None = None,
        *,
        interval_s: float = SHORTEST_S,
    ) -> None:
        self._interval_s = self._wanted_interval_s = interval_s
        self.ref = ref
        self.endpoint = endpoint
        self.index: PrefixIndex | None = None
        self._find_index = find_index
        self._open_channel = open_channel
        self._dials = dials
        self._retry = RetryDelay(_BACKOFF_MIN_S, _BACKOFF_MAX_S)
        self._channel: grpc.aio.Channel | None = None
        self._event_timeout_s = event_timeout_s
        self._on_heartbeat = on_heartbeat
        self._due_s = asyncio.get_running_loop().time() + self._limit_s
        self._closing: asyncio.Task[None] | None = None
        self._task = run_forever(self._follow, f"kv-events-{ref}")

    def check_timeout(self, now_s: float) -> float:
        """Suspends the worker when its last event is too old, by the loop's time. Returns when to call it again."""
        if now_s <= self._due_s:
            return self._due_s
        self._suspend()
        return now_s + self._event_timeout_s

    def set_interval(self, interval_s: float) -> None:
        """Asks for other heartbeats after the next event, if the difference is worth a new stream."""
        self._wanted_interval_s = interval_s

    @property
    def _limit_s(self) -> float:
        return self._event_timeout_s + self._interval_s - SHORTEST_S

    def close(self) -> asyncio.Task[None]:
        """Removes the worker from the index at once. The returned task ends once the channel is closed."""
        if self._closing is None:
            if self.index is not None:
                self.index.remove_worker(self.ref)
            self._task.cancel()
            self._closing = asyncio.create_task(self._end_stream())
        return self._closing

    async def _end_stream(self) -> None:
        await asyncio.wait([self._task])
        await self._close_channel()

    async def _close_channel(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()

    def _suspend(self) -> None:
        if self.index is not None:
            self.index.suspend(self.ref)

    async def _follow(self) -> None:
        while True:
            reason = await self._subscribe()
            if reason == "unserved":
                self._suspend()
                return
            if reason == "paced":
                continue
            if self.index is None:
                await self._close_channel()
            await asyncio.sleep(self._retry.failed_s())

    async def _subscribe(self) -> _EndReason:
        """Applies events until the stream ends or the index needs another subscription."""
        call: Any = None
        try:
            async with self._dials.turn(self._retry):
                call = self._call()
                message = await self._next_message(call)
            if message is not None and self.index is None:
                self._open_index()
            while message is not None and self.index is not None:
                if self._apply(self.index, message) is ApplyResult.NEEDS_RESYNC:
                    return "resync"
                if must_change(self._interval_s, self._wanted_interval_s):
                    return "paced"
                message = await self._next_message(call)
        except grpc.aio.AioRpcError as error:
            return self._end_reason(error)
        except TimeoutError:
            _LOG.warning("%s has sent no KV events for %g s", self.ref, self._limit_s)
        except ProtocolViolation as error:
            _LOG.warning("KV events of %s: %s", self.ref, error.detail)
        except Exception:
            # A part of an event may be applied.
            self._suspend()
            raise
        finally:
            if call is not None:
                call.cancel()
        return "broken"

    def _call(self) -> Any:
        if self._channel is None:
            self._channel = self._open_channel(self.endpoint)
        since = 0 if self.index is None else self.index.resume_after(self.ref)
        self._interval_s = self._wanted_interval_s
        return worker_pb2_grpc.WorkerServiceStub(self._channel).SubscribeKvEvents(
            worker_pb2.SubscribeKvEventsRequest(
                incarnation=self.ref.incarnation,
                since_sequence=since,
                max_interval=duration_from_seconds(self._interval_s),
            )
        )

    async def _next_message(self, call: Any) -> worker_pb2.SubscribeKvEventsResponse | None:
        """None at the end of the stream."""
        async with asyncio.timeout(self._limit_s):
            message = await call.read()
        if not isinstance(message, worker_pb2.SubscribeKvEventsResponse):
            return None
        return message

    def _open_index(self) -> None:
        index = self._find_index()
        if index is not None:
            index.add_worker(self.ref)
            self.index = index

    def _apply(self, index: PrefixIndex, sent: worker_pb2.SubscribeKvEventsResponse) -> ApplyResult:
        event = event_from_proto(sent)
        if self._on_heartbeat is not None and event.kind == "heartbeat":
            self._on_heartbeat(sent)
        result = index.apply(self.ref, event)
        if result is ApplyResult.APPLIED:
            self._due_s = asyncio.get_running_loop().time() + self._limit_s
            if event.kind == "heartbeat":
                self._retry.answered()
        return result

    def _end_reason(self, error: grpc.aio.AioRpcError) -> _EndReason:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            _LOG.info("%s serves no KV events", self.ref)
            return "unserved"
        if self._retry.failures == 0:
            _LOG.warning(
                "KV events of %s ended: %s: %s", self.ref, error.code().name, error.details()
            )
        return "broken"


_LOG = logging.getLogger(__name__)

# A worker has a second slot while a snapshot arrives, and its old slots until they are swept.
_WORKERS_MAX: Final = SLOTS_MAX // 2
_UPKEEP_INTERVAL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class _FeedKey:
    """The parameters of a feed. A member with other parameters gets another feed."""

    ref: WorkerRef
    endpoint: str
    model: str
    block_tokens: int


class PrefixCacheDirectory:
    """Applies the events of all workers to one index for each model and block size. One event loop owns it.

    `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. Without it no worker gets credit. Blocks
    in slower tiers count for less: see TierPrices, also for `compute_s_per_token`. Every worker of a model reaches the
    blocks that any worker has announced in its remote pool. `dials` bounds the tries to reach
    members, and may be shared.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        prefix_hash_key: Callable[[], int],
        *,
        compute_s_per_token: Callable[[str], float] = lambda model: 0.0,
        event_timeout_s: float = EVENT_TIMEOUT_S,
        dials: Dials | None = None,
    ) -> None:
        self._dials = dials or Dials()
        self._registered: dict[tuple[str, str], tuple[registry_pb2.Member, _FeedKey]] = {}
        self._open_channel = open_channel
        self._prefix_hash_key = prefix_hash_key
        self._prices = TierPrices(compute_s_per_token)
        self.cached = CachedPrompts(prefix_hash_key, self._prices)
        """What the workers have of prompts."""
        self._event_timeout_s = event_timeout_s
        self._feeds: dict[_FeedKey, KvEventFeed] = {}
        self.faults: dict[WorkerRef, str] = {}
        """Workers that hash blocks in another way than this router, with the reason. Their caches do not count."""
        self._closing = BackgroundTasks("the end of a feed of prefixes")
        self._upkeep: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def key_fingerprint(self) -> int:
        """The fingerprint of the key for prompt hashes. 0 while the key is unknown."""
        return key_fingerprint(self._prefix_hash_key())

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Follows exactly these members. Does nothing after `close`."""
        if self._closed:
            return
        self._registered = {
            (member.worker_id, member.incarnation): (member, self._key_of(member))
            for member in members
            if member.role in WORKERS
        }
        wanted = {key for _, key in self._registered.values()}
        interval_s = heartbeat_interval_s(len(wanted))
        for feed in self._feeds.values():
            feed.set_interval(interval_s)
        for gone in set(self._feeds) - wanted:
            self._closing.start(self._feeds.pop(gone).close())
            self.faults.pop(gone.ref, None)
            self._prices.remove(gone.ref)
        for key in wanted - self._feeds.keys():
            self._feeds[key] = KvEventFeed(
                key.ref,
                key.endpoint,
                partial(self._find_index, key),
                self._open_channel,
                self._dials,
                self._event_timeout_s,
                partial(self._apply_heartbeat, key),
                interval_s=interval_s,
            )
        self.cached.keep({(key.model, key.block_tokens) for key in wanted})
        if self._upkeep is None:
            self._upkeep = run_forever(self._run_upkeep, "prefix-index-upkeep")

    async def close(self) -> None:
        """Ends every stream."""
        self._closed = True
        await end_task(self._upkeep)
        for feed in self._feeds.values():
            self._closing.start(feed.close())
        self._feeds.clear()
        await self._closing.wait()

    def _apply_heartbeat(self, key: _FeedKey, sent: worker_pb2.SubscribeKvEventsResponse) -> None:
        """Takes what a worker's heartbeat says beside the digest. Raises ProtocolViolation."""
        if sent.heartbeat.HasField("hashing"):
            self._check_hashing(key, sent.heartbeat.hashing)
        load_s = load_time_from_proto(sent)
        if load_s is not None:
            self._prices.measured(key.ref, Tier(sent.tier), load_s)

    def _check_hashing(self, key: _FeedKey, theirs: worker_pb2.KvHashing) -> None:
        """Records and logs once why a worker's cache does not count."""
        ours = worker_pb2.KvHashing(
            key_fingerprint=self.key_fingerprint, block_tokens=key.block_tokens
        )
        if theirs == ours or not ours.key_fingerprint:
            self.faults.pop(key.ref, None)
            return
        fault = f"it hashes {_describe(theirs)}, this router {_describe(ours)}"
        if self.faults.get(key.ref) != fault:
            self.faults[key.ref] = fault
            _LOG.warning("%s gets no credit for its cache: %s", key.ref, fault)

    def _find_index(self, key: _FeedKey) -> PrefixIndex | None:
        """The index for a worker that sends events. None when it has no room for another worker."""
        index = self.cached.model_index(key.model, key.block_tokens).index
        if sum(feed.index is index for feed in self._feeds.values()) < _WORKERS_MAX:
            return index
        _LOG.warning("%s gets no credit for its cache: too many workers", key.ref)
        return None

    def _key_of(self, member: registry_pb2.Member) -> _FeedKey:
        """Most members are the same objects as before."""
        ref = member.worker_id, member.incarnation
        known, key = self._registered.get(ref, (None, None))
        return key if key is not None and known is member else _feed_key(member)

    async def _run_upkeep(self) -> None:
        check_s = 0.0
        while True:
            await asyncio.sleep(_UPKEEP_INTERVAL_S)
            now_s = asyncio.get_running_loop().time()
            if now_s >= check_s:
                # An event, and a new feed, make it later.
                due = [feed.check_timeout(now_s) for feed in self._feeds.values()]
                check_s = min((now_s + self._event_timeout_s, *due))
            for index in self.cached.all():
                await index.sweep()


def _describe(hashing: worker_pb2.KvHashing) -> str:
    return f"blocks of {hashing.block_tokens} tokens under key {hashing.key_fingerprint:08x}"


def _feed_key(member: registry_pb2.Member) -> _FeedKey:
    return _FeedKey(
        WorkerRef(member.worker_id, member.incarnation),
        member.endpoint,
        member.model,
        layout_from_proto(member.layout).block_tokens,
    )
