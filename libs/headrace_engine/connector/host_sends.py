"""Plans what transfers read straight from main memory. Uses no vLLM types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_common.callers.priority import Priority
from headrace_engine.connector.step_plan import HostSend, StepPlan, TokenRange
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.tiers import LowerTiers, TierChange, TierHit


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
