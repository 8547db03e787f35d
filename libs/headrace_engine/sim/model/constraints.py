"""Restricts the tokens that the simulated model may choose. Pure.

Structured outputs are texts of which the answer must be one. A token below 256 is a byte of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace_engine.interface import Sampling
from headrace_engine.sim.model.bit_mixer import mix_int
from headrace_engine.sim.model.forms import texts_of_form

_CANDIDATES = 32


def is_constrained(sampling: Sampling) -> bool:
    """Whether `constrain` changes anything."""
    return bool(
        sampling.logit_bias
        or sampling.structured_outputs
        or sampling.allowed_token_ids
        or sampling.bad_token_sequences
        or sampling.min_tokens
    )


def constrain(
    digest: int,
    vocabulary: int,
    candidates: tuple[list[int], list[float]],
    sampling: Sampling,
    answer: Sequence[int],
) -> tuple[list[int], list[float]]:
    """The tokens that may follow `answer`, and their scores, from the model's own candidates.

    Tokens that are allowed, or have a bias, become candidates as well. Their scores lie below those of the model's own.
    """
    allowed = _allowed(sampling, answer)
    prevented = _prevented(sampling, answer)
    biases = dict(sampling.logit_bias)
    scores = dict(zip(*candidates, strict=True))
    lowest = min(scores.values()) - 1.0
    liked = (token for token, bias in biases.items() if bias > 0)
    for token in (*liked, *_in_random_order(digest, allowed or ())):
        scores.setdefault(token, lowest)
    kept = {
        token: score + biases.get(token, 0.0)
        for token, score in scores.items()
        if token not in prevented and (allowed is None or token in allowed)
    }
    if not kept:
        kept = {_first_not_prevented(digest, vocabulary, prevented): lowest}
    ranked = sorted(kept.items(), key=lambda item: -item[1])
    return [token for token, _ in ranked], [score for _, score in ranked]


def choice_is_complete(sampling: Sampling, answer: Sequence[int]) -> bool:
    """Whether the answer is one of the texts of its form, and no longer one."""
    outputs = sampling.structured_outputs
    return outputs is not None and bool(answer) and not _next_bytes(texts_of_form(outputs), answer)


def _allowed(sampling: Sampling, answer: Sequence[int]) -> frozenset[int] | None:
    """None for all tokens."""
    outputs = sampling.structured_outputs
    if outputs is None:
        return frozenset(sampling.allowed_token_ids) or None
    found = _next_bytes(texts_of_form(outputs), answer)
    return found & frozenset(sampling.allowed_token_ids) if sampling.allowed_token_ids else found


def _next_bytes(texts: Sequence[str], answer: Sequence[int]) -> frozenset[int]:
    """The bytes with which the texts that begin with the answer continue."""
    known, count = list(answer), len(answer)
    encoded = (text.encode() for text in texts)
    return frozenset(
        text[count] for text in encoded if len(text) > count and list(text[:count]) == known
    )


def _prevented(sampling: Sampling, answer: Sequence[int]) -> frozenset[int]:
    prevented = {
        ids[-1]
        for ids in sampling.bad_token_sequences
        if tuple(answer[max(0, len(answer) - len(ids) + 1) :]) == ids[:-1]
    }
    if len(answer) < sampling.min_tokens:
        prevented.update(sampling.stop_token_ids)
    return frozenset(prevented)


def _in_random_order(digest: int, tokens: Iterable[int]) -> list[int]:
    return sorted(tokens, key=lambda token: mix_int(digest ^ token))[:_CANDIDATES]


def _first_not_prevented(digest: int, vocabulary: int, prevented: frozenset[int]) -> int:
    """Real models choose some token even when all are prevented."""
    start = mix_int(digest) % vocabulary
    order = ((start + step) % vocabulary for step in range(vocabulary))
    return next((token for token in order if token not in prevented), start)
