"""Chooses a token from the digest of a KV cache, or from a hidden state that stands for it. Pure.

Structured outputs are texts of which the answer must be one. A token below 256 is a byte of text. A hidden state has as
many bytes as that of a small real model, and every byte is checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from headrace_common.errors import InvalidRequest, KvCorrupt
from headrace_engine.interface import (
    DecodeWork,
    PrefillWork,
    Sampling,
    StructuredOutputs,
    TokenLogprobs,
)
from headrace_engine.sim.model.bit_mixer import counted_words, mix_int, mix_words
from headrace_kv.hidden_state import HiddenFormat

SUPPORTED_FORMS = ("choice", "json", "json_object")
_LEVELS_MAX = 16
_ITEMS_MAX = 16


def check(work: PrefillWork | DecodeWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming every wrong field."""
    count = len(work.token_ids)
    violations: dict[str, str] = {}
    if not 0 < count < max_model_len:
        violations["token_ids"] = f"give 1 to {max_model_len - 1} tokens"
    if isinstance(work, PrefillWork):
        if not 0 <= work.target.start_token < work.target.end_token == count:
            violations["target.end_token"] = "it is the number of tokens, above start_token"
    elif work.sampling.max_tokens <= work.generated_tokens:
        violations["sampling.max_tokens"] = f"take {work.generated_tokens + 1} or more"
    outputs = work.sampling.structured_outputs if work.sampling is not None else None
    if outputs is not None and outputs.kind not in SUPPORTED_FORMS:
        violations[f"sampling.structured_outputs.{outputs.kind}"] = (
            f"the simulated engine supports {', '.join(SUPPORTED_FORMS)}; use one of these, or the engine vllm"
        )
    if violations:
        raise InvalidRequest(violations)


@lru_cache(maxsize=256)
def texts_of_form(outputs: StructuredOutputs) -> tuple[str, ...]:
    """The choices, or for JSON one value that matches the schema. `outputs` must be one of SUPPORTED_FORMS.

    It knows the words of JSON Schema that tools and typed answers use, and no others.
    """
    if outputs.kind == "choice":
        return outputs.choices
    value = {} if outputs.kind == "json_object" else _example(json.loads(outputs.text))
    return (json.dumps(value, ensure_ascii=False),)


def _example(schema: Any, definitions: Mapping[str, Any] | None = None, level: int = 0) -> Any:
    if not isinstance(schema, dict) or level > _LEVELS_MAX:
        return None
    definitions = schema.get("$defs") or definitions or {}
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        return _example(definitions.get(name), definitions, level + 1)
    if "const" in schema:
        return schema["const"]
    for word in ("enum", "anyOf", "oneOf", "allOf"):
        if schema.get(word):
            first = schema[word][0]
            return first if word == "enum" else _example(first, definitions, level + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _example(one, definitions, level + 1) for name, one in properties.items()}
    if kind == "array":
        item = _example(schema.get("items") or {}, definitions, level + 1)
        return [item] * min(_ITEMS_MAX, int(schema.get("minItems", 1)))
    plain = {"integer": schema.get("minimum", 3), "number": schema.get("minimum", 0.5)}
    return {**plain, "boolean": True, "null": None}.get(kind, "sim")


def choice_is_complete(sampling: Sampling, answer: Sequence[int]) -> bool:
    """Whether the answer is one of the texts of its form, and no longer one."""
    outputs = sampling.structured_outputs
    return outputs is not None and bool(answer) and not _next_bytes(texts_of_form(outputs), answer)


def _next_bytes(texts: Sequence[str], answer: Sequence[int]) -> frozenset[int]:
    """The bytes with which the texts that begin with the answer continue."""
    known, count = list(answer), len(answer)
    encoded = (text.encode() for text in texts)
    return frozenset(
        text[count] for text in encoded if len(text) > count and list(text[:count]) == known
    )


HIDDEN_FORMAT: Final = HiddenFormat("float32", 576)
_WORD_BYTES: Final = 8
_SEED: Final = 15


def hidden_state_of(digest: int) -> bytes:
    """The digest, followed by words derived from it."""
    words = mix_words(counted_words(HIDDEN_FORMAT.nbytes // _WORD_BYTES, _SEED) ^ np.uint64(digest))
    words[0] = digest
    return words.astype("<u8").tobytes()


def digest_of(state: bytes) -> int:
    """The digest in a hidden state. Raises KvCorrupt when any byte is wrong."""
    digest = int.from_bytes(state[:_WORD_BYTES], "little")
    if state != hidden_state_of(digest):
        raise KvCorrupt("the hidden state is not that of any KV cache")
    return digest


_BYTES = 256
_CANDIDATES = 32
_TOP_SCORE = 16.0
_WORD = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and its logprobs if they were requested, else nothing."""

    token_id: int
    logprobs: tuple[TokenLogprobs, ...] = ()


def choose_token(
    digest: int, vocabulary: int, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> Choice:
    """The token after `prompt` and `answer`, given the `digest` of their KV cache.

    With a temperature, `sampling.seed` must be set. Logprobs are those of the model, before
    penalties and temperature. Other bounds on the tokens of an answer than its form are ignored.
    """
    if is_plain(sampling):
        return Choice(plain_token(digest, vocabulary))
    tokens = _candidates(digest, vocabulary)
    if sampling.structured_outputs is not None:
        allowed = _next_bytes(texts_of_form(sampling.structured_outputs), answer)
        tokens = sorted(allowed, key=lambda token: mix_int(digest ^ token)) or tokens
    scores = _scores(digest, len(tokens))
    preferences = [
        _penalized(token, score, sampling, prompt, answer)
        for token, score in zip(tokens, scores, strict=True)
    ]
    if sampling.temperature > 0:
        assert sampling.seed is not None
        noise = digest ^ mix_int(sampling.seed) ^ mix_int(len(prompt) + len(answer))
        # The largest sum is at an index with the probability that softmax gives it.
        preferences = [
            score / sampling.temperature - math.log(-math.log((mix_int(noise + index) + 1) / _WORD))
            for index, score in enumerate(preferences)
        ]
    chosen = preferences.index(max(preferences))
    if sampling.logprobs is None:
        return Choice(tokens[chosen])
    logprobs = _log_softmax(scores)
    alternatives = tuple(zip(tokens, logprobs, strict=True))[: sampling.logprobs]
    return Choice(tokens[chosen], (TokenLogprobs(logprobs[chosen], alternatives),))


def token_logprobs(digest: int, vocabulary: int, token_id: int, count: int) -> TokenLogprobs:
    """The logprobs of a token after a context with this digest, with `count` alternatives, as the model has them.

    A token that it would never choose is less likely than those that it would.
    """
    tokens = _candidates(digest, vocabulary)
    logprobs = _log_softmax(_scores(digest, len(tokens)))
    alternatives = tuple(zip(tokens, logprobs, strict=True))[:count]
    if token_id in tokens:
        place = tokens.index(token_id)
        return TokenLogprobs(logprobs[place], alternatives, place + 1)
    below = 1.0 + mix_int(digest ^ token_id) / _WORD
    return TokenLogprobs(logprobs[-1] - below, alternatives, len(tokens) + 1)


def is_plain(sampling: Sampling) -> bool:
    """Whether `plain_token` chooses."""
    return not (
        sampling.structured_outputs
        or sampling.temperature > 0
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
    )


def plain_token(digest: int, vocabulary: int) -> int:
    """The most likely token."""
    lowest = _lowest(vocabulary)
    return lowest + mix_int(digest) % (vocabulary - lowest)


def _candidates(digest: int, vocabulary: int) -> list[int]:
    lowest = _lowest(vocabulary)
    width = vocabulary - lowest
    count = min(_CANDIDATES, width)
    first = mix_int(digest)
    step = 1 + mix_int(first) % (width // count)
    return [lowest + (first + index * step) % width for index in range(count)]


@lru_cache(maxsize=16)
def _lowest(vocabulary: int) -> int:
    """The lowest token of answers. Lower ones are bytes of prompts, which are no readable text one by one."""
    return _BYTES if vocabulary >= 2 * _BYTES else 0


def _scores(digest: int, count: int) -> list[float]:
    slope = 0.25 + mix_int(digest ^ 1) / _WORD
    return [_TOP_SCORE - slope * index for index in range(count)]


def _penalized(
    token: int, score: float, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> float:
    times, factor = answer.count(token), sampling.repetition_penalty
    if factor != 1 and (times or token in prompt):
        score = score / factor if score > 0 else score * factor
    return score - times * sampling.frequency_penalty - (times > 0) * sampling.presence_penalty


def _log_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    total = math.log(sum(math.exp(score - top) for score in scores))
    return [score - top - total for score in scores]
