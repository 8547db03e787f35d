"""Tables of handover.py. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

PLAIN = "plain vLLM"
DEFAULT = "plain vLLM, default allocator"
PEER = "MooncakeConnector"
BY_DECODE = "Headrace, first token by decode"
BY_PREFILL = "Headrace, first token by prefill"
FROM_HIDDEN_STATE = "Headrace, first token from a hidden state"
OURS = (BY_DECODE, BY_PREFILL, FROM_HIDDEN_STATE)
# In addition to one layer's share of the transfer, which cannot be hidden.
MESSAGES_MS = 2.0
PREFILL_RATIO_MAX = 1.02

Samples = Mapping[str, Sequence["Sample"]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Milliseconds; those that its way does not have are None.

    `first_ms` and `second_ms`: from asking to the first and the second token, at the client. `compute_ms`:
    of prefill's engine. `hand_over_ms`: from
    prefill's end of computing, or its own first token, to decode's own first token. `transfer_ms`: time in which
    something was written. `exposed_ms`: from prefill's last layer to decode knowing its KV to be whole. `late_ms`: from
    where hand-over begins to that; negative when prefill was still computing. `cpu_ms`: of all processes of the way.
    """

    prompt_seed: int
    first_ms: float
    second_ms: float
    cpu_ms: float
    token_ids: tuple[int, ...]
    hand_over_ms: float | None = None
    transfer_ms: float | None = None
    exposed_ms: float | None = None
    late_ms: float | None = None
    compute_ms: float | None = None


def middle(values: Sequence[float | None], digits: int = 0) -> str:
    """Median and range, a dash without values."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    form = f",.{digits}f"
    median = statistics.median(known)
    return f"{median:{form}} ({min(known):{form}} to {max(known):{form}})"


def paired_ratio(one: Sequence[Sample], other: Sequence[Sample]) -> float:
    """Median ratio of the first tokens' times, over prompts that both answered."""
    others = {sample.prompt_seed: sample.first_ms for sample in other}
    return statistics.median(
        sample.first_ms / others[sample.prompt_seed]
        for sample in one
        if sample.prompt_seed in others
    )


def equal_count(one: Sequence[Sample], other: Sequence[Sample]) -> tuple[int, int]:
    """Number of equal answers, of those to the same prompts."""
    others = {sample.prompt_seed: sample.token_ids for sample in other}
    both = [sample for sample in one if sample.prompt_seed in others]
    return sum(sample.token_ids == others[sample.prompt_seed] for sample in both), len(both)


def table(samples: Samples) -> str:
    """A row for each way."""
    titles = (
        *("way", "TTFT, ms", "beside plain", "prefill, ms", "second token, ms"),
        *("hand-over, ms", "transfer, ms", "exposed, ms", "late, ms", "CPU, ms"),
        "answers as plain's",
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    plain = samples.get(PLAIN, ())
    for way, found in samples.items():
        beside, equal = "-", "-"
        if plain:
            beside = f"{paired_ratio(found, plain):.3f}"
            equal = "{} of {}".format(*equal_count(found, plain))
        cells = (
            way,
            middle([sample.first_ms for sample in found]),
            beside,
            middle([sample.compute_ms for sample in found]),
            middle([sample.second_ms for sample in found]),
            middle([sample.hand_over_ms for sample in found], 1),
            middle([sample.transfer_ms for sample in found], 1),
            middle([sample.exposed_ms for sample in found], 1),
            middle([sample.late_ms for sample in found], 1),
            middle([sample.cpu_ms for sample in found]),
            equal,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def targets(samples: Samples, layer_count: int) -> list[str]:
    """The targets, and whether they were met."""
    lines = []
    for way in OURS:
        found = samples.get(way, ())
        if not found:
            continue
        if PEER in samples:
            peers = samples[PEER]
            ratio = paired_ratio(found, peers)
            lines.append(
                _line(f"{way}: TTFT over the peer's {ratio:.3f}, wanted below 1", ratio < 1)
            )
            hand_over = _median(s.hand_over_ms for s in found) / _median(
                s.hand_over_ms for s in peers
            )
            lines.append(
                _line(
                    f"{way}: hand-over over the peer's {hand_over:.2f}, wanted below 1",
                    hand_over < 1,
                )
            )
        if PLAIN in samples and way == BY_PREFILL:
            ratio = paired_ratio(found, samples[PLAIN])
            text = f"{way}: TTFT over plain vLLM's {ratio:.3f}, wanted {PREFILL_RATIO_MAX} at most"
            lines.append(_line(text, ratio <= PREFILL_RATIO_MAX))
        # With the policy hidden, a transfer is complete once the state has arrived too. Its computation cannot be
        # hidden.
        if way != FROM_HIDDEN_STATE:
            lines += _exposed(way, found, layer_count)
    return lines


def _exposed(way: str, found: Sequence[Sample], layer_count: int) -> list[str]:
    known = [(s.exposed_ms, s.transfer_ms) for s in found if s.exposed_ms and s.transfer_ms]
    if not known:
        return []
    exposed_ms = statistics.median(exposed for exposed, _ in known)
    wanted_ms = statistics.median(transfer / layer_count + MESSAGES_MS for _, transfer in known)
    kept = sum(exposed <= transfer / layer_count + MESSAGES_MS for exposed, transfer in known)
    text = (
        f"{way}: exposed transfer {exposed_ms:.1f} ms, wanted {wanted_ms:.1f} at most (1/{layer_count} of the transfer "
        f"and {MESSAGES_MS:g} ms); kept by {kept} of {len(known)} requests"
    )
    return [_line(text, exposed_ms <= wanted_ms)]


def _median(values: Iterable[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def _line(text: str, met: bool) -> str:
    return f"- {text}: {'met' if met else 'MISSED'}"
