"""What a run of `bench.tiers` found, as a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bench.placement.report import percentile
from bench.tiers.peers import LMCACHE, OFFLOADING
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.load_times import TierLoad

LATER_STEPS: Final = 8
DEVICE, HOST, DISK = "KV memory", "main memory", "disk"
REMOTE, NOWHERE = "the remote pool", "nowhere"
VLLM_DEVICE, VLLM_NOWHERE = "KV memory, plain vLLM", "nowhere, plain vLLM"
PEERS: Final = (OFFLOADING, LMCACHE)
PLACES_OF_PEERS: Final = (HOST, DISK, NOWHERE)


def row_of(place: str, peer: str) -> str:
    """The row of a peer's turns."""
    return f"{place}, {peer}"


ROWS: Final = (
    *(DEVICE, HOST, DISK, REMOTE, NOWHERE, VLLM_DEVICE, VLLM_NOWHERE),
    *(row_of(place, peer) for peer in PEERS for place in PLACES_OF_PEERS),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered turn, with the times of its tokens since it was asked. `loads`: what the engine loaded for it."""

    token_s: tuple[float, ...]
    token_ids: tuple[int, ...]
    cached_tokens: int = 0
    loads: tuple[TierLoad, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.token_s[0]

    @property
    def first_gap_s(self) -> float:
        """The step after the prompt's, beside which its blocks are stored."""
        return self.token_s[1] - self.token_s[0]

    @property
    def later_gap_s(self) -> float:
        """The mean of the last steps."""
        return (self.token_s[-1] - self.token_s[-LATER_STEPS - 1]) / LATER_STEPS


@dataclass(slots=True)
class Results:
    """The fifth turns by row. `copy_s` and `memcpy_s`: of one block, by tier."""

    turns: dict[str, list[Turn]] = field(default_factory=lambda: {row: [] for row in ROWS})
    copy_s: dict[Tier, list[float]] = field(default_factory=lambda: {Tier.HOST: [], Tier.DISK: []})
    memcpy_s: list[float] = field(default_factory=list)
    compared: int = 0
    different: int = 0

    def compare(self, turn: Turn, expected: Turn) -> None:
        """Counts another answer than plain vLLM's."""
        self.compared += 1
        self.different += turn.token_ids != expected.token_ids


def tables(found: Results) -> str:
    """A row for each place, and one for each tier's copies."""
    computed_s = percentile([one.ttft_s for one in found.turns[VLLM_NOWHERE]], 0.5)
    lines = _head(
        *("KV of the first four turns in", "TTFT p50, ms", "p90, ms"),
        *("p50 / plain vLLM that computes", "cached tokens p50"),
    )
    for row in filter(found.turns.get, ROWS):
        times = [one.ttft_s for one in found.turns[row]]
        cached = percentile([float(one.cached_tokens) for one in found.turns[row]], 0.5)
        cells = (
            row,
            *(f"{1e3 * percentile(times, share):.0f}" for share in (0.5, 0.9)),
            f"{percentile(times, 0.5) / computed_s:.3f}",
            f"{cached:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    memcpy = percentile(found.memcpy_s, 0.5)
    lines += ["", *_head("copies of a block", "p50, ms", "p50 / memcpy")]
    lines.append(f"| memcpy of as many bytes | {1e3 * memcpy:.3f} | 1.00 |")
    for tier, name in ((Tier.HOST, HOST), (Tier.DISK, DISK)):
        if found.copy_s[tier]:
            copy = percentile(found.copy_s[tier], 0.5)
            lines.append(f"| from {name} | {1e3 * copy:.3f} | {copy / memcpy:.2f} |")
    titles = (
        *("steps after the prompt", "turns", "first, p50, ms", "later, p50, ms"),
        "first / later, p50",
    )
    lines += ["", *_head(*titles)]
    steps = [(NOWHERE, "ours, storing the prompt"), (VLLM_NOWHERE, "plain vLLM")]
    steps += [(row_of(NOWHERE, peer), f"{peer}, storing the prompt") for peer in PEERS]
    for row, what in steps:
        if not found.turns[row]:
            continue
        # Where the client got several tokens at once, it saw no step between. Such turns are left out.
        turns = [one for one in found.turns[row] if one.first_gap_s and one.later_gap_s]
        columns = (
            [1e3 * one.first_gap_s for one in turns],
            [1e3 * one.later_gap_s for one in turns],
            [one.first_gap_s / one.later_gap_s for one in turns],
        )
        figures = " | ".join(f"{percentile(one, 0.5):.2f}" if one else "-" for one in columns)
        lines.append(f"| {what} | {len(turns)} of {len(found.turns[row])} | {figures} |")
    return "\n".join(lines)


def _head(*titles: str) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


NOTES: Final = """# Turns of conversations with KV in each tier

{what} Made by `python -m bench.tiers{options}`.

{tables}

The fifth turn of a conversation has {history} tokens of four turns, and {turn} new ones. Blocks have {block} tokens.
Our engine has KV memory for {memory} blocks, main memory for {host}, a file for {disk}, and a pool of {pool:g} GiB on
this host. A turn computes the tokens that are in no whole block of the first four, about {tail}. For the row of the
pool, our engine has emptied its own tiers before. It asks the pool before every turn that it has no KV for. Plain vLLM
has room for all its conversations. Its allocator keeps freed memory, as ours does. Each row has a turn in each of
{rounds} rounds. {different} of {compared} answers differ from those of plain vLLM in the same round. The last table has
the steps of turns without cached KV: our engine stores the prompt's blocks in main memory{also} beside the first one.
Turns with the first two tokens in one message are not in it: the first token waited for the step after the prompt.

{peers}
{remark}"""
OF_PEERS: Final = {
    OFFLOADING: """\
vLLM's offloading is its OffloadingConnector with the tiers main memory and files. It has as many blocks of KV memory
and main memory as our engine, and a file for each block. vLLM makes no copies without a GPU, so the bench copies whole
blocks, in the step that asks for them.""",
    LMCACHE: """\
LMCache is its server in another process, with LMCacheMPConnector, shared memory and files. Its chunks are blocks. It
has as much KV memory. Its main memory has room for {lmcache} blocks, and it evicts when 0.8 of them are full.""",
}
"""What the page says of each peer."""
