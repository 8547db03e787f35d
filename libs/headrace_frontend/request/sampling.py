"""Ranges and defaults of the sampling parameters. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace.inference.v1 import sampling_pb2
from headrace_common.limits import (
    ALLOWED_TOKENS_MAX,
    BAD_SEQUENCE_TOKENS_MAX,
    BAD_SEQUENCES_MAX,
    BAD_WORD_CHARACTERS_MAX,
    BAD_WORDS_MAX,
    CHOICE_TEXTS_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    REGEX_BYTES_MAX,
    SCHEMA_BYTES_MAX,
    STOP_STRING_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
)
from headrace_frontend.request.json_text import JsonRejected, parse_object
from headrace_frontend.request.schema import schema_problem
from headrace_text.codec import TextCodec

_PATH = "sampling.structured_outputs"


def structured_outputs_violations(
    outputs: sampling_pb2.StructuredOutputs,
) -> Iterator[tuple[str, str]]:
    """Pairs of the invalid field's path and its remedy."""
    kind = outputs.WhichOneof("constraint")
    path = f"{_PATH}.{kind}"
    if kind is None:
        yield _PATH, "set one of json, json_object, regex, choice, grammar and structural_tag"
    elif kind == "choice":
        yield from _choice_violations(f"{path}.texts", outputs.choice.texts)
    elif kind == "json_object":
        if not outputs.json_object:
            yield path, "must be true; leave structured_outputs out for free text"
    elif kind == "json":
        problem = schema_problem(outputs.json)
        if problem:
            yield path, problem
    elif kind == "structural_tag":
        yield from _tag_violations(path, outputs.structural_tag)
    else:
        text = outputs.regex if kind == "regex" else outputs.grammar
        bytes_max = REGEX_BYTES_MAX if kind == "regex" else SCHEMA_BYTES_MAX
        size = len(text.encode())
        if not text.strip():
            yield path, "must not be empty; leave structured_outputs out for free text"
        elif size > bytes_max:
            yield path, f"must have at most {bytes_max} bytes, not {size}"
        elif "\x00" in text:
            yield path, "must not hold a NUL character"


def _tag_violations(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Of types alone, which vLLM does not check. vLLM rejects a tag that lacks a field."""
    try:
        tag = parse_object(text, SCHEMA_BYTES_MAX)
    except JsonRejected as error:
        yield path, str(error)
        return
    triggers, structures = tag.get("triggers", []), tag.get("structures", [])
    if not isinstance(triggers, list) or not all(isinstance(one, str) and one for one in triggers):
        yield f"{path}.triggers", "must be a list of texts that are not empty"
    if not isinstance(structures, list) or not all(map(_is_structure, structures)):
        remedy = "must be a list of objects, with texts begin and end, and an object schema"
        yield f"{path}.structures", remedy


def _is_structure(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(name, ""), str) for name in ("begin", "end"))
        and isinstance(value.get("schema", {}), dict)
    )


def _choice_violations(path: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    if not texts:
        yield path, "must hold at least one text"
    if len(texts) > CHOICE_TEXTS_MAX:
        yield path, f"must hold at most {CHOICE_TEXTS_MAX} texts, not {len(texts)}"
        return
    for index, text in enumerate(texts):
        place = f"{path}[{index}]"
        if not text:
            yield place, "must not be empty; leave it out"
        elif len(text) > CHOICE_TEXTS_MAX:
            yield place, f"must have at most {CHOICE_TEXTS_MAX} characters, not {len(text)}"


SEED_MAX = 2**63 - 1
_TOKEN_BOUNDS = {
    "stop_token_ids": STOP_TOKENS_MAX,
    "allowed_token_ids": ALLOWED_TOKENS_MAX,
    "logit_bias": LOGIT_BIASES_MAX,
    "bad_token_sequences": BAD_SEQUENCES_MAX,
}
_LOGPROBS = ("logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    default: float
    low_included: bool = True

    def contains(self, value: float) -> bool:
        """False for NaN and infinities, too."""
        return (self.low <= value if self.low_included else self.low < value) and value <= self.high

    def __str__(self) -> str:
        return f"{'from' if self.low_included else 'above'} {self.low:g} to {self.high:g}"


_RANGES = {
    "temperature": _Range(0, 2, 1),
    "top_p": _Range(0, 1, 1, low_included=False),
    "min_p": _Range(0, 1, 0),
    "presence_penalty": _Range(-2, 2, 0),
    "frequency_penalty": _Range(-2, 2, 0),
    "repetition_penalty": _Range(0, 2, 1, low_included=False),
}


_TEXT_BOUNDS = {
    "stop": (STOP_STRINGS_MAX, STOP_STRING_CHARACTERS_MAX),
    "bad_words": (BAD_WORDS_MAX, BAD_WORD_CHARACTERS_MAX),
}
_DEFAULT_VALUES: dict[str, Any] = {name: allowed.default for name, allowed in _RANGES.items()}
_DEFAULTS = sampling_pb2.SamplingParams(top_k=0, **_DEFAULT_VALUES)

_ROUTERS_FIELDS: frozenset[Any] = frozenset(
    (*_TEXT_BOUNDS, "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens")
)
# The fields of a message that are set, by name. Each takes more time to read from the message.
Given: TypeAlias = Mapping[str, Any]
# The library makes a descriptor anew for each use, unless one is kept.
_name_of: Callable[[FieldDescriptor], str] = cache(attrgetter("name"))


def given_fields(message: Message) -> Given:
    """What a message has."""
    return {_name_of(field): value for field, value in message.ListFields()}


def sampling_violations(given: Given) -> dict[str, str]:
    """Remedies by path of the invalid field of SamplingParams. Needs no knowledge of the model."""
    violations: dict[str, str] = {}
    for name, value in given.items():
        allowed = _RANGES.get(name)
        if allowed is not None and not allowed.contains(value):
            violations[f"sampling.{name}"] = f"must be {allowed}, not {value:g}"
    if given.get("seed", 0) > SEED_MAX:
        violations["sampling.seed"] = f"must be from 0 to {SEED_MAX}, not {given['seed']}"
    if given.get("max_tokens") == 0:
        violations["sampling.max_tokens"] = (
            "must be 1 or more; leave it out to use the rest of the context"
        )
    for name in _LOGPROBS:
        if (count := given.get(name, 0)) > LOGPROBS_MAX:
            violations[f"sampling.{name}"] = f"must be from 0 to {LOGPROBS_MAX}, not {count}"
    for name, bounds in _TEXT_BOUNDS.items():
        if name in given:
            violations.update(_text_violations(f"sampling.{name}", given[name], *bounds))
    if not _TOKEN_BOUNDS.keys().isdisjoint(given):
        violations.update(_token_violations(given))
    if "max_tokens" in given and given.get("min_tokens", 0) > given["max_tokens"]:
        violations["sampling.min_tokens"] = (
            f"must be at most max_tokens, {given['max_tokens']}, not {given['min_tokens']}"
        )
    if "structured_outputs" in given:
        violations.update(structured_outputs_violations(given["structured_outputs"]))
    return violations


def vocabulary_violations(given: Given, vocabulary_size: int) -> dict[str, str]:
    """Remedies by path of the field with a token beyond the vocabulary. Ignores lists that are too long."""
    violations: dict[str, str] = {}
    if _TOKEN_BOUNDS.keys().isdisjoint(given):
        return violations
    lists: dict[str, tuple[Sequence[int], int]] = {
        "stop_token_ids": (given.get("stop_token_ids", ()), STOP_TOKENS_MAX),
        "allowed_token_ids": (given.get("allowed_token_ids", ()), ALLOWED_TOKENS_MAX),
    }
    for index, sequence in enumerate(given.get("bad_token_sequences", ())[:BAD_SEQUENCES_MAX]):
        lists[f"bad_token_sequences[{index}].ids"] = (sequence.ids, BAD_SEQUENCE_TOKENS_MAX)
    for path, (ids, count_max) in lists.items():
        violations.update(beyond_vocabulary(f"sampling.{path}", ids, count_max, vocabulary_size))
    biases = given.get("logit_bias", ())
    if len(biases) <= LOGIT_BIASES_MAX:
        for token_id in biases:
            if token_id >= vocabulary_size:
                violations[f"sampling.logit_bias[{token_id}]"] = (
                    f"the token must be below {vocabulary_size}; leave it out"
                )
                break
    return violations


def beyond_vocabulary(
    path: str, ids: Sequence[int], count_max: int, vocabulary_size: int
) -> dict[str, str]:
    """The remedy for the first token beyond the vocabulary. None for a list of more than `count_max`, if not 0."""
    if count_max and len(ids) > count_max:
        return {}
    if not ids or max(ids) < vocabulary_size:
        return {}
    index = next(i for i, token_id in enumerate(ids) if token_id >= vocabulary_size)
    return {f"{path}[{index}]": f"must be below {vocabulary_size}, not {ids[index]}"}


def _text_violations(
    path: str, texts: Sequence[str], count_max: int, characters_max: int
) -> Iterator[tuple[str, str]]:
    if len(texts) > count_max:
        yield path, f"must hold at most {count_max} strings, not {len(texts)}"
    for index, text in enumerate(texts[:count_max]):
        place = f"{path}[{index}]"
        if not text:
            yield place, "must not be empty; leave it out"
        elif len(text) > characters_max:
            yield place, f"must have at most {characters_max} characters, not {len(text)}"


def _token_violations(given: Given) -> Iterator[tuple[str, str]]:
    for name, count_max in _TOKEN_BOUNDS.items():
        count = len(given.get(name, ()))
        if count > count_max:
            what = "sequences" if name == "bad_token_sequences" else "tokens"
            yield f"sampling.{name}", f"must hold at most {count_max} {what}, not {count}"
    for index, sequence in enumerate(given.get("bad_token_sequences", ())[:BAD_SEQUENCES_MAX]):
        if not 0 < len(sequence.ids) <= BAD_SEQUENCE_TOKENS_MAX:
            remedy = f"must hold 1 to {BAD_SEQUENCE_TOKENS_MAX} tokens, not {len(sequence.ids)}"
            yield f"sampling.bad_token_sequences[{index}].ids", remedy
    for token_id, bias in given.get("logit_bias", {}).items():
        if not -LOGIT_BIAS_MAX <= bias <= LOGIT_BIAS_MAX:
            remedy = f"must be from {-LOGIT_BIAS_MAX:g} to {LOGIT_BIAS_MAX:g}, not {bias:g}"
            yield f"sampling.logit_bias[{token_id}]", remedy
            break


def with_defaults(
    sampling: sampling_pb2.SamplingParams, given: Given, max_tokens: int
) -> sampling_pb2.SamplingParams:
    """The parameters for the decode worker, with every default filled in.

    They lack what the router does itself: it finds stop strings, for example. Stop tokens have a field of their own.
    """
    filled = deepcopy(_DEFAULTS)
    filled.MergeFrom(sampling)
    filled.max_tokens = max_tokens
    for name in _ROUTERS_FIELDS.intersection(given):
        filled.ClearField(name)
    return filled


def bad_word_tokens(words: Sequence[str], codec: TextCodec) -> Iterator[list[int]]:
    """The token sequences of words that are not allowed, as in vLLM: at the beginning of a text, and after a space."""
    for word in words:
        plain = codec.encode_part(word.lstrip())
        if plain:
            yield plain
        after_space = codec.encode_part(f" {word.lstrip()}")
        if after_space and (
            not plain or (after_space[0] != plain[0] and len(after_space) == len(plain))
        ):
            yield after_space
