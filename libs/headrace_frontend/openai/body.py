"""The bodies of requests as JSON objects, of which unknown fields are found."""

from __future__ import annotations

import logging
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.errors import invalid_body

_LOG = logging.getLogger(__name__)
_UNKNOWN_MAX = 16
_LOGGED_MAX = 1_000
_NAME_CHARACTERS_MAX = 128
_NO_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_.-]")


class Body(BaseModel):
    """A JSON object. A field that is null counts as left out. Unknown fields are kept for `unknown_fields`."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer. They are dropped."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change an answer, with the values that do not. Other values are rejected."""
    # Those that `translated` replaces, or that decide what it does.
    older: ClassVar[frozenset[str]] = frozenset()

    @property
    def ignored(self) -> Iterable[str]:
        """The fields that change nothing, though the client may expect it."""
        return self.__pydantic_extra__ or ()

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with older names and forms replaced. Raises ValueError with "FIELD: remedy".

        It is called for bodies with a field of `older`.
        """
        return fields

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if _changed_fields(cls).isdisjoint(value) and None not in value.values():
            return value
        kept = {
            name: item
            for name, item in value.items()
            if item is not None and name not in cls.without_effect
        }
        for name in cls.neutral.keys() & kept.keys():
            if kept.pop(name) not in cls.neutral[name]:
                raise ValueError(f"{name}: is not supported; leave it out")
        return kept if cls.older.isdisjoint(kept) else cls.translated(kept)


@cache
def _changed_fields(kind: type[Body]) -> frozenset[str]:
    assert kind.older or "translated" not in vars(kind), "older says when translated is called"
    return kind.without_effect.union(kind.neutral, kind.older)


class LenientBody(Body):
    """A body of an API with fields that say nothing to a model, such as cache_control, ids and statuses."""

    model_config = ConfigDict(extra="ignore")


# Fields of chats that every API takes: vLLM's for sampling, and Headrace's own.
_FORWARDED: Final = frozenset(
    {
        *("allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "seed", "stop"),
        *("frequency_penalty", "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p"),
        *("min_tokens", "presence_penalty", "priority", "prompt_cache_options"),
        *("prompt_cache_retention", "repetition_penalty", "request_id"),
        *("skip_special_tokens", "stop_token_ids", "structured_outputs", "timeout_s", "top_k"),
        *("tpot_target_s", "ttft_target_s"),
    }
)


class ForwardingBody(LenientBody):
    """A request of an API beside chat completions. Its own fields are lenient within."""

    model_config = ConfigDict(extra="allow")

    @property
    def forwarded(self) -> dict[str, Any]:
        """The fields of the same chat that this API does not have."""
        given = self.model_extra or {}
        return {name: given[name] for name in _FORWARDED & given.keys()}

    @property
    def ignored(self) -> Iterable[str]:
        return (self.model_extra or {}).keys() - _FORWARDED


class UnknownFields:
    """Finds the fields of bodies that no class names. Each name is logged once, or all of them are `rejected`."""

    def __init__(self, *, rejected: bool) -> None:
        self._rejected = rejected
        self._logged: set[str] = set()

    def check(self, *bodies: Body) -> list[str]:
        """The paths of some unknown fields, without the indexes of lists. Raises InvalidRequest to reject them."""
        found = [path for body in bodies for path in _unknown(body)][:_UNKNOWN_MAX]
        if not found:
            return found
        paths = sorted({_NO_NAME_CHARACTER.sub("_", one)[:_NAME_CHARACTERS_MAX] for one in found})
        if self._rejected:
            remedy = "is not a field of this request; correct its name or leave it out"
            raise InvalidRequest(dict.fromkeys(paths, remedy), cause="unknown_parameter")
        for path in paths:
            if path not in self._logged and len(self._logged) < _LOGGED_MAX:
                self._logged.add(path)
                _LOG.warning("requests have the field %s, which is ignored", path)
        return paths


def _unknown(body: Body, path: str = "") -> list[str]:
    """The paths may repeat. There may be more, once they are enough."""
    found = [f"{path}{name}" for name in islice(body.ignored, _UNKNOWN_MAX)]
    for name in _body_fields(type(body)):
        value = body.__dict__[name]
        # pydantic makes isinstance slow for other types.
        if value is not None and not isinstance(value, str):
            for item in value if isinstance(value, list) else (value,):
                if len(found) < _UNKNOWN_MAX and isinstance(item, Body):
                    found += _unknown(item, f"{path}{name}.")
    return found


@cache
def _body_fields(kind: type[Body]) -> tuple[str, ...]:
    """The names of the fields that may have bodies."""
    return tuple(name for name, field in kind.model_fields.items() if _has_body(field.annotation))


def _has_body(annotation: Any) -> bool:
    is_body = isinstance(annotation, type) and issubclass(annotation, Body)
    return is_body or any(map(_has_body, get_args(annotation)))


BodyKind = TypeVar("BodyKind", bound=Body)


def parse_body(kind: type[BodyKind], data: bytes) -> BodyKind:
    """The body in `data`. Raises InvalidRequest that names the wrong fields."""
    return _validated(kind.model_validate_json, data.removeprefix(BOM_UTF8))


def checked_body(kind: type[BodyKind], value: Mapping[str, Any]) -> BodyKind:
    """As `parse_body`, of a body that another API's body asks for."""
    return _validated(kind.model_validate, value)


def _validated(validate: Callable[[Any], BodyKind], value: Any) -> BodyKind:
    try:
        return validate(value)
    except ValidationError as error:
        raise invalid_body(error) from None
