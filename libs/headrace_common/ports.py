"""The default ports, each with one use. docs/deployment.md lists them."""

from __future__ import annotations

from typing import Final

ROUTER: Final = 7050
"""`listen` of routers: gRPC for clients."""
REGISTRY: Final = 7051
"""`internal_listen` of the registry."""
PREFILL: Final = 7052
"""`internal_listen` of prefill workers, where a port is fixed."""
DECODE: Final = 7053
"""`internal_listen` of decode workers, where a port is fixed."""
ROUTER_INTERNAL: Final = 7054
"""`internal_listen` of routers, where a port is fixed."""
PAIRS: Final = 7730
"""`listen` of prefill servers of stock vLLM."""
PAIR_PROXY: Final = 8000
"""`headrace pair`: OpenAI HTTP for clients of two servers of stock vLLM."""
ROUTER_HTTP: Final = 7056
"""`http_listen` of routers: OpenAI HTTP for clients."""
ROUTER_STATUS: Final = 7057
"""`status_listen` of routers: the status page, for operators."""
PLANNER: Final = 7058
"""`internal_listen` of planners."""
HEALTH: Final = 7059
"""`health_listen` of the services in our container images."""
