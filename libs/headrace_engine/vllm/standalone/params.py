"""kv_transfer_params of requests to vLLM servers without our services, in the words that vLLM's own connectors use."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest
from headrace_common.limits import TRANSFER_ID_CHARACTERS_MAX
from headrace_engine.vllm.settings import PARAMS_KEY
from headrace_kv.layout.layout import WorkerRef

PORT_MAX = 65_535
FETCHES = "do_remote_prefill"
SENDS = "do_remote_decode"


@dataclass(frozen=True, slots=True)
class ConsumerParams:
    """The prompt's KV cache comes from the engine whose pair address is `source`; `incarnation` is empty for any."""

    transfer_id: str
    source: str
    incarnation: str
    deadline: Deadline


@dataclass(frozen=True, slots=True)
class ProducerParams:
    """The prompt's KV cache goes to whoever fetches it; `transfer_id` is empty when the engine is to mint it."""

    transfer_id: str
    deadline: Deadline


def read_request(
    params: Mapping[str, Any] | None, timeout_s: float
) -> ConsumerParams | ProducerParams | None:
    """What a request asks for, and None when that is nothing. `timeout_s` is the most that its deadline may be away.

    Raises InvalidRequest naming every field that is wrong.
    """
    if not params or PARAMS_KEY in params:
        return None
    fetches, sends = params.get(FETCHES) is True, params.get(SENDS) is True
    if not fetches and not sends:
        return None
    problems: dict[str, str] = {}
    if fetches and sends:
        problems[FETCHES] = f"must not be true together with {SENDS}"
    transfer_id = params.get("transfer_id") or ""
    if not isinstance(transfer_id, str) or len(transfer_id) > TRANSFER_ID_CHARACTERS_MAX:
        problems["transfer_id"] = f"must be text of at most {TRANSFER_ID_CHARACTERS_MAX} characters"
    elif fetches and not transfer_id:
        problems["transfer_id"] = "must not be empty"
    if params.get("first_token", "decode") != "decode":
        problems["first_token"] = "must be decode: only Headrace's services know the other ways"
    deadline = _deadline(params.get("deadline_unix_s"), timeout_s, problems)
    source = _source(params, problems) if fetches else ""
    if problems:
        raise InvalidRequest(problems)
    if not fetches:
        return ProducerParams(transfer_id, deadline)
    return ConsumerParams(
        transfer_id, source, str(params.get("remote_incarnation") or ""), deadline
    )


def _deadline(said: object, timeout_s: float, problems: dict[str, str]) -> Deadline:
    latest_s = time.time() + timeout_s
    if said is None:
        return Deadline(latest_s)
    if not isinstance(said, int | float) or not math.isfinite(said):
        problems["deadline_unix_s"] = "must be seconds since the Unix epoch"
        return Deadline(latest_s)
    return Deadline(min(float(said), latest_s))


def _source(params: Mapping[str, Any], problems: dict[str, str]) -> str:
    host, port = params.get("remote_host"), str(params.get("remote_port"))
    if not isinstance(host, str) or not host:
        problems["remote_host"] = "must be the host of the prefill engine's pair address"
    if not port.isdecimal() or not 0 < int(port) <= PORT_MAX:
        problems["remote_port"] = "must be the port of the prefill engine's pair address"
    return f"{host}:{port}"


def clear_request(params: MutableMapping[str, Any] | None) -> None:
    """Read once: from now on, the request is one that vLLM computes by itself."""
    if params is not None:
        params.pop(FETCHES, None)
        params.pop(SENDS, None)


def held_params(transfer_id: str, ref: WorkerRef, endpoint: str) -> dict[str, Any]:
    """What a prefill's answer carries, for the request to decode."""
    host, _, port = endpoint.rpartition(":")
    return {
        FETCHES: True,
        SENDS: False,
        "transfer_id": transfer_id,
        "remote_engine_id": ref.worker_id,
        "remote_incarnation": ref.incarnation,
        "remote_host": host,
        "remote_port": int(port),
    }


def prompt_digest(token_ids: Sequence[int], extras: Sequence[str]) -> int:
    """64 bits over tokens and whatever else decides their KV cache, such as an adapter's name."""
    digest = xxhash.xxh3_64(np.asarray(token_ids, dtype=np.int64).tobytes())
    for extra in extras:
        digest.update(b"\0" + extra.encode())
    return digest.intdigest()
