"""Chooses a token from the digest of a KV cache. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_engine.interface import Sampling, TokenLogprobs
from headrace_engine.sim.model.bit_mixer import mix_int
from headrace_engine.sim.model.constraints import constrain, is_constrained

_CANDIDATES = 32
_BYTES = 256
_TOP_SCORE = 16.0
_WORD = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its logprobs if they were requested."""

    token_id: int
    logprobs: TokenLogprobs | None


def choose_token(
    digest: int, vocabulary: int, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> Choice:
    """The token after `prompt` and `answer`, given the `digest` of their KV cache.

    With a temperature, `sampling.seed` must be set. Logprobs are those of the model, before
    penalties and temperature.
    """
    if is_plain(sampling):
        return Choice(plain_token(digest, vocabulary), None)
    constrained = is_constrained(sampling)
    tokens = _candidates(digest, vocabulary)
    scores = _scores(digest, len(tokens))
    if constrained:
        tokens, scores = constrain(digest, vocabulary, (tokens, scores), sampling, answer)
    penalized = _penalized(tokens, scores, sampling, prompt, answer)
    order = sorted(range(len(tokens)), key=lambda index: -penalized[index])
    chosen = order[0]
    if sampling.temperature > 0:
        assert sampling.seed is not None
        counter = mix_int(sampling.seed) ^ mix_int(len(prompt) + len(answer))
        chosen = _drawn(order, penalized, sampling, mix_int(digest ^ counter) / _WORD)
    if sampling.logprobs is None:
        return Choice(tokens[chosen], None)
    logprobs = _log_softmax(scores)
    alternatives = tuple(zip(tokens, logprobs, strict=True))[: sampling.logprobs]
    return Choice(tokens[chosen], TokenLogprobs(logprobs[chosen], alternatives))


def is_plain(sampling: Sampling) -> bool:
    """Whether `plain_token` chooses."""
    return not is_constrained(sampling) and not _needs_scores(sampling)


def plain_token(digest: int, vocabulary: int) -> int:
    """The most likely token."""
    lowest = _lowest(vocabulary)
    return lowest + mix_int(digest) % (vocabulary - lowest)


def _needs_scores(sampling: Sampling) -> bool:
    return (
        sampling.temperature > 0
        or sampling.logprobs is not None
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
    )


def _candidates(digest: int, vocabulary: int) -> list[int]:
    lowest = _lowest(vocabulary)
    width = vocabulary - lowest
    count = min(_CANDIDATES, width)
    first = mix_int(digest)
    step = 1 + mix_int(first) % (width // count)
    return [lowest + (first + index * step) % width for index in range(count)]


def _lowest(vocabulary: int) -> int:
    """The lowest token of answers. Lower ones are bytes of prompts, which are no readable text one by one."""
    return _BYTES if vocabulary >= 2 * _BYTES else 0


def _scores(digest: int, count: int) -> list[float]:
    slope = 0.25 + mix_int(digest ^ 1) / _WORD
    return [_TOP_SCORE - slope * index for index in range(count)]


def _penalized(
    tokens: list[int],
    scores: list[float],
    sampling: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
) -> list[float]:
    penalized = list(scores)
    repeats = sampling.repetition_penalty != 1
    seen = {*prompt, *answer} if repeats else set(answer)
    for index, token in enumerate(tokens):
        if token not in seen:
            continue
        if repeats:
            score = penalized[index]
            factor = sampling.repetition_penalty
            penalized[index] = score / factor if score > 0 else score * factor
        times = answer.count(token)
        penalized[index] -= times * sampling.frequency_penalty
        penalized[index] -= (times > 0) * sampling.presence_penalty
    return penalized


def _drawn(order: list[int], scores: list[float], sampling: Sampling, share: float) -> int:
    if sampling.top_k:
        order = order[: sampling.top_k]
    top = scores[order[0]]
    weights = [math.exp((scores[index] - top) / sampling.temperature) for index in order]
    total = sum(weights)
    kept, mass = 0, 0.0
    for weight in weights:
        if kept and (mass >= sampling.top_p * total or weight < sampling.min_p):
            break
        mass += weight
        kept += 1
    target, passed = share * mass, 0.0
    for index, weight in zip(order[:kept], weights, strict=False):
        passed += weight
        if target < passed:
            return index
    return order[kept - 1]


def _log_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    total = math.log(sum(math.exp(score - top) for score in scores))
    return [score - top - total for score in scores]
