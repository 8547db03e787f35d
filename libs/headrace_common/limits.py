"""Bounds on the values in a message, so that its reader does bounded work. Pure."""

from __future__ import annotations

from typing import Final

from headrace.kv.v1 import layout_pb2
from headrace_common.errors import LayoutMismatch

RANKS_MAX: Final = 4_096
LAYERS_MAX: Final = 4_096
HEADS_MAX: Final = 65_536
TRANSFER_ID_CHARACTERS_MAX: Final = 128
"""Longest transfer id that a worker accepts."""
LINK_STREAMS_MAX: Final = 4_096
"""Most requests in progress on one link between a router and a decode worker."""
PROMPT_TOKENS_MAX: Final = 4_194_304
"""Most tokens of a request, of whatever context length. The protos have the same bound."""
LINK_MESSAGE_BYTES_MAX: Final = 1024 * 1024
"""Size from which messages of a link are split. A single request may be longer."""
LINK_TOKEN_INTERVAL_MAX_US: Final = 100_000
"""Longest time for which a router may let a worker join the tokens of a link."""
TICKET_BYTES_MAX: Final = 1_024
"""Longest handoff ticket that a decode worker parses."""
TICKET_PUBLIC_KEY_BYTES: Final = 32
TICKET_KEY_ID_BYTES: Final = 16
TICKET_KEYS_MAX: Final = 1_024
"""Most routers' keys that one process keeps."""
TICKET_KEY_KEPT_S: Final = 90.0
"""How long a decode worker accepts handoff tickets of a router after the end of its status stream."""
VERSION_CHARACTERS_MAX: Final = 63
"""Longest version of a member's software."""
NAME_CHARACTERS_MAX: Final = 255
TRANSPORT_CHARACTERS_MAX: Final = 63
"""Longest name of a model, cache group, data type or block format in a member's record."""
REQUEST_FIELDS_MAX: Final = 16_384
"""Most fields in one client's request, in nested messages too. A packed list is one field."""
CHAT_ROLES: Final = ("system", "user", "assistant", "tool", "developer")
"""Roles that every chat template has. A message may have another."""
ROLE_CHARACTERS_MAX: Final = 64
CHAT_MESSAGES_MAX: Final = 2_048
"""Most messages of one chat."""
CHAT_PARTS_MAX: Final = 64
"""Most parts of a message with images."""
IMAGES_MAX: Final = 64
"""Most images of one request."""
IMAGE_BYTES_MAX: Final = 20 * 1024 * 1024
"""Most bytes of one image."""
IMAGES_BYTES_MAX: Final = 32 * 1024 * 1024
"""Most bytes of all images of one request."""
CHAT_NAME_CHARACTERS_MAX: Final = 128
"""Longest name of an author or function, and longest id of a function call."""
CHAT_TOOLS_MAX: Final = 1_024
"""Most functions of one chat, and most calls in one message."""
TEMPLATE_KWARGS_BYTES_MAX: Final = 16_384
"""Most bytes of JSON with variables for a chat template."""
JSON_PARTS_MAX: Final = 65_536
"""Most strings, names of fields, objects and arrays in the JSON body of an HTTP request."""
JSON_NUMBERS_PER_TOKEN_MAX: Final = 4
"""Most other values there, such as tokens of several prompts, for each token of the context."""
JSON_LEVELS_MAX: Final = 64
"""Deepest nesting of JSON from a client. Engines have the same bound."""
SCHEMA_BYTES_MAX: Final = 65_536
"""Most bytes of a JSON Schema or grammar."""
CLIENT_SALT_CHARACTERS_MAX: Final = 128
"""Longest cache salt of a client."""
REGEX_BYTES_MAX: Final = 4_096
"""Longest regular expression."""
CHOICE_TEXTS_MAX: Final = 1_024
"""Most texts that an answer may be restricted to, and most characters of each."""
LOGPROBS_MAX: Final = 20
"""Most alternatives beside each token."""
PROMPT_LOGPROBS_VALUES_MAX: Final = 131_072
"""Most log probabilities of prompt tokens in the answers to one request."""
LOGIT_BIASES_MAX: Final = 1_024
"""Most tokens with a bias."""
LOGIT_BIAS_MAX: Final = 100.0
"""Largest bias of a token, in both directions."""
BAD_WORDS_MAX: Final = 64
BAD_WORD_CHARACTERS_MAX: Final = 256
BAD_SEQUENCES_MAX: Final = 256
BAD_SEQUENCE_TOKENS_MAX: Final = 256
ALLOWED_TOKENS_MAX: Final = 16_384
ANSWERS_MAX: Final = 128
"""Most answers to one prompt."""
STOP_STRINGS_MAX: Final = 16
STOP_STRING_CHARACTERS_MAX: Final = 256
"""Longest stop string. Scanning generated text takes time in proportion to it."""
STOP_TOKENS_MAX: Final = 256
"""Most stop tokens of one request."""
CONTROL_TEXTS_MAX: Final = 1_024
"""Most texts of control tokens in the contents of one chat."""
UNKNOWN_CONTEXT_TOKENS: Final = 131_072
"""Bounds the bytes of a prompt while neither a worker nor the model's files state the context length."""
# etcd rejects requests beyond 1.5 MiB.
DESCRIPTOR_BYTES_MAX: Final = 1024 * 1024
PAGE_SIZE_MAX: Final = 1_000
"""Most entries in one page of a list RPC."""
DRAIN_GRACE_MAX_S: Final = 3_600

CLOCK_OFFSET_NOTED_S: Final = 2.0
"""A wall clock that is this far from another host's is reported."""

LEASE_TTL_MIN_S: Final = 1
LEASE_TTL_MAX_S: Final = 300

POLICY_RETRY_BUDGET_MAX: Final = 10
POLICY_OVERLAP_WEIGHT_MAX: Final = 1_000
POLICY_FAR_WEIGHT_MAX: Final = 1_000
POLICY_TEMPERATURE_MAX: Final = 10
POLICY_QUEUE_WAIT_MAX_S: Final = 3_600
REQUEST_TIMEOUT_MAX_S: Final = 86_400
"""Longest timeout of a request over HTTP."""
TOKEN_TARGET_MAX_S: Final = 3_600
"""Longest target for the time to first token, of a request or of the policy."""
KEEP_MAX_S: Final = 3_600
"""Longest promise to keep KV."""
POLICY_TENANT_WEIGHT_MAX: Final = 1_000


STATUS_STREAMS_OF_CALLER_MAX: Final = 64
"""Streams of a worker's state, WatchStatus and SubscribeKvEvents, that one caller may open there.

A caller is the name in a credential, or else a host. A router has two, and twice as many for a moment when it restarts.
"""
STATUS_STREAMS_MAX: Final = 1_024
"""The same for all callers of a worker."""

WRITE_LEASE_S: Final = 5.0
"""Seconds that a prefill rank may write without a message from decode, unless a setting says otherwise."""
WRITE_QUARANTINE_S: Final = 15.0
"""Seconds after the lease in which a transport may end a write that has started, unless a setting says otherwise."""


# A handoff stream's messages. None depends on the prompt's length by more than its numbers.
_MESSAGE_BYTES: Final = 8 * 1024 * 1024
# A token in a message.
_NUMBER_BYTES: Final = 5


def message_bytes_max(max_model_len: int) -> int:
    """The bound on every message that a worker receives, also after decompression."""
    return _MESSAGE_BYTES + IMAGES_BYTES_MAX + max_model_len * _NUMBER_BYTES


def write_quiet_s(
    lease_ttl_s: float = WRITE_LEASE_S, quarantine_s: float = WRITE_QUARANTINE_S
) -> float:
    """Seconds after a sender was lost until none of its writes can land: see `headrace_kv.leases`."""
    return 2 * lease_ttl_s + quarantine_s


def limit_violations(layout: layout_pb2.KvLayout) -> dict[str, str]:
    """The remedy for each field beyond its limit, by field path."""
    violations: dict[str, str] = {}
    if not 0 < layout.tensor_parallel_size * max(1, len(layout.stage_starts)) <= RANKS_MAX:
        violations["tensor_parallel_size"] = f"times the number of stages, give 1 to {RANKS_MAX}"
    if sum(len(group.layers) for group in layout.groups) > LAYERS_MAX:
        violations["groups"] = f"give {LAYERS_MAX} layers at most"
    for index, group in enumerate(layout.groups[:LAYERS_MAX]):
        if group.head_count > HEADS_MAX:
            violations[f"groups[{index}].head_count"] = f"give {HEADS_MAX} at most"
        if (group.window_tokens or group.chunk_tokens) and not group.block_tokens:
            violations[f"groups[{index}].block_tokens"] = "give 1 or more beside a window"
    return violations


def require_limits(layout: layout_pb2.KvLayout) -> None:
    """Raises LayoutMismatch naming every field beyond its limit."""
    violations = limit_violations(layout)
    if violations:
        named = "; ".join(f"{path}: {remedy}" for path, remedy in violations.items())
        raise LayoutMismatch(f"the KV layout exceeds a limit: {named}", metadata=violations)


LEASES_PER_RENEWAL_MAX: Final = 4_096
"""Leases that one message to the registry may renew."""

DEFAULT_KV_CACHE_GIB: Final = 1.0
"""KV memory of a rank where neither a setting nor a GPU's share decides it."""

ADAPTER_CHANGE_S: Final = 300.0
"""Most seconds to load or unload a LoRA adapter on all workers of a model."""
