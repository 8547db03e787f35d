"""Requests' kv_transfer_params on stock vLLM servers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash

from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_engine.vllm.settings import PARAMS_KEY
from headrace_kv.layout import WorkerRef

PORT_MAX = 65_535
REMOTE_PREFILL = "do_remote_prefill"
REMOTE_DECODE = "do_remote_decode"


@dataclass(frozen=True, slots=True)
class ConsumerParams:
    """The engine fetches the prompt's KV cache from `pair_address`. An empty `incarnation` accepts any engine there."""

    transfer_id: str
    pair_address: str
    incarnation: str
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class ProducerParams:
    """Another engine fetches the prompt's KV cache. With an empty `transfer_id`, this engine makes one up."""

    transfer_id: str
    deadline: Deadline


def read_request(
    params: Mapping[str, Any] | None, timeout_s: float
) -> ConsumerParams | ProducerParams | None:
    """Parses a request's parameters. None when they ask for no transfer. Deadlines are at most `timeout_s` away.

    Raises InvalidRequest naming every field that is wrong.
    """
    if not params or PARAMS_KEY in params:
        return None
    consumes, produces = params.get(REMOTE_PREFILL) is True, params.get(REMOTE_DECODE) is True
    if not consumes and not produces:
        return None
    problems: dict[str, str] = {}
    if consumes and produces:
        problems[REMOTE_PREFILL] = f"must not be true together with {REMOTE_DECODE}"
    transfer_id = params.get("transfer_id") or ""
    if not isinstance(transfer_id, str) or len(transfer_id) > TRANSFER_ID_CHARACTERS_MAX:
        problems["transfer_id"] = f"must be text of at most {TRANSFER_ID_CHARACTERS_MAX} characters"
    elif consumes and not transfer_id:
        problems["transfer_id"] = "must not be empty"
    if params.get("first_token", "decode") != "decode":
        problems["first_token"] = "must be decode: the other ways need Headrace's services"
    deadline = _read_deadline(params, timeout_s, problems)
    pair_address = _read_pair_address(params, problems) if consumes else ""
    if problems:
        raise InvalidRequest(problems)
    if not consumes:
        return ProducerParams(transfer_id, deadline)
    return ConsumerParams(
        transfer_id, pair_address, str(params.get("remote_incarnation") or ""), deadline
    )


def _read_deadline(
    params: Mapping[str, Any], timeout_s: float, problems: dict[str, str]
) -> Deadline:
    """The earliest of `timeout_s` and both parameters. Only `remaining_s` is independent of the hosts' wall clocks."""
    left_s = timeout_s
    for name, wanted, now_s in (
        ("remaining_s", "seconds from now", 0.0),
        ("deadline_unix_s", "seconds since the Unix epoch", time.time()),
    ):
        value = params.get(name)
        if value is None:
            continue
        if isinstance(value, int | float) and math.isfinite(value):
            left_s = min(left_s, value - now_s)
        else:
            problems[name] = f"must be {wanted}"
    return Deadline.after(left_s)


_PORT: Final = re.compile(r"[0-9]{1,5}")


def _read_pair_address(params: Mapping[str, Any], problems: dict[str, str]) -> str:
    host, port = params.get("remote_host"), str(params.get("remote_port"))
    if not isinstance(host, str) or not host:
        problems["remote_host"] = "must be the host of the prefill engine's pair address"
    if not _PORT.fullmatch(port) or not 0 < int(port) <= PORT_MAX:
        problems["remote_port"] = "must be the port of the prefill engine's pair address"
    return f"{host}:{port}"


def clear_request(params: MutableMapping[str, Any] | None) -> None:
    """Removes what `read_request` reads: from now on, vLLM computes the request without a transfer."""
    if params is not None:
        params.pop(REMOTE_PREFILL, None)
        params.pop(REMOTE_DECODE, None)


def held_params(transfer_id: str, ref: WorkerRef, endpoint: str) -> dict[str, Any]:
    """Parameters in the response to a prefill request that holds its prompt. A proxy passes them to decode."""
    host, _, port = endpoint.rpartition(":")
    return {
        REMOTE_PREFILL: True,
        REMOTE_DECODE: False,
        "transfer_id": transfer_id,
        "remote_engine_id": ref.worker_id,
        "remote_incarnation": ref.incarnation,
        "remote_host": host,
        "remote_port": int(port),
    }


def prompt_digest(token_ids: Sequence[int], extras: Sequence[str]) -> int:
    """64 bits over all that determines a prompt's KV cache: the tokens, and `extras` such as an adapter's name."""
    digest = xxhash.xxh3_64(np.asarray(token_ids, dtype=np.int64).tobytes())
    for extra in extras:
        digest.update(b"\0" + extra.encode())
    return digest.intdigest()
