"""Settings of earlier versions that are gone, with what to do instead."""

from __future__ import annotations

from typing import Final

_PROXY: Final = "it is gone: remove it; a proxy in front bounds connections and rates by host"

_LOOK_ASIDE: Final = "it is gone with look-aside: remove it; routers stream all answers"
_NO_LISTENER: Final = (
    "it is gone from workers: remove it; http_listen serves clients of a gateway on decode workers"
)

_CONSTANT: Final = "it is gone: remove it"
_VALUE: Final = "it is gone: remove it; the value is"
_OVERLAP: Final = "it is gone: remove it; a request starts when all of its KV has arrived"
_VLLM: Final = "it is gone: give it to vLLM in engine_args, as"
_FETCH: Final = "it is gone: set kv_fetch_timeout_s, which bounds both waits"
_ROUTERS_TLS: Final = (
    "it is gone from decode workers: http_listen has the tls_ files; routers may have others"
)

REMOVED: Final = {
    "prefix_wait_s": f"{_CONSTANT}; prompts wait 0.05 s for a cached prefix",
    "retry_budget": f"{_CONSTANT}; `headrace policy set retry_budget=N` bounds the retries of all routers",
    "migration_wait_s": "it is gone: set worker_wait_s, which bounds this wait too",
    "max_queued_tasks": f"{_CONSTANT}; max_concurrent_requests bounds the prefill queue too",
    "profile": f"{_CONSTANT}; routers predict from the prefills that they measure",
    "max_trace_bytes": f"{_CONSTANT}; a trace has 4 MiB of spans at most",
    "max_stored_trace_bytes": f"{_CONSTANT}; trace_count bounds the traces, with 64 MiB of spans at most",
    "max_bytes_per_token": f"{_CONSTANT}; text has 16 bytes for each token of the context at most",
    "max_request_bytes": f"{_CONSTANT}; the bound follows from the longest context of the models",
    "max_calls_per_caller": f"{_CONSTANT}; the bound is 2,048, or twice max_concurrent_requests",
    "connection_idle_s": f"{_CONSTANT}; connections without a request are closed after 300 s",
    "look_aside": _LOOK_ASIDE,
    "ticket_ttl_s": _LOOK_ASIDE,
    "max_unused_tickets": _LOOK_ASIDE,
    "listen": _NO_LISTENER,
    "advertise": _NO_LISTENER,
    "connection_age_s": f"{_CONSTANT}; a connection of a client takes no new RPC after an hour",
    "max_connections": f"{_CONSTANT}; the bound is 4,096, or four times max_concurrent_requests",
    "max_streams_per_connection": f"{_CONSTANT}; a connection has 1,024 RPCs in flight at most",
    "max_connections_per_host": _PROXY,
    "max_new_connections_per_s": _PROXY,
    "host_block_s": "it is gone: remove it; no host is blocked",
    "max_rejected_per_s": _PROXY,
    "max_unary_per_s": _PROXY,
    "credential_check_s": f"{_VALUE} 60 s",
    "internal_connection_age_s": f"{_VALUE} an hour",
    "seed": f"{_VLLM} --seed",
    "enforce_eager": f"{_VLLM} --enforce-eager",
    "transport": "it is gone: remove it; Mooncake moves KV, over RDMA where the host has it, else over TCP",
    "local_broadcast": f"{_VALUE} true, where the ranks are on processors",
    "kv_offload_min_uses": f"{_VALUE} 1",
    "kv_send_from_host": f"{_VALUE} true",
    "registration_timeout_s": f"{_VALUE} 30 s",
    "place_zone": "it is gone: set place to zone=NAME",
    "place_rack": "it is gone: set place to rack=NAME",
    "place_host": "it is gone: set place to host=NAME",
    "digest_mismatch_limit": f"{_VALUE} 3",
    "overlap_layers": _OVERLAP,
    "overlap_wait_s": _OVERLAP,
    "task_timeout_s": f"{_VALUE} 600 s",
    "link_gbit_per_s": "it is gone: remove it; traces compare a transfer with the best one to the same host",
    "recording_file": "it is gone: remove it; `headrace simulate --planner` tries other rules",
    "decision_count": f"{_VALUE} 1,000",
    "kubernetes_call_timeout_s": f"{_VALUE} 10 s",
    "kv_pool_timeout_s": _FETCH,
    "prefix_fetch_timeout_s": _FETCH,
    "kv_disk_folder": "it is gone: name the folder in the variable TMPDIR; otherwise it is /var/tmp",
    "constraint_cpu_s": f"{_VALUE} 0.5 s",
    "listen_tls_certificate_file": _ROUTERS_TLS,
    "listen_tls_key_file": _ROUTERS_TLS,
    "listen_tls_authority_file": _ROUTERS_TLS,
    "trace_layers": "it is gone: remove it; headrace trace shows the times of every layer of a link",
}
"""By the name of the setting. The error about the unknown setting ends with this text."""
