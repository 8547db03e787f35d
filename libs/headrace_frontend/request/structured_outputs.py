"""Checks the constraints of structured outputs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.inference.v1 import sampling_pb2
from headrace_common.limits import CHOICE_TEXTS_MAX, REGEX_BYTES_MAX, SCHEMA_BYTES_MAX
from headrace_frontend.request.json_text import JsonRejected, parse_object
from headrace_frontend.request.schema import schema_problem

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
        try:
            parse_object(outputs.structural_tag, SCHEMA_BYTES_MAX)
        except JsonRejected as error:
            yield path, str(error)
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


def _choice_violations(path: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    if not texts:
        yield path, "must hold at least one text"
    if len(texts) > CHOICE_TEXTS_MAX:
        yield path, f"must hold at most {CHOICE_TEXTS_MAX} texts, not {len(texts)}"
        return
    for index, text in enumerate(texts):
        if not text:
            yield f"{path}[{index}]", "must not be empty; leave it out"
        elif len(text) > CHOICE_TEXTS_MAX:
            yield (
                f"{path}[{index}]",
                f"must have at most {CHOICE_TEXTS_MAX} characters, not {len(text)}",
            )
