"""Which members of the registry compute prompts for others, and which generate. A worker of both roles does both."""

from __future__ import annotations

from typing import Final

from headrace.registry.v1 import registry_pb2

_BOTH: Final = registry_pb2.Member.ROLE_BOTH
COMPUTE_PROMPTS: Final = (registry_pb2.Member.ROLE_PREFILL, _BOTH)
"""The roles of workers that compute prompts and send their KV."""
GENERATE: Final = (registry_pb2.Member.ROLE_DECODE, _BOTH)
"""The roles of workers that receive KV and generate."""
WORKERS: Final = (registry_pb2.Member.ROLE_PREFILL, *GENERATE)
