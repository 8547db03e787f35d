"""The policy in force until an operator sets one."""

from __future__ import annotations

from typing import Final

from headrace.registry.v1 import registry_pb2

DEFAULT_RETRY_BUDGET: Final = 2


def default_policy() -> registry_pb2.Policy:
    """A new message; the caller may change it."""
    return registry_pb2.Policy(retry_budget=DEFAULT_RETRY_BUDGET)
