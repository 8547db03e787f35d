"""Converts a client's request into one that can be placed, or reports everything that is invalid. Pure."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.callers.priority import Priority
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InvalidRequest
from headrace_common.limits import (
    ANSWERS_MAX,
    CLIENT_SALT_CHARACTERS_MAX,
    KEEP_MAX_S,
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
    template_kwargs_of,
    tools_of,
)
from headrace_frontend.request.images import PromptImages, rule_for, with_placeholders
from headrace_frontend.request.model_names import Adapters, resolve_model
from headrace_frontend.request.sampling import (
    bad_word_tokens,
    beyond_vocabulary,
    sampling_violations,
    vocabulary_violations,
    with_defaults,
)
from headrace_frontend.request.size import (
    BYTES_PER_TOKEN_MAX,
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
_PROMPT_FIELDS = ("text", "chat", "tokens")
_PLACEMENTS = frozenset(inference_pb2.PrefillPlacement.values())
_FIRST_TOKEN_POLICIES = frozenset(first_token_pb2.FirstTokenPolicy.values())


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request: the prompt as tokens, and every default filled in."""

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
    """The class that the caller's tenant may use. `prepare` does not know it."""
    tenant: str = DEFAULT_TENANT
    """The caller's tenant. `prepare` does not know it."""
    ttft_target_s: float | None = None
    """The client's longest time to first token. None for that of the policy."""
    tpot_target_s: float | None = None
    """The client's longest mean time per further token. None for that of the policy."""
    keep_s: float | None = None
    """How long the KV shall stay after the answer. None asks for no promise."""
    includes_latency: bool = False
    """Whether the client wants its times to the first tokens as parts."""
    tokenized_ns: tuple[int, int] = (0, 0)
    """When this was made, by the monotonic clock: the start and the end."""
    images: PromptImages = ()
    """Images in the prompt, in order."""
    image_prefix_ids: array[int] | None = None
    """`prefix_ids` of a prompt with images."""

    def of_caller(self, tenant: str, priority: Priority) -> PreparedRequest:
        """The same request of a tenant, in a class."""
        return replace(self, tenant=tenant, priority=priority)

    @property
    def prefix_ids(self) -> array[int]:
        """The words that prefixes are hashed from: the tokens, and in place of placeholders the content of images."""
        return self.token_ids if self.image_prefix_ids is None else self.image_prefix_ids

    @property
    def image_bytes(self) -> int:
        """Bytes of all images."""
        return sum(len(image.data) for image in self.images)

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
    bytes_per_token: int = BYTES_PER_TOKEN_MAX,
    cache_salt: str = "",
    adapters: Adapters | None = None,
    add_generation_prompt: bool = True,
) -> PreparedRequest:
    """Validates and tokenizes a request. Slow for a long prompt: call it on a thread.

    `max_model_len` is the context length of the live decode workers by model. The model's own files count for a model
    without workers. `cache_salt` is that of the tenant. A text of more than `bytes_per_token` times the context length
    is not tokenized. Raises InvalidRequest with every violation at once.
    """
    violations = request_violations(request)
    try:
        choice = resolve_model(request.model, codecs, adapters or {}, request.adapter)
    except InvalidRequest as error:
        raise InvalidRequest({**error.violations, **violations}, cause=error.cause) from error
    model = choice.model
    codec = codecs[model]
    context = max_model_len.get(model) or codec.max_model_len
    token_ids = array("I")
    images: PromptImages = ()
    if not any(path.partition(".")[0] in (*_PROMPT_FIELDS, "prompt") for path in violations):
        prompt_violations = byte_violations(request, codec, context, bytes_per_token)
        if not prompt_violations:
            token_ids, images, prompt_violations = _tokenized(
                request, codec, context, cache_salt, add_generation_prompt=add_generation_prompt
            )
        violations.update(prompt_violations)
    violations.update(_vocabulary_violations(request, codec.vocabulary_size, context))
    if violations:
        beyond = any(CONTEXT_WORDS in remedy for remedy in violations.values())
        raise InvalidRequest(violations, cause="context_length_exceeded" if beyond else "")
    max_tokens = request.sampling.max_tokens or tokens_left(context, len(token_ids))
    violations = room_violations(request, max_tokens)
    violations.update(prompt_logprobs_violations(request, len(token_ids)))
    if violations:
        raise InvalidRequest(violations)
    model_stops = frozenset() if request.sampling.ignore_eos else codec.stop_token_ids
    return PreparedRequest(
        request_id=request_id,
        model=model,
        codec=codec,
        token_ids=token_ids,
        sampling=_workers_sampling(request, codec, max_tokens),
        stop_token_ids=tuple(sorted(model_stops.union(request.sampling.stop_token_ids))),
        stop_strings=tuple(request.sampling.stop),
        # Only the engine that generates has the logits of all positions, when it computes them all.
        placement=inference_pb2.PREFILL_PLACEMENT_LOCAL
        if request.sampling.HasField("prompt_logprobs")
        else request.prefill_placement,
        first_token=request.first_token,
        generated=tuple(request.generated.ids),
        cache_salt=adapter_salt(client_salt(cache_salt, request.cache_salt), choice.adapter),
        tenant_salt=cache_salt,
        adapter=choice.adapter,
        keeps_stop=request.sampling.include_stop_str_in_output,
        skips_special_tokens=not request.sampling.HasField("skip_special_tokens")
        or request.sampling.skip_special_tokens,
        ttft_target_s=_seconds(request, "ttft_target"),
        tpot_target_s=_seconds(request, "tpot_target"),
        keep_s=_seconds(request, "keep"),
        includes_latency=request.include_latency,
        images=images,
        image_prefix_ids=hashed_token_ids(token_ids, images) if images else None,
    )


def _seconds(
    request: inference_pb2.GenerateRequest, name: Literal["ttft_target", "tpot_target", "keep"]
) -> float | None:
    return seconds_from_duration(getattr(request, name)) if request.HasField(name) else None


def _workers_sampling(
    request: inference_pb2.GenerateRequest, codec: TextCodec, max_tokens: int
) -> sampling_pb2.SamplingParams:
    sampling = with_defaults(request.sampling, max_tokens)
    for ids in bad_word_tokens(request.sampling.bad_words, codec):
        sampling.bad_token_sequences.add(ids=ids)
    schema = forced_call_schema(request.chat)
    if schema is not None:
        sampling.structured_outputs.json = schema
    return sampling


def request_violations(request: inference_pb2.GenerateRequest) -> dict[str, str]:
    """Remedies by path of the invalid field. Needs no knowledge of the model."""
    violations = sampling_violations(request.sampling)
    given = [name for name in _PROMPT_FIELDS if request.HasField(name)]  # type: ignore[arg-type]
    if not given:
        violations["prompt"] = "set one of text, chat and tokens"
    elif len(given) > 1:
        violations["prompt"] = f"set only one of text, chat and tokens, not {' and '.join(given)}"
    if given == ["text"] and not request.text:
        violations["text"] = "must not be empty"
    if given == ["tokens"] and not request.tokens.ids:
        violations["tokens.ids"] = "must not be empty"
    if given == ["chat"]:
        violations.update(chat_violations(request.chat))
        if request.sampling.HasField("structured_outputs") and forces_call(request.chat):
            violations["chat.tool_choice.mode"] = (
                "excludes sampling.structured_outputs; leave out one of them"
            )
    violations.update(_id_violations(request))
    violations.update(_answer_violations(request))
    violations.update(_placement_violations(request))
    if request.first_token not in _FIRST_TOKEN_POLICIES:
        violations["first_token"] = "must be one of the named values"
    if len(request.cache_salt) > CLIENT_SALT_CHARACTERS_MAX:
        violations["cache_salt"] = f"must have at most {CLIENT_SALT_CHARACTERS_MAX} characters"
    violations.update(_target_violations(request))
    return violations


def _id_violations(request: inference_pb2.GenerateRequest) -> Iterator[tuple[str, str]]:
    given = {"request_id": request.request_id, "conversation_id": request.conversation_id}
    for name, text in given.items():
        if len(text) > REQUEST_ID_CHARACTERS_MAX:
            yield name, f"must have at most {REQUEST_ID_CHARACTERS_MAX} characters"
        elif not _REQUEST_ID.fullmatch(text):
            yield name, "must hold visible ASCII characters only, without spaces"


def _placement_violations(request: inference_pb2.GenerateRequest) -> dict[str, str]:
    placement = request.prefill_placement
    if placement not in _PLACEMENTS:
        return {"prefill_placement": "must be one of the named values"}
    remote = placement == inference_pb2.PREFILL_PLACEMENT_REMOTE
    if remote and request.sampling.HasField("prompt_logprobs"):
        return {"prefill_placement": "excludes sampling.prompt_logprobs; leave out one of them"}
    return {}


def _target_violations(request: inference_pb2.GenerateRequest) -> dict[str, str]:
    targets = {"ttft_target": request.ttft_target, "tpot_target": request.tpot_target}
    return {
        name: f"must be above 0 s and at most {TOKEN_TARGET_MAX_S} s"
        for name, target in targets.items()
        if request.HasField(name)  # type: ignore[arg-type]
        and not 0 < seconds_from_duration(target) <= TOKEN_TARGET_MAX_S
    }


def _answer_violations(request: inference_pb2.GenerateRequest) -> Iterator[tuple[str, str]]:
    if request.n > ANSWERS_MAX:
        yield "n", f"must be from 1 to {ANSWERS_MAX}, not {request.n}"
    if request.best_of > ANSWERS_MAX:
        yield "best_of", f"must be from n to {ANSWERS_MAX}, not {request.best_of}"
    elif request.best_of and request.best_of < max(1, request.n):
        yield "best_of", f"must be at least n, {request.n}, not {request.best_of}"
    if request.HasField("keep"):
        if not 0 < seconds_from_duration(request.keep) <= KEEP_MAX_S:
            yield "keep", f"must be above 0 s and at most {KEEP_MAX_S} s"
        elif max(request.n, request.best_of) > 1:
            yield "keep", "excludes several answers; ask for one"
    if request.generated.ids and max(request.n, request.best_of) > 1:
        yield "generated", "must be empty for several answers; send n=1 for each of them"
    # Generate has replaced it by the messages.
    if request.resume:
        yield "resume", "needs chat, and Generate of a router; send all messages"
    if request.store and not request.HasField("chat"):
        yield "store", "needs chat; set chat, or leave it out"
    elif request.store and (request.generated.ids or max(request.n, request.best_of) > 1):
        yield "store", "excludes generated and several answers; leave it out"


def _tokenized(
    request: inference_pb2.GenerateRequest,
    codec: TextCodec,
    context: int,
    cache_scope: str,
    *,
    add_generation_prompt: bool,
) -> tuple[array[int], PromptImages, dict[str, str]]:
    """The prompt's tokens and images, and the violations that only they show."""
    images: PromptImages = ()
    try:
        rule = rule_for(request.chat, codec)
        if request.HasField("tokens"):
            token_ids = array("I", request.tokens.ids)
        elif request.HasField("text"):
            token_ids = array("I", codec.encode(request.text, context or None))
        else:
            token_ids = codec.encode_chat(
                messages_of(request.chat),
                continue_final_message=request.chat.continue_final_message,
                tokens_max=context or None,
                tools=tools_of(request.chat),
                template_kwargs=template_kwargs_of(request.chat),
                cache_scope=cache_scope,
                add_generation_prompt=add_generation_prompt,
            )
        if rule is not None:
            token_ids, images = with_placeholders(token_ids, request.chat, rule)
    except TooManyTokens as error:
        if not error.count:
            why = f"has far too many tokens, and {CONTEXT_WORDS} {context} tokens; shorten it"
            return array("I"), images, {prompt_field(request): why}
        return array("I"), images, length_violations(request, error.count, context)
    except InvalidRequest as error:
        return array("I"), images, error.violations
    return token_ids, images, length_violations(request, len(token_ids), context)


def _vocabulary_violations(
    request: inference_pb2.GenerateRequest, vocabulary_size: int, context: int
) -> dict[str, str]:
    violations = vocabulary_violations(request.sampling, vocabulary_size)
    for path, ids in (
        ("tokens.ids", request.tokens.ids),
        ("generated.ids", request.generated.ids),
    ):
        # A longer list is rejected for its length.
        violations.update(beyond_vocabulary(path, ids, context, vocabulary_size))
    return violations


def decode_request(
    request: PreparedRequest,
    transfer_id: str,
    generated: tuple[int, ...] = (),
    *,
    incarnation: str,
    remote_prefill: bool,
) -> decode_pb2.GenerateRequest:
    """The request to one incarnation of a decode worker, without a ticket, for a first token from decode.

    `generated` is the completion so far.
    """
    call = decode_pb2.GenerateRequest(
        request_id=request.request_id,
        transfer_id=transfer_id,
        incarnation=incarnation,
        token_ids=token_ids_message(request.token_ids + array("I", generated)).ids,
        generated_token_count=len(generated),
        sampling=request.sampling,
        stop_token_ids=request.stop_token_ids,
        remote_prefill=remote_prefill,
        cache_salt=request.cache_salt,
        tenant_salt=request.tenant_salt,
        adapter=None if request.adapter is None else adapter_to_proto(request.adapter),
        priority=request.priority.to_proto(),
        keep=None if request.keep_s is None else terms_to_proto(request.tenant, request.keep_s),
        images=request.images,
    )
    if generated:
        # They came with the first token.
        call.sampling.ClearField("prompt_logprobs")
    return call
