"""The step executors of all ranks of a sim engine, which are in one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

from headrace_engine.connector.layer_arrivals import LayerArrivals
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.step_executor import StepExecutor, layer_kinds
from headrace_engine.connector.step_plan import StepPlan
from headrace_engine.connector.tier_executor import PoolExecutor, TierExecutor
from headrace_kv.hidden_state import hidden_state_rank
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.messages import SendReport
from headrace_kv.send.sender import RankSender
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.pool import PoolKeys, RemotePool

# A request has one page of a state.
_ONE_PAGE_TOKENS = 1 << 62


def layer_groups(layout: KvLayout) -> tuple[LayerGroup, ...]:
    """The groups of a layout, for the planner of its engine's steps."""
    return tuple(
        LayerGroup(
            index,
            group.name,
            group.kind,
            group.head_count,
            group.block_tokens or _ONE_PAGE_TOKENS,
            "",
            (),
        )
        for index, group in enumerate(layout.groups)
    )


class Ranks:
    """The engine's event loop calls it. `on_report` gets the reports of StepExecutor, on any thread."""

    def __init__(self, layout: KvLayout, on_report: Callable[[SendReport], None]) -> None:
        self._layout = layout
        self.arrivals = LayerArrivals()
        self._executors = [StepExecutor(rank, on_report) for rank in range(layout.rank_count)]
        self._hidden_rank = hidden_state_rank(layout)
        self._tiers: list[TierExecutor] = []
        self._pools: list[PoolExecutor] = []
        # Ranks that have reported that they finished sending and loading, by request, and loads that failed on one.
        self._sent: Counter[str] = Counter()
        self._loaded: Counter[str] = Counter()
        self._failed: set[str] = set()
        ranks = layout.tensor_parallel_size
        self._by_layer = [
            self._executors[stage * ranks : (stage + 1) * ranks]
            for stage in map(layout.stage_of, range(layout.layer_count))
        ]

    def open_tiers(
        self,
        copiers: Sequence[TierCopier],
        on_load: Callable[[TierLoad], None],
        on_end: Callable[[], None],
    ) -> None:
        """Once, with a copier for each rank. `on_load` gets the loads of the first. `on_end` is called after each copy
        and move, on any thread.
        """
        for rank, (executor, copier) in enumerate(zip(self._executors, copiers, strict=False)):
            pool = PoolExecutor(rank, on_end)
            self._pools.append(pool)
            self._tiers.append(
                TierExecutor(
                    copier,
                    lambda load, rank=rank: None if rank else on_load(load),  # type: ignore[misc]
                    pool,
                    executor.send_from_host,
                    on_end=on_end,
                )
            )

    def attach_pool(self, pool: RemotePool, keys: PoolKeys) -> None:
        """Uses a pool over the memories of all ranks from now on."""
        for rank, executor in enumerate(self._pools):
            executor.attach(pool, keys, memory=rank)

    def close(self) -> None:
        """Frees the tiers. Later steps have none."""
        closing, self._tiers = self._tiers, []
        for tiers in closing:
            tiers.close()

    def __len__(self) -> int:
        return len(self._executors)

    def start_sending(
        self, new_sender: Callable[[int, Callable[[SendReport], None]], RankSender]
    ) -> list[RankSender]:
        """Gives each rank the sender that `new_sender` makes from its number and the callback for quiet transfers."""
        senders = []
        for rank, executor in enumerate(self._executors):
            sender = new_sender(rank, executor.transfer_quiet)
            senders.append(sender)
            executor.start(lambda: None, sender, layer_kinds(self._layout, rank))
        return senders

    def stop(self, transfer_id: str) -> None:
        """Stops a transfer on every rank."""
        for executor in self._executors:
            executor.stop(transfer_id)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the layers of a step are computed."""
        self.arrivals.begin_step(plan.awaited)
        for executor in self._executors:
            executor.begin_step(plan)
        for tiers in self._tiers:
            tiers.begin_step(plan)

    def layer_written(self, layer: int) -> None:
        """A step has written its KV of a layer. States are sent when the step ends."""
        if self._layout.group_of(layer).kind != STATE:
            for executor in self._by_layer[layer]:
                executor.layer_written(layer)

    def hidden_states_computed(self, read: Callable[[str], bytes]) -> None:
        """The step has computed the last hidden states. `read` gives that of a request."""

        def reader_of(request_id: str) -> Callable[[], bytes]:
            state = read(request_id)
            return lambda: state

        self._executors[self._hidden_rank].hidden_states_computed(reader_of)

    def end_step(self) -> tuple[set[str], set[str], set[str]]:
        """Sends what was not sent layer by layer. Returns requests that all ranks have finished sending, and those
        that all have loaded from tiers. The third set are the loads that failed on a rank. Transfers are in the plan.
        """
        for executor, tiers in zip_longest(self._executors, self._tiers):
            executor.forward_ended()
            sent, _, _ = executor.end_step()
            if tiers is not None:
                sent, loaded, failed = tiers.end_step(sent, set(), set())
                self._loaded.update(loaded)
                self._failed |= failed
            self._sent.update(sent)
        loads = self._take_whole(self._loaded)
        failed_loads = self._failed & loads
        self._failed -= failed_loads
        return self._take_whole(self._sent), loads, failed_loads

    def _take_whole(self, reports: Counter[str]) -> set[str]:
        """Removes and returns the requests that every rank has reported."""
        whole = {one for one, count in reports.items() if count == len(self._executors)}
        for request_id in whole:
            del reports[request_id]
        return whole

    def take_moves(self) -> list[tuple[int, int]]:
        """See PoolExecutor.take_ended."""
        return [move for tiers in self._tiers for move in tiers.take_moves()]

    def take_ended_host_sends(self) -> Sequence[int]:
        """The sends from main memory that have ended on a rank. Each rank reports each of them."""
        return [one for executor in self._executors for one in executor.take_ended_host_sends()]
