"""Plans what transfers read straight from main memory. Uses no vLLM types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace_engine.connector.step_plan import HostSend, StepPlan, TokenRange
from headrace_kv.manager.lower_tiers import LowerTiers, PoolBlocks, TierChange
from headrace_kv.prefix.events import Tier


@dataclass(slots=True)
class _Held:
    """Blocks that ranks send. `missing`: ranks that may still read them."""

    blocks: PoolBlocks
    missing: int

    def rank_ended(self) -> bool:
        """Whether no rank reads the blocks any more."""
        self.missing -= 1
        return self.missing == 0


class HostSends:
    """The scheduling thread calls it. Blocks stay in main memory until no rank reads them (I2).

    Without `enabled`, nothing is sent from there.
    """

    def __init__(self, tiers: LowerTiers, rank_count: int, *, enabled: bool) -> None:
        self._tiers = tiers
        self._rank_count = rank_count
        self._enabled = enabled and tiers.names[:1] == (Tier.HOST,)
        self._next_number = 1
        self._held: dict[int, _Held] = {}
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
        blocks = self._hold(prefixes)
        if not blocks:
            return start_token
        number = self._next_number
        self._next_number += 1
        self._held[number] = _Held(blocks, self._rank_count)
        end_token = (first_block + len(blocks)) * block_tokens
        # The blocks before them are not read.
        block_ids = (0,) * first_block + blocks.block_ids
        tokens = TokenRange(transfer_id, start_token, end_token, (block_ids,))
        self._sends.append(HostSend(number, tokens, copies_before))
        return end_token

    def ended(self, numbers: Iterable[int]) -> None:
        """A rank reads the blocks of these sends no more. Every rank reports each of them once."""
        for number in numbers:
            held = self._held.get(number)
            if held is not None and held.rank_ended():
                del self._held[number]
                self._tiers.release_fastest(held.blocks)

    def clear(self) -> list[TierChange]:
        """Forgets the blocks that are held. They stay until no rank reads them."""
        held = [block for one in self._held.values() for block in one.blocks.block_ids]
        return self._tiers.drop(Tier.HOST, held).changes if held else []

    def add_to(self, plan: StepPlan) -> None:
        """Adds what was planned since the last step."""
        plan.plan_host_sends(self._sends)
        self._sends = []

    def _hold(self, prefixes: Sequence[int]) -> PoolBlocks:
        """Holds the longest run of `prefixes` in main memory, from the first one on."""
        found = self._tiers.hold_fastest(prefixes)
        count = next(
            (
                index
                for index, (one, other) in enumerate(zip(prefixes, found.prefixes, strict=False))
                if one != other
            ),
            len(found),
        )
        kept = PoolBlocks(found.prefixes[:count], found.block_ids[:count])
        self._tiers.release_fastest(PoolBlocks(found.prefixes[count:], found.block_ids[count:]))
        return kept
