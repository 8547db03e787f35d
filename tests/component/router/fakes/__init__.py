"""A router between scripted workers, all on real gRPC."""

from __future__ import annotations

from tests.component.router.fakes.decode import (
    CONTEXT_TOKENS,
    FakeDecode,
    Script,
    finished,
    full,
    hang,
    reject,
    reply,
    reserve_and_die,
    reserved,
    tokens,
)
from tests.component.router.fakes.handoff import Handoff
from tests.component.router.fakes.prefill import (
    Behaviour,
    FakePrefill,
    die,
    fail,
    hand_over,
    refuse,
    send_first_token,
    stall,
    start_and_end,
)
from tests.component.router.fakes.rig import (
    PREFIX_KEY,
    FixedPolicy,
    Rig,
    text_of,
    with_settings,
)
from tests.sim_layout import LAYOUT

__all__ = [
    "CONTEXT_TOKENS",
    "LAYOUT",
    "PREFIX_KEY",
    "Behaviour",
    "FakeDecode",
    "FakePrefill",
    "FixedPolicy",
    "Handoff",
    "Rig",
    "Script",
    "die",
    "fail",
    "finished",
    "full",
    "hand_over",
    "hang",
    "refuse",
    "reject",
    "reply",
    "reserve_and_die",
    "reserved",
    "send_first_token",
    "stall",
    "start_and_end",
    "text_of",
    "tokens",
    "with_settings",
]
