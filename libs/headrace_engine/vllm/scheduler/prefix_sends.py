"""Plans the sending of what decode requests have cached, to their prefill workers. Uses no vLLM types."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from headrace_engine.vllm.scheduler.block_holds import BlockHolds
from headrace_engine.vllm.scheduler.transfers import CachedPrefix, Receive
from headrace_engine.vllm.step.plan import StepPlan, TokenRange
from headrace_kv.handoff.messages import TransferTarget


class PrefixSends:
    """Sends for requests that wait for their KV. The blocks are held until the ranks are quiet (I2).

    What a request loads from lower tiers, the ranks send after its copies.
    The scheduling thread calls `plan_step`. Any thread may call the other methods.
    """

    def __init__(self, holds: BlockHolds, *, has_windows: bool) -> None:
        """`has_windows`: the blocks before a window are gone, so a prefix is sent whole or not at all."""
        self._holds = holds
        self._has_windows = has_windows
        # Targets, and transfers that have ended, in the order of their messages.
        self._events: deque[TransferTarget | str] = deque()
        self._postponed: dict[str, TransferTarget] = {}

    def request(self, target: TransferTarget) -> None:
        """A prefill worker wants the KV of some cached tokens. Once for each transfer."""
        self._events.append(target)

    def sent(self, transfer_id: str) -> None:
        """All ranks are quiet."""
        self._events.append(transfer_id)

    def plan_step(
        self, plan: StepPlan, receives: Mapping[str, Receive], step: int, *, computes: bool
    ) -> None:
        """Adds what begins with this step. `computes`: it has a forward pass."""
        postponed, self._postponed = self._postponed, {}
        for target in postponed.values():
            self._plan(plan, target, receives.get(target.transfer_id), step, computes)
        while self._events:
            event = self._events.popleft()
            if isinstance(event, str):
                self._postponed.pop(event, None)
                self._holds.release(_hold_of(event))
            else:
                self._plan(plan, event, receives.get(event.transfer_id), step, computes)

    def _plan(
        self,
        plan: StepPlan,
        target: TransferTarget,
        receive: Receive | None,
        step: int,
        computes: bool,
    ) -> None:
        cached = None if receive is None else receive.cached
        if receive is None or cached is None or not self._covers(cached, target):
            plan.refused_prefixes.append(target.transfer_id)
        elif computes and cached.step == step:
            # vLLM takes blocks for cached that this step is to fill.
            self._postponed[target.transfer_id] = target
        else:
            receive.prefix_sent()
            held = [one for block_ids in cached.block_ids for one in block_ids]
            self._holds.hold(_hold_of(target.transfer_id), held)
            tokens = TokenRange(
                target.transfer_id, target.start_token, target.end_token, cached.block_ids
            )
            loads = target.end_token > cached.loaded_token
            plan.send_prefix(target, tokens, receive.request_id if loads else "")

    def _covers(self, cached: CachedPrefix, target: TransferTarget) -> bool:
        if self._has_windows and target.end_token != cached.end_token:
            return False
        return 0 <= target.start_token < target.end_token <= cached.end_token


def _hold_of(transfer_id: str) -> str:
    """Not the transfer's own name: that it has settled does not end the sending."""
    return f"prefix of {transfer_id}"
