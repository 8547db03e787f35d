"""Converts a client's request into one that can be placed, or reports everything that is invalid. Pure."""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.callers.priority import Priority
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest
from headrace_common.limits import (
    ANSWERS_MAX,
    CLIENT_SALT_CHARACTERS_MAX,
    KEEP_MAX_S,
    PROMPT_TOKENS_MAX,
    TOKEN_TARGET_MAX_S,
)
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.rpc.token_ids import token_ids_message
from headrace_frontend.promises import terms_to_proto
from headrace_frontend.request.chat import (
    chat_violations,
    forced_call_schema,
    forces_call,
    messages_of,
    plain_messages,
    template_kwargs_of,
    tools_of,
)
from headrace_frontend.request.images import (
    PlainMessages,
    PromptImages,
    rule_for,
    with_placeholders,
)
from headrace_frontend.request.model_names import NO_ADAPTERS, Adapters, resolve_model
from headrace_frontend.request.sampling import (
    Given,
    bad_word_tokens,
    beyond_vocabulary,
    given_fields,
    sampling_violations,
    vocabulary_violations,
    with_defaults,
)
from headrace_frontend.request.size import (
    CONTEXT_WORDS,
    byte_violations,
    length_violations,
    prompt_field,
    prompt_logprobs_violations,
    room_violations,
    tokens_left,
)
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.cache_salt import adapter_salt, client_salt
from headrace_kv.prefix.images import hashed_token_ids
from headrace_text.codec import TextCodec, TooManyTokens

REQUEST_ID_CHARACTERS_MAX = 128
_REQUEST_ID = re.compile(r"[!-~]*")
_PROMPT_FIELDS: Final = ("text", "chat", "tokens")
_PROMPT_PATHS: Final = frozenset((*_PROMPT_FIELDS, "prompt"))
_ID_FIELDS: Final = ("tokens", "generated")
_DURATIONS: Final = ("ttft_target", "tpot_target", "keep")
_PLACEMENTS = frozenset(inference_pb2.PrefillPlacement.values())
_LOCAL, _REMOTE = inference_pb2.PREFILL_PLACEMENT_LOCAL, inference_pb2.PREFILL_PLACEMENT_REMOTE
_FIRST_TOKEN_POLICIES = frozenset(first_token_pb2.FirstTokenPolicy.values())


@dataclass(slots=True)
class PreparedRequest:
    """A valid request: the prompt as tokens, and every default filled in. It must not be changed.

    It is not frozen, since each of its many fields would take ten times longer to set.
    """

    request_id: str
    model: str
    codec: TextCodec
    token_ids: array[int]
    """Of type "I". It must not be changed."""
    sampling: sampling_pb2.SamplingParams
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    placement: inference_pb2.PrefillPlacement.ValueType
    first_token: first_token_pb2.FirstTokenPolicy.ValueType = (
        first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
    )
    generated: tuple[int, ...] = ()
    """Tokens of the completion that the client already has."""
    cache_salt: str = ""
    """Only requests with an equal salt share cached blocks. It depends on the tenant, and on the client's salt."""
    tenant_salt: str = ""
    """Equal for all requests of a tenant."""
    adapter: Adapter | None = None
    """The LoRA adapter, None for the model alone. The salt depends on it."""
    keeps_stop: bool = False
    """Whether the stop that ended the completion is part of its text."""
    skips_special_tokens: bool = True
    """Whether the text of special tokens is left out."""
    cached_on: WorkerRef | None = None
    """A decode worker that has the prompt's KV cache, as another answer to it has shown."""
    priority: Priority = Priority.NORMAL
    """The class that the caller's tenant may use."""
    tenant: str = DEFAULT_TENANT
    """The caller's tenant."""
    ttft_target_s: float | None = None
    """The client's longest time to first token. None for that of the policy."""
    tpot_target_s: float | None = None
    """The client's longest mean time per further token. None for that of the policy."""
    keep_s: float | None = None
    """How long the KV shall stay after the answer. None asks for no promise."""
    includes_latency: bool = False
    """Whether the client wants its times to the first tokens as parts."""
    tokenized_ns: tuple[int, int] = (0, 0)
    """When this was made, by the monotonic clock: the start of the wait for it, and the end."""
    images: PromptImages = ()
    """Images in the prompt, in order."""
    image_bytes: int = 0
    """Bytes of all images."""
    image_prefix_ids: array[int] | None = None
    """`prefix_ids` of a prompt with images."""

    def all_token_ids(self, generated: tuple[int, ...]) -> inference_pb2.TokenIds:
        """The tokens of the prompt and of the completion so far."""
        words = self.token_ids
        return token_ids_message(words + array("I", generated) if generated else words)

    @property
    def prefix_ids(self) -> array[int]:
        """The words that prefixes are hashed from: the tokens, and in place of placeholders the content of images."""
        return self.token_ids if self.image_prefix_ids is None else self.image_prefix_ids

    @property
    def payer(self) -> tuple[str, str, str]:
        """The tenant, the model and the adapter, for which it is empty without one."""
        return self.tenant, self.model, self.adapter.name if self.adapter is not None else ""

    @property
    def served_name(self) -> str:
        """The name of the model, or of the adapter, as lists of models have it."""
        return self.model if self.adapter is None else self.adapter.name


def prepare(
    request: inference_pb2.GenerateRequest,
    *,
    request_id: str,
    codecs: Mapping[str, TextCodec],
    max_model_len: Mapping[str, int],
    cache_salt: str = "",
    adapters: Adapters = NO_ADAPTERS,
    tenant: str = DEFAULT_TENANT,
    priority: Priority = Priority.NORMAL,
    start_ns: int = 0,
    add_generation_prompt: bool = True,
) -> PreparedRequest:
    """Validates and tokenizes a request. Slow for a long prompt: call it on a thread.

    `max_model_len` is the context length of the live decode workers by model. The model's own files count for a model
    without workers. `cache_salt` is that of the tenant. A text of too many bytes for the context is not tokenized.
    `start_ns` becomes that of `tokenized_ns`. Raises InvalidRequest with every violation at once.
    """
    sampling, fields = request.sampling, _fields_of(request)
    _, given, sampled, _ = fields
    violations = _violations(fields)
    try:
        choice = resolve_model(request.model, codecs, adapters, request.adapter)
    except InvalidRequest as error:
        raise InvalidRequest({**error.violations, **violations}, cause=error.cause) from error
    model = choice.model
    codec = codecs[model]
    context = min(max_model_len.get(model) or codec.max_model_len, PROMPT_TOKENS_MAX)
    token_ids = array("I")
    images: PromptImages = ()
    if _PROMPT_PATHS.isdisjoint([path.partition(".")[0] for path in violations]):
        prompt_violations = byte_violations(request, codec, context)
        if not prompt_violations:
            token_ids, images, prompt_violations = _tokenized(
                fields, codec, context, cache_salt, add_generation_prompt=add_generation_prompt
            )
        violations.update(prompt_violations)
    violations.update(_vocabulary_violations(fields, codec.vocabulary_size, context))
    if violations:
        beyond = any(CONTEXT_WORDS in remedy for remedy in violations.values())
        raise InvalidRequest(violations, cause="context_length_exceeded" if beyond else "")
    max_tokens = sampling.max_tokens or tokens_left(context, len(token_ids))
    generated = tuple(given["generated"].ids) if "generated" in given else ()
    violations = room_violations(sampling, max_tokens, len(generated))
    if gives_logprobs := "prompt_logprobs" in sampled:
        violations.update(prompt_logprobs_violations(request, len(token_ids)))
    if violations:
        raise InvalidRequest(violations)
    ttft_target_s, tpot_target_s, keep_s = [
        seconds_from_duration(given[name]) if name in given else None for name in _DURATIONS
    ]
    model_stops = frozenset() if sampled.get("ignore_eos") else codec.stop_token_ids
    return PreparedRequest(
        request_id=request_id,
        model=model,
        codec=codec,
        token_ids=token_ids,
        sampling=_workers_sampling(fields, codec, max_tokens),
        stop_token_ids=tuple(sorted(model_stops.union(sampled.get("stop_token_ids", ())))),
        stop_strings=tuple(sampled.get("stop", ())),
        # Only the engine that generates has the logits of all positions, when it computes them all.
        placement=_LOCAL if gives_logprobs else request.prefill_placement,
        first_token=request.first_token,
        generated=generated,
        cache_salt=adapter_salt(client_salt(cache_salt, request.cache_salt), choice.adapter),
        tenant_salt=cache_salt,
        adapter=choice.adapter,
        keeps_stop=sampled.get("include_stop_str_in_output", False),
        skips_special_tokens=sampled.get("skip_special_tokens", True),
        priority=priority,
        tenant=tenant,
        ttft_target_s=ttft_target_s,
        tpot_target_s=tpot_target_s,
        keep_s=keep_s,
        includes_latency=given.get("include_latency", False),
        tokenized_ns=(start_ns, time.monotonic_ns()),
        images=images,
        # Protobuf copies them, which takes milliseconds.
        image_bytes=sum(len(image.data) for image in images) if images else 0,
        image_prefix_ids=hashed_token_ids(token_ids, images) if images else None,
    )


class _Fields(NamedTuple):
    """What a request has, read from its message once. `sampled` has the fields of its sampling."""

    request: inference_pb2.GenerateRequest
    given: Given
    sampled: Given
    plain: PlainMessages


def _fields_of(request: inference_pb2.GenerateRequest) -> _Fields:
    given = given_fields(request)
    plain = plain_messages(given["chat"].messages) if "chat" in given else ()
    return _Fields(request, given, given_fields(request.sampling), plain)


def _workers_sampling(
    fields: _Fields, codec: TextCodec, max_tokens: int
) -> sampling_pb2.SamplingParams:
    filled = with_defaults(fields.request.sampling, fields.sampled, max_tokens)
    for ids in bad_word_tokens(fields.sampled.get("bad_words", ()), codec):
        filled.bad_token_sequences.add(ids=ids)
    schema = forced_call_schema(fields.given["chat"]) if "chat" in fields.given else None
    if schema is not None:
        filled.structured_outputs.json = schema
    return filled


def request_violations(request: inference_pb2.GenerateRequest) -> dict[str, str]:
    """Remedies by path of the invalid field. Needs no knowledge of the model."""
    return _violations(_fields_of(request))


def _violations(fields: _Fields) -> dict[str, str]:
    given = fields.given
    violations = sampling_violations(fields.sampled)
    violations.update(_prompt_violations(fields))
    violations.update(_id_violations(given))
    violations.update(_answer_violations(given))
    placement = given.get("prefill_placement", 0)
    if placement not in _PLACEMENTS:
        violations["prefill_placement"] = "must be one of the named values"
    elif placement == _REMOTE and "prompt_logprobs" in fields.sampled:
        violations["prefill_placement"] = "excludes sampling.prompt_logprobs; leave out one of them"
    if given.get("first_token", 0) not in _FIRST_TOKEN_POLICIES:
        violations["first_token"] = "must be one of the named values"
    if len(given.get("cache_salt", "")) > CLIENT_SALT_CHARACTERS_MAX:
        violations["cache_salt"] = f"must have at most {CLIENT_SALT_CHARACTERS_MAX} characters"
    for target in _DURATIONS[:2]:
        if target in given and not 0 < seconds_from_duration(given[target]) <= TOKEN_TARGET_MAX_S:
            violations[target] = f"must be above 0 s and at most {TOKEN_TARGET_MAX_S} s"
    return violations


def _prompt_violations(fields: _Fields) -> dict[str, str]:
    given = fields.given
    names = [name for name in _PROMPT_FIELDS if name in given]
    if not names:
        return {"prompt": "set one of text, chat and tokens"}
    if len(names) > 1:
        return {"prompt": f"set only one of text, chat and tokens, not {' and '.join(names)}"}
    if names == ["text"]:
        return {} if given["text"] else {"text": "must not be empty"}
    if names == ["tokens"]:
        return {} if given["tokens"].ids else {"tokens.ids": "must not be empty"}
    violations = chat_violations(given["chat"], fields.plain)
    if "structured_outputs" in fields.sampled and forces_call(given["chat"]):
        remedy = "excludes sampling.structured_outputs; leave out one of them"
        violations["chat.tool_choice.mode"] = remedy
    return violations


def _id_violations(given: Given) -> Iterator[tuple[str, str]]:
    for name in ("request_id", "conversation_id"):
        text = given.get(name, "")
        if len(text) > REQUEST_ID_CHARACTERS_MAX:
            yield name, f"must have at most {REQUEST_ID_CHARACTERS_MAX} characters"
        elif text and not _REQUEST_ID.fullmatch(text):
            yield name, "must hold visible ASCII characters only, without spaces"


def _answer_violations(given: Given) -> Iterator[tuple[str, str]]:
    n, best_of = given.get("n", 0), given.get("best_of", 0)
    several = max(n, best_of) > 1
    continued = "generated" in given and bool(given["generated"].ids)
    if n > ANSWERS_MAX:
        yield "n", f"must be from 1 to {ANSWERS_MAX}, not {n}"
    if best_of > ANSWERS_MAX:
        yield "best_of", f"must be from n to {ANSWERS_MAX}, not {best_of}"
    elif best_of and best_of < max(1, n):
        yield "best_of", f"must be at least n, {n}, not {best_of}"
    keeps = "keep" in given
    if keeps and not 0 < seconds_from_duration(given["keep"]) <= KEEP_MAX_S:
        yield "keep", f"must be above 0 s and at most {KEEP_MAX_S} s"
    elif keeps and several:
        yield "keep", "excludes several answers; ask for one"
    if continued and several:
        yield "generated", "must be empty for several answers; send n=1 for each of them"
    # Generate has replaced it by the messages.
    if "resume" in given:
        yield "resume", "needs chat, and Generate of a router; send all messages"
    if "store" in given and "chat" not in given:
        yield "store", "needs chat; set chat, or leave it out"
    elif "store" in given and (continued or several):
        yield "store", "excludes generated and several answers; leave it out"


def _tokenized(
    fields: _Fields,
    codec: TextCodec,
    context: int,
    cache_scope: str,
    *,
    add_generation_prompt: bool,
) -> tuple[array[int], PromptImages, dict[str, str]]:
    """The prompt's tokens and images, and the violations that only they show."""
    request, _, _, plain = fields
    images: PromptImages = ()
    try:
        if request.HasField("tokens"):
            token_ids = array("I", request.tokens.ids)
        elif request.HasField("text"):
            token_ids = array("I", codec.encode(request.text, context or None))
        else:
            chat = request.chat
            rule = rule_for(chat, plain, codec)
            token_ids = codec.encode_chat(
                messages_of(chat, plain),
                continue_final_message=chat.continue_final_message,
                tokens_max=context or None,
                tools=tools_of(chat),
                template_kwargs=template_kwargs_of(chat),
                cache_scope=cache_scope,
                add_generation_prompt=add_generation_prompt,
            )
            if rule is not None:
                token_ids, images = with_placeholders(token_ids, chat, plain, rule)
    except TooManyTokens as error:
        if not error.count:
            why = f"has far too many tokens, and {CONTEXT_WORDS} {context} tokens; shorten it"
            return array("I"), images, {prompt_field(request): why}
        return array("I"), images, length_violations(request, error.count, context)
    except InvalidRequest as error:
        return array("I"), images, error.violations
    return token_ids, images, length_violations(request, len(token_ids), context)


def _vocabulary_violations(fields: _Fields, vocabulary_size: int, context: int) -> dict[str, str]:
    violations = vocabulary_violations(fields.sampled, vocabulary_size)
    for name in _ID_FIELDS:
        if name in fields.given:
            ids = fields.given[name].ids
            # A longer list is rejected for its length.
            violations.update(beyond_vocabulary(f"{name}.ids", ids, context, vocabulary_size))
    return violations


def decode_request(
    request: PreparedRequest,
    transfer_id: str,
    generated: tuple[int, ...] = (),
    *,
    incarnation: str,
    remote_prefill: bool,
) -> decode_pb2.GenerateRequest:
    """The request to one incarnation of a decode worker, for a first token from decode: without tokens, images, ticket.

    `generated` is the completion so far. `PreparedRequest` has the images, and the tokens by `all_token_ids`.
    """
    call = decode_pb2.GenerateRequest(
        request_id=request.request_id,
        transfer_id=transfer_id,
        incarnation=incarnation,
        generated_token_count=len(generated),
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        remote_prefill=remote_prefill,
        cache_salt=request.cache_salt,
        tenant_salt=request.tenant_salt,
        priority=request.priority.to_proto(),
    )
    if request.adapter is not None:
        call.adapter.CopyFrom(adapter_to_proto(request.adapter))
    if request.keep_s is not None:
        call.keep.CopyFrom(terms_to_proto(request.tenant, request.keep_s))
    if generated:
        # They came with the first token.
        call.sampling.ClearField("prompt_logprobs")
    return call
