"""Sessions with parts: the sessions of several transports to the same memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_PART = ";"
_NAME = "="


def join_sessions(sessions: Mapping[str, str]) -> str:
    """Joins one session per transport name, in order of preference. A session with parts keeps its own names."""
    return _PART.join(
        session if _NAME in session else f"{name}{_NAME}{session}"
        for name, session in sessions.items()
    )


def session_of(name: str, session: str) -> str | None:
    """The part of transport `name`: the session itself when it has no parts, None when no part has the name."""
    if _NAME not in session:
        return session
    for part in session.split(_PART):
        found, _, value = part.partition(_NAME)
        if found == name:
            return value
    return None


def host_of(session: str) -> str:
    """The host in a session, for messages: its ports and secrets stay out of them."""
    return find_host(session) or "the peer"


def find_host(session: str) -> str:
    """The host in a session; empty for one without."""
    part = session.rsplit(_PART, maxsplit=1)[-1].rpartition(_NAME)[2]
    return part.partition("/")[0].rpartition(":")[0]
