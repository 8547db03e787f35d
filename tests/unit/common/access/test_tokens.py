"""Role tokens: what they prove, and what refuses them."""

from __future__ import annotations

import base64
import hmac
import json
import math
import time
from datetime import datetime, tzinfo
from types import SimpleNamespace
from typing import Self

import jwt
import pytest

from headrace_common.access import tokens
from headrace_common.access.roles import Caller, Role
from headrace_common.access.tokens import (
    PROOF_CLOCKS_S,
    PROOF_KEPT_S,
    PROOF_PERIOD_S,
    HeldToken,
    TokenVerifier,
    create_token,
    new_private_key,
    public_key_of,
)
from headrace_common.errors import ConfigError, Unauthenticated

KEY = new_private_key()
OTHER_KEY = new_private_key()


def verifier_of(*private_keys: bytes) -> TokenVerifier:
    return TokenVerifier.from_pem(b"\n".join(map(public_key_of, private_keys)))


def test_a_token_proves_its_role_and_name() -> None:
    verifier = verifier_of(OTHER_KEY, KEY)
    for _ in range(2):
        token = create_token(KEY, Role.DECODE, "decode-0", 60)
        assert verifier.verify(token) == Caller(frozenset({Role.DECODE}), "decode-0")
    both = Caller(frozenset({Role.WORKER, Role.PREFILL, Role.DECODE}), "worker-0")
    assert verifier.verify(create_token(KEY, Role.WORKER, "worker-0", 60)) == both
    with pytest.raises(ConfigError, match="worker id"):
        create_token(KEY, Role.DECODE, "no such name", 60)


@pytest.mark.parametrize(
    ("token", "problem"),
    [
        ("", "not valid"),
        ("a.b.c", "not valid"),
        ("x" * 5_000, "too long"),
        (create_token(OTHER_KEY, Role.ROUTER, "", 60), "does not know"),
        (create_token(KEY, Role.ROUTER, "", -120), "expired"),
        (create_token(KEY, Role.ROUTER, "", 60)[:-8] + "AAAAAAAA", "does not know"),
        (jwt.encode({"role": "router"}, "", algorithm="none"), "not valid"),
    ],
)
def test_an_invalid_token_is_refused(token: str, problem: str) -> None:
    with pytest.raises(Unauthenticated, match=problem):
        verifier_of(KEY).verify(token)


def test_a_token_signed_with_the_public_key_as_a_shared_secret_is_refused() -> None:
    def part(value: bytes) -> bytes:
        return base64.urlsafe_b64encode(value).rstrip(b"=")

    claims = {"iss": "headrace", "role": "router", "exp": time.time() + 60}
    signed = part(b'{"alg":"HS256","typ":"JWT"}') + b"." + part(json.dumps(claims).encode())
    signature = part(hmac.digest(public_key_of(KEY), signed, "sha256"))
    with pytest.raises(Unauthenticated, match="not valid"):
        verifier_of(KEY).verify((signed + b"." + signature).decode())


def test_an_expired_token_is_refused_although_it_was_accepted_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verifier = verifier_of(KEY)
    # It has expired, within the tolerance of 60 s for clocks that differ.
    token = create_token(KEY, Role.ROUTER, "", -30)
    verifier.verify(token)
    later_s = time.time() + 31

    class Later(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(later_s, tz)

    monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: later_s))
    monkeypatch.setattr("jwt.api_jwt.datetime", Later)
    with pytest.raises(Unauthenticated, match="expired"):
        verifier.verify(token)


HERE = ("registry", "localhost:7051")


def test_a_token_counts_with_a_proof_for_this_receiver_only() -> None:
    held = HeldToken.from_text(HeldToken.create(KEY, Role.DECODE, "decode-0").text)
    other = HeldToken.create(KEY, Role.DECODE, "decode-0")
    verifier = verifier_of(KEY)
    endless = {"exp": time.time() + 60, "aud": "registry", "run": "", "number": math.inf}
    for audience in HERE:
        assert verifier.verify(held.token, held.proof(audience), HERE).name == "decode-0"
    for proof, problem in (
        ("", "proof is missing"),
        ("x" * 5_000, "too long"),
        (jwt.encode(endless, held._key or KEY, algorithm="EdDSA"), "proof is missing or not valid"),
        (other.proof("registry"), "proof is missing or not valid"),
        (held.token, "proof is missing or not valid"),
        (held.proof("10.0.0.7:7053"), "sent to '10.0.0.7:7053', but this is localhost:7051 or reg"),
    ):
        with pytest.raises(Unauthenticated, match=problem):
            verifier.verify(held.token, proof, HERE)


def test_gateways_and_earlier_releases_have_tokens_without_a_key() -> None:
    for held in (
        HeldToken.create(KEY, Role.GATEWAY),
        HeldToken(create_token(KEY, Role.ROUTER, "", 60), None),
    ):
        assert held.proof("registry") == ""
        assert verifier_of(KEY).verify(held.token).roles


def test_a_proof_is_replaced_and_an_older_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = 1_000.0
    clock = SimpleNamespace(time=time.time, monotonic=lambda: at_s)
    monkeypatch.setattr(tokens, "time", clock)
    monkeypatch.setattr(tokens, "_ORDER", tokens._ProofOrder())
    held, verifier = HeldToken.create(KEY, Role.ROUTER), verifier_of(KEY)
    first = held.proof("registry")
    verifier.verify(held.token, first, HERE)
    at_s += PROOF_PERIOD_S
    second = held.proof("registry")
    assert first != second
    verifier.verify(held.token, second, HERE)
    # Calls overtake each other.
    verifier.verify(held.token, first, HERE)
    at_s += PROOF_KEPT_S + 1
    verifier.verify(held.token, second, HERE)
    verifier.verify(held.token, first, HERE, again=True)
    with pytest.raises(Unauthenticated, match="older"):
        verifier.verify(held.token, first, HERE)
    # So is one of a process that signs new ones all the time.
    kept = held.proof("registry")
    for _ in range(3):
        verifier.verify(held.token, held.proof("registry"), HERE)
        at_s += PROOF_PERIOD_S
    verifier.verify(held.token, kept, HERE)
    verifier.verify(held.token, held.proof("registry"), HERE)
    # Other keys for tokens change nothing.
    with pytest.raises(Unauthenticated, match="older"):
        verifier_of(KEY, OTHER_KEY).verify(held.token, kept, HERE)


def test_a_proof_from_before_the_start_of_its_receiver_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed_s = 0.0
    start_s, start_unix_s = time.monotonic(), time.time()
    clock = SimpleNamespace(
        time=lambda: start_unix_s + passed_s, monotonic=lambda: start_s + passed_s
    )
    monkeypatch.setattr(tokens, "time", clock)
    held, verifier = HeldToken.create(KEY, Role.ROUTER, lifetime_s=1e6), verifier_of(KEY)

    def restart() -> None:
        monkeypatch.setattr(tokens, "_ORDER", tokens._ProofOrder())

    restart()
    old = held.proof("registry")
    passed_s = PROOF_CLOCKS_S - 1
    verifier.verify(held.token, old, HERE)
    restart()
    # The clock of its host may be so far behind.
    verifier.verify(held.token, old, HERE)
    passed_s = PROOF_CLOCKS_S + 1
    # It is of the time since the start.
    verifier.verify(held.token, old, HERE)
    restart()
    with pytest.raises(Unauthenticated, match="signed 7201 s ago"):
        verifier.verify(held.token, old, HERE)
    verifier.verify(held.token, held.proof("registry"), HERE)


@pytest.mark.parametrize("text", [b"", b"nonsense", KEY])
def test_a_file_without_public_keys_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError):
        TokenVerifier.from_pem(text)
