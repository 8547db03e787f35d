"""Plans what an engine's requests load from lower tiers, and what they store there. Uses no vLLM types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace_common.callers.priority import Priority
from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.pool_planner import PoolPlanner, PoolUse
from headrace_engine.connector.step_plan import HostSend, RequestCopy, StepPlan, TokenRange
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import CachedBlock
from headrace_kv.tiers.promises import KeepTerms, Kept, Promises
from headrace_kv.tiers.tiers import LowerTiers, TierChange, TierHit, TierPlan, TierSettings

_NO_HIT = TierHit(())


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Blocks that can be found in a tier from now on (`stored`), or no longer, by vLLM's hashes."""

    tier: Tier
    stored: bool
    block_hashes: list[bytes]


@dataclass(slots=True)
class _Request:
    """`block_hashes` is vLLM's own list, which grows. Its first `stored` blocks were offered to the tiers.

    `hit`: blocks from its block `hit_start` on. They are held until it has blocks of its own. The load of its
    `loaded_until` first blocks is copy number `load_copy` of the next step.
    """

    block_hashes: Sequence[bytes]
    priority: Priority
    block_ids: list[int] = field(default_factory=list)
    stored: int = 0
    hit: TierHit = _NO_HIT
    hit_start: int = 0
    loaded_until: int = 0
    load_copy: int = 0
    has_copies: bool = False

    def prefixes(self, start: int, end: int) -> list[int]:
        """The names of blocks [start, end), as many as there are."""
        return [int.from_bytes(one, "big") for one in self.block_hashes[start:end]]

    def hold(self, hit: TierHit, start: int = 0) -> None:
        self.hit, self.hit_start = hit, start

    def load(self, copy_count: int) -> TierHit:
        """The held blocks are loaded from now on, after `copy_count` other copies of the next step."""
        loaded, self.hit = self.hit, _NO_HIT
        self.loaded_until, self.load_copy = self.hit_start + len(loaded), copy_count
        self.has_copies = True
        return loaded

    def step_planned(self, block_ids: Sequence[int], *, replaces: bool) -> None:
        """The next step has these blocks."""
        if replaces:
            self.block_ids.clear()
        self.block_ids.extend(block_ids)

    def take_unstored(self, computed_tokens: int, block_tokens: int) -> list[CachedBlock]:
        """The blocks that steps until now have computed, and that were not offered yet.

        `computed_tokens` may count drafts of a step under way. Their tokens are not known, so their blocks have no
        hashes.
        """
        start = self.stored
        end = min(computed_tokens // block_tokens, len(self.block_hashes), len(self.block_ids))
        self.stored = max(start, end)
        return [
            CachedBlock(prefix, block, self.priority)
            for prefix, block in zip(
                self.prefixes(start, end), self.block_ids[start:end], strict=True
            )
        ]

    def copies_planned(self) -> None:
        self.has_copies = True

    def preempted(self) -> None:
        """Its blocks are gone, and it begins again."""
        self.block_ids.clear()
        self.stored = 0
        self.has_copies = False


class HostSends:
    """The scheduling thread calls it. Blocks stay in main memory until no rank reads them (I2).

    Without `enabled`, nothing is sent from there.
    """

    def __init__(self, tiers: LowerTiers, rank_count: int, *, enabled: bool) -> None:
        self._tiers = tiers
        self._rank_count = rank_count
        self._enabled = enabled and tiers.names[:1] == (Tier.HOST,)
        self._next_number = 1
        # Blocks that ranks send, and the ranks that may still read them.
        self._held: dict[int, TierHit] = {}
        self._missing: dict[int, int] = {}
        self._sends: list[HostSend] = []

    @property
    def is_due(self) -> bool:
        """Whether the next step sends something."""
        return bool(self._sends)

    def send(
        self,
        transfer_id: str,
        start_token: int,
        first_block: int,
        prefixes: Sequence[int],
        block_tokens: int,
        copies_before: int,
    ) -> int:
        """Sends tokens from `start_token` on, in the blocks `prefixes` of the prompt from its `first_block` on.

        Returns one past the last token that is sent, `start_token` for none. The first `copies_before` copies of the
        next step are made before. One of them may write these blocks.
        """
        if not self._enabled:
            return start_token
        hit = self._tiers.hold(prefixes, Priority.LOW)
        count = hit.count_leading(Tier.HOST)
        self._tiers.release(TierHit(hit.blocks[count:]))
        if not count:
            return start_token
        number = self._next_number
        self._next_number += 1
        self._held[number] = held = TierHit(hit.blocks[:count])
        self._missing[number] = self._rank_count
        end_token = (first_block + count) * block_tokens
        # The blocks before them are not read.
        block_ids = (0,) * first_block + tuple(block for _, block in held.blocks)
        tokens = TokenRange(transfer_id, start_token, end_token, (block_ids,))
        self._sends.append(HostSend(number, tokens, copies_before))
        return end_token

    def ended(self, numbers: Iterable[int]) -> None:
        """A rank reads the blocks of these sends no more. Every rank reports each of them once."""
        for number in numbers:
            if number not in self._held:
                continue
            self._missing[number] -= 1
            if not self._missing[number]:
                del self._missing[number]
                self._tiers.release(self._held.pop(number))

    def clear(self) -> list[TierChange]:
        """Forgets the blocks that are held. They stay until no rank reads them."""
        held = [block for hit in self._held.values() for _, block in hit.blocks]
        return self._tiers.drop(Tier.HOST, held).changes if held else []

    def add_to(self, plan: StepPlan) -> None:
        """Adds what was planned since the last step."""
        plan.plan_host_sends(self._sends)
        self._sends = []


class TierPlanner:
    """The scheduling thread calls it. A request's full blocks are offered to the tiers once a step has computed them.

    Copies out of a request's blocks end before the blocks are freed: see `request_finished` and StepPlan. Without
    tiers, it knows no request.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        block_tokens: int,
        use: PoolUse | None = None,
        *,
        sends_from_host: bool = False,
    ) -> None:
        self._tiers = tiers
        self.promises = Promises(tiers, block_tokens)
        """What stays in the tiers for a time. Others only read and renew."""
        use = use or PoolUse()
        self.pool = PoolPlanner(tiers, use, self._carry_out)
        """What goes to a remote pool, and comes from it."""
        self.host_sends = HostSends(tiers, use.rank_count, enabled=sends_from_host)
        """What transfers read straight from main memory."""
        self._block_tokens = block_tokens
        self._hash_bytes = 0
        self._requests: dict[str, _Request] = {}
        # vLLM finishes a request with a failed load before it reports the failure.
        self._loading: dict[str, tuple[TierHit, list[int]]] = {}
        self._copies: list[RequestCopy] = []
        self._loads: dict[str, bool] = {}
        self._finished: dict[str, bool] = {}
        self._changes: list[TierChange] = []

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for blocks of the tiers or of the remote pool."""
        return bool(self._loading) or self.pool.is_waiting

    @property
    def names(self) -> tuple[Tier, ...]:
        """The tiers, from the fastest to the slowest."""
        return self._tiers.names

    @property
    def is_due(self) -> bool:
        """Whether the next step has something to do."""
        planned = self._copies or self._finished or self.pool.is_due or self.host_sends.is_due
        return bool(planned)

    def tier_tokens(self, request_id: str) -> dict[Tier, int]:
        """The tokens that `find` has found for a request, by the tier that they came from."""
        request = self._requests.get(request_id)
        found: dict[Tier, int] = {}
        if request is not None and request.hit:
            fetched = self.pool.fetched(request_id)
            start = request.hit_start
            prefixes = request.prefixes(start, start + len(request.hit))
            for prefix, (tier, _) in zip(prefixes, request.hit.blocks, strict=True):
                origin = Tier.REMOTE if prefix in fetched else tier
                found[origin] = found.get(origin, 0) + self._block_tokens
        return found

    def loads_for(self, request_id: str) -> bool:
        """Whether a request waits for blocks of the tiers. If vLLM ends it then with an error, the load has failed."""
        return request_id in self._loading

    def request_added(
        self, request_id: str, block_hashes: Sequence[bytes], priority: Priority = Priority.NORMAL
    ) -> None:
        """A new request of class `priority`. `block_hashes` names its full blocks, and grows with it."""
        if self._tiers.names:
            self._requests[request_id] = _Request(block_hashes, priority)

    def find(self, request_id: str, computed_tokens: int, end_token: int) -> int | None:
        """The number of tokens from `computed_tokens` on, and before `end_token`, that tiers have in full blocks.

        They stay there until `blocks_allocated` or the next call. `computed_tokens` fill whole blocks. None while
        blocks of the remote pool are on their way to the tiers.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0
        self._tiers.release(request.hit)
        first, end = computed_tokens // self._block_tokens, end_token // self._block_tokens
        prefixes = request.prefixes(first, end)
        if prefixes:
            self._hash_bytes = len(request.block_hashes[0])
        request.hold(self._tiers.hold(prefixes, request.priority), first)
        if self.pool.must_wait(request_id, prefixes[len(request.hit) :]):
            return None
        return len(request.hit) * self._block_tokens

    def blocks_allocated(
        self, request_id: str, block_ids: Sequence[int], external_tokens: int
    ) -> int:
        """The request has blocks for its tokens, and gets `external_tokens` of them from elsewhere.

        Returns how many of them are loaded from tiers, which are the first ones. The others come from a prefill worker.
        """
        request = self._requests.get(request_id)
        if request is None or not request.hit:
            return 0
        if not external_tokens:
            self._tiers.release(request.hit)
            request.hold(_NO_HIT)
            return 0
        first = request.hit_start
        hit = request.load(len(self._copies))
        self._plan(request_id, self._tiers.load(hit, block_ids[first : first + len(hit)]))
        self._loading[request_id] = hit, request.prefixes(first, first + len(hit))
        loaded_tokens = len(hit) * self._block_tokens
        self._loads[request_id] = external_tokens > loaded_tokens
        return loaded_tokens

    def send_from_host(self, request_id: str, transfer_id: str, start_token: int) -> int:
        """Sends those tokens of a request straight from main memory that it loads, from `start_token` on.

        Also sends those before them that main memory has too. Call it after `blocks_allocated`. Returns one past the
        last token that is sent, `start_token` for none.
        """
        request = self._requests.get(request_id)
        if request is None:
            return start_token
        first = start_token // self._block_tokens
        return self.host_sends.send(
            transfer_id,
            start_token,
            first,
            request.prefixes(first, request.loaded_until),
            self._block_tokens,
            request.load_copy,
        )

    def loads_ended(self, request_ids: Iterable[str], failed_ids: Iterable[str]) -> None:
        """These requests wait for no KV any more. Those that failed may have found a broken block.

        They may have finished before.
        """
        failed = set(failed_ids)
        for request_id in request_ids:
            loaded = self._loading.pop(request_id, None)
            if loaded is not None and request_id in failed:
                self._changes += self._tiers.drop_loaded(*loaded).changes
                self.promises.blocks_lost()

    def step_planned(
        self, request_id: str, computed_tokens: int, block_ids: Sequence[int], *, replaces: bool
    ) -> None:
        """Offers the request's tokens up to `computed_tokens`, which steps before the next one compute.

        `block_ids` are new blocks of the request, or all of its blocks if it `replaces` them.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._store(request_id, request, computed_tokens)
            request.step_planned(block_ids, replaces=replaces)

    def request_preempted(self, request_id: str) -> bool:
        """Its blocks are about to be overwritten. Returns whether copies may still read them."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        had_copies = request.has_copies
        request.preempted()
        return had_copies

    def keep(self, request_id: str, computed_tokens: int, terms: KeepTerms) -> Kept | None:
        """Promises the request's tokens up to `computed_tokens`, before `request_finished`. None without tiers."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._store(request_id, request, computed_tokens)
        return self.promises.keep(terms, request.prefixes(0, request.stored))

    def request_finished(self, request_id: str, computed_tokens: int, *, sends: bool) -> bool:
        """Whether its blocks must stay until its copies have ended. Offers its tokens up to `computed_tokens`.

        `sends`: they also stay until a transfer is quiet.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self.pool.request_finished(request_id)
        self._tiers.release(request.hit)
        if request_id in self._loading:
            # vLLM frees its blocks when the load ends.
            return False
        self._store(request_id, request, computed_tokens)
        self.pool.used(request.prefixes(0, request.stored))
        if request.has_copies:
            self._finished[request_id] = sends
        return request.has_copies

    def clear(self) -> None:
        """Forgets every block. The remote pool keeps its own, which are announced no longer."""
        self.promises.end_all()
        self._changes += self._tiers.clear().changes
        self._changes += self.host_sends.clear()
        self.pool.lost()

    def take_changes(self) -> list[BlockChange]:
        """What has changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            BlockChange(
                change.tier,
                change.stored,
                [prefix.to_bytes(self._hash_bytes, "big") for prefix in change.prefixes],
            )
            for change in changes
        ]

    def add_to(self, plan: StepPlan) -> None:
        """Adds all that was planned since the last step."""
        self.promises.expire()
        self.pool.add_to(plan)
        self.host_sends.add_to(plan)
        plan.plan_copies(self._copies, self._loads, self._finished)
        self._copies, self._loads, self._finished = [], {}, {}

    def _store(self, request_id: str, request: _Request, computed_tokens: int) -> None:
        offered = request.take_unstored(computed_tokens, self._block_tokens)
        if offered:
            self._hash_bytes = len(request.block_hashes[0])
            plan = self._tiers.store(offered)
            if plan.copies:
                request.copies_planned()
            self._plan(request_id, plan)
            self.pool.offered([one.prefix for one in offered], plan)

    def _carry_out(self, plan: TierPlan) -> None:
        """Copies that no request waits for, and changes."""
        self._plan("", plan)

    def _plan(self, request_id: str, plan: TierPlan) -> None:
        self._copies += [RequestCopy(request_id, copy) for copy in plan.copies]
        self._changes += plan.changes


def plan_tiers(
    settings: TierSettings,
    groups: Sequence[LayerGroup],
    rank_count: int = 1,
    *,
    sends_from_host: bool = False,
) -> TierPlanner:
    """The planner of an engine. Raises ConfigError for a model or settings that tiers cannot be used with."""
    if not settings.names:
        return TierPlanner(LowerTiers({}), 1)
    if len(groups) != 1 or not groups[0].keeps_all_tokens:
        names = ", ".join(group.name for group in groups)
        raise ConfigError(
            f"the model has several kinds of cache ({names}), and only full attention can be kept below KV memory: "
            "set kv_host_gib to 0",
            metadata={"field": "kv_host_gib", "groups": names},
        )
    (group,) = groups
    tiers = LowerTiers(settings.block_counts(group.block_bytes))
    use = PoolUse(rank_count, settings.publishes, settings.pool_timeout_s)
    return TierPlanner(tiers, group.block_tokens, use, sends_from_host=sends_from_host)
