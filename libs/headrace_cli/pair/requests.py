"""Splits a request into one for the prefill server and one for the decode server. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PAIRED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
PROMPT_TOKENS_MIN = 2
# Fields that only affect the answer, which prefill does not generate.
ANSWER_FIELDS = (
    "best_of",
    "echo",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "response_format",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "tool_choice",
    "top_logprobs",
)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its complete body."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def with_json(self, body: Mapping[str, Any]) -> HttpRequest:
        """The same request with another body."""
        headers = tuple(pair for pair in self.headers if pair[0].lower() != "content-length")
        return HttpRequest(self.method, self.target, headers, json.dumps(body).encode())


@dataclass(frozen=True, slots=True)
class Pair:
    """The requests to both servers for one request of a client."""

    prefill: HttpRequest
    decode: HttpRequest


def without_transfer_params(request: HttpRequest) -> HttpRequest:
    """The request without kv_transfer_params: clients must not choose where servers connect to."""
    body = _json_object(request)
    if body is None or "kv_transfer_params" not in body:
        return request
    return request.with_json({k: v for k, v in body.items() if k != "kv_transfer_params"})


def split(
    request: HttpRequest, *, transfer_id: str, pair_address: tuple[str, int], remaining_s: float
) -> Pair | None:
    """Both requests for one prompt with one answer.

    None for any other request, which the decode server handles alone.
    """
    body = _json_object(request)
    if body is None or request.path not in PAIRED_PATHS or not _is_single(body):
        return None
    common = {"transfer_id": transfer_id, "remaining_s": remaining_s}
    host, port = pair_address
    source = {"remote_host": host, "remote_port": port}
    prefill = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    prefill |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True} | common}
    decode = body | {"kv_transfer_params": {"do_remote_prefill": True} | common | source}
    return Pair(request.with_json(prefill), request.with_json(decode))


def _json_object(request: HttpRequest) -> dict[str, Any] | None:
    if request.method != "POST":
        return None
    try:
        body = json.loads(request.body)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _is_single(body: Mapping[str, Any]) -> bool:
    if body.get("use_beam_search"):
        return False
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if "messages" in body:
        return True
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and len(prompt) >= PROMPT_TOKENS_MIN
        and all(isinstance(token, int) for token in prompt)
    )
