"""Role tokens: JSON Web Tokens (RFC 7519) signed with Ed25519 (RFC 8037), and the key of deployments on loopback.

A token names the public key of its holder (RFC 7800). With each call, the holder sends a proof that it has signed for
one receiver. So what a receiver gets is worth nothing at another one. A token without such a key is of a gateway, which
cannot sign, or of an earlier release.

Services and commands of one user on one host sign their own tokens with that key. Other users cannot read it, so they
cannot call internal RPCs. It needs no setting.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from headrace_common.access.roles import Caller, Role, caller_with
from headrace_common.errors import ConfigError, Unauthenticated
from headrace_common.identity import is_worker_id
from headrace_common.tasks import Recent

_ALGORITHM: Final = "EdDSA"
_ISSUER: Final = "headrace"
_TOKEN_CHARACTERS_MAX: Final = 2_048
_CLOCK_TOLERANCE_S: Final = 60.0
_CACHE_MAX: Final = 4_096
_PEM_END: Final = b"-----END PUBLIC KEY-----"
_KEYS_MAX: Final = 8
_REMEDY: Final = "create one with `headrace token create`"
_KEY_BEGIN: Final = "-----BEGIN"
PROOF_LIFETIME_S: Final = 86_400.0
"""Seconds that a proof is valid for, unless the receiver gets a newer one. Clocks of hosts may be hours apart."""
PROOF_PERIOD_S: Final = 30.0
"""Seconds after which a process signs a new proof for a receiver."""
PROOF_CLOCKS_S: Final = 7_200.0
"""How far clocks may be apart: a receiver refuses a proof that was signed so long before its process started."""
PROOF_KEPT_S: Final = 60.0
"""Seconds that a proof is valid for after the receiver got a newer one of the same process: calls overtake others."""


def new_private_key() -> bytes:
    """A new private key in PEM."""
    return _pem_of(Ed25519PrivateKey.generate())


def _pem_of(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def public_key_of(private_key: bytes) -> bytes:
    """The public key in PEM. Raises ConfigError when `private_key` is no Ed25519 key in PEM."""
    return (
        _load_private(private_key)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def create_token(
    private_key: bytes,
    role: Role,
    name: str,
    lifetime_s: float,
    holder: Ed25519PrivateKey | None = None,
) -> str:
    """A token for a role. An empty `name` binds it to no worker. Only `holder` can use it; None: all that read it.

    Raises ConfigError for an invalid key or name.
    """
    if name and not is_worker_id(name):
        raise ConfigError(
            f"the name {name!r} is no worker id: use 1 to 63 characters of a-z, 0-9, '.', '_', '-'"
        )
    expires_s = time.time() + lifetime_s
    claims: dict[str, Any] = {"iss": _ISSUER, "role": role.value, "sub": name, "exp": expires_s}
    if holder is not None:
        public_key = jwt.algorithms.OKPAlgorithm.to_jwk(holder.public_key(), as_dict=True)
        claims["cnf"] = {"jwk": public_key}
    return jwt.encode(claims, _load_private(private_key), algorithm=_ALGORITHM)


class HeldToken:
    """A token, and the key with which its holder signs proofs. Without a key, every receiver can use the token."""

    def __init__(self, token: str, key: Ed25519PrivateKey | None) -> None:
        self.token = token
        self._key = key
        self._signed: Recent[tuple[str, str, int], str] = Recent(_CACHE_MAX)

    @classmethod
    def create(
        cls, private_key: bytes, role: Role, name: str = "", lifetime_s: float = PROOF_LIFETIME_S
    ) -> HeldToken:
        """As create_token, with a new key. Gateways cannot sign, so their tokens have none."""
        key = None if role is Role.GATEWAY else Ed25519PrivateKey.generate()
        return cls(create_token(private_key, role, name, lifetime_s, key), key)

    @classmethod
    def from_text(cls, text: str) -> HeldToken:
        """The inverse of `text`. Raises ConfigError for another kind of key."""
        token, begin, rest = text.partition(_KEY_BEGIN)
        return cls(token.strip(), _load_private((begin + rest).encode()) if begin else None)

    @property
    def text(self) -> str:
        """The content of a token_file: a line with the token, then the key in PEM."""
        return f"{self.token}\n" + ("" if self._key is None else _pem_of(self._key).decode())

    def proof(self, audience: str, run: str = "") -> str:
        """A proof for one receiver, "" without a key. Signed anew after a while; `run` names the sequence of proofs."""
        if self._key is None:
            return ""
        # Children of a process sign proofs of their own.
        run = run or f"{_RUN}-{os.getpid()}"
        number = int(time.monotonic() / PROOF_PERIOD_S)
        kept = self._signed.get((audience, run, number))
        if kept is None:
            expires_s = time.time() + PROOF_LIFETIME_S
            claims = {"aud": audience, "exp": expires_s, "run": run, "number": number}
            kept = jwt.encode(claims, self._key, algorithm=_ALGORITHM)
            self._signed[audience, run, number] = kept
        return kept


_RUN: Final = secrets.token_hex(8)


@dataclass(slots=True)
class _Verified:
    """A valid token, and the proofs of its holder that were checked."""

    caller: Caller
    until_s: float
    holder: Ed25519PublicKey | None
    _proofs: Recent[str, dict[str, Any]] = field(default_factory=lambda: Recent(_PROOFS_MAX))

    def proof_claims(self, proof: str) -> dict[str, Any]:
        """The claims of a proof. Raises Unauthenticated unless the holder of the token has signed it."""
        claims = self._proofs.get(proof)
        if claims is None or time.time() >= claims["exp"] + _CLOCK_TOLERANCE_S:
            claims = self._proofs[proof] = self._read(proof)
        return claims

    def _read(self, proof: str) -> dict[str, Any]:
        assert self.holder is not None, "a token with a key"
        try:
            if len(proof) > _TOKEN_CHARACTERS_MAX:
                raise jwt.InvalidTokenError("too long")
            claims: dict[str, Any] = jwt.decode(
                proof,
                self.holder,
                algorithms=[_ALGORITHM],
                leeway=_CLOCK_TOLERANCE_S,
                options={"require": ["exp", "aud", "run", "number"], "verify_aud": False},
            )
            claims["aud"], claims["number"] = str(claims["aud"]), int(claims["number"])
            claims["exp"] = float(claims["exp"])
        except (jwt.InvalidTokenError, TypeError, ValueError, OverflowError) as error:
            raise Unauthenticated(
                f"the token is of another process: its holder's proof is missing or not valid ({error}); name the "
                "token_file itself, which has the key"
            ) from error
        return {**claims, "key": self.holder.public_bytes_raw().hex()}


class _ProofOrder:
    """Refuses a proof after a newer one of the same run, and one from before this process."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._newest: Recent[str, tuple[int, float]] = Recent(_CACHE_MAX)

    def check(self, run: str, number: int, age_s: float) -> None:
        """`age_s` is that of the proof by the wall clock. Raises Unauthenticated."""
        now_s = time.monotonic()
        if age_s > now_s - self._start_s + PROOF_CLOCKS_S:
            raise Unauthenticated(
                f"the proof was signed {age_s:.0f} s ago by this host's clock, before this process started; sign a new "
                f"one, and set clocks that are more than {PROOF_CLOCKS_S:.0f} s apart"
            )
        newest, since_s = self._newest.get(run, (number - 1, now_s))
        if number > newest:
            self._newest[run] = number, now_s
        elif number < newest and (
            # By the clock of the process that signs, or by that of this one.
            (newest - number) * PROOF_PERIOD_S > PROOF_KEPT_S or now_s > since_s + PROOF_KEPT_S
        ):
            raise Unauthenticated(
                "the proof is older than the last one of its process; sign a new one"
            )


_ORDER: Final = _ProofOrder()
"""That of this process, whichever keys it verifies with."""


class TokenVerifier:
    """Verifies tokens with the public keys of a deployment. Keeps the callers of valid tokens."""

    def __init__(self, public_keys: Sequence[Ed25519PublicKey]) -> None:
        self._public_keys = tuple(public_keys)
        self._verified: Recent[str, _Verified] = Recent(_CACHE_MAX)

    @classmethod
    def from_pem(cls, text: bytes) -> TokenVerifier:
        """A verifier with all public keys of a PEM file. Raises ConfigError when there is none, or another kind."""
        parts = [part + _PEM_END for part in text.split(_PEM_END)[:-1]]
        if not 0 < len(parts) <= _KEYS_MAX:
            raise ConfigError(f"give 1 to {_KEYS_MAX} public keys in PEM, one after the other")
        return cls([_load_public(part.strip()) for part in parts])

    def verify(
        self, token: str, proof: str = "", audiences: Collection[str] = (), *, again: bool = False
    ) -> Caller:
        """The caller that a token stands for, at a receiver with the names `audiences`.

        `again`: for an open call, of which the proof was checked. Raises Unauthenticated with the remedy.
        """
        known = self._verified.get(token)
        if known is None or time.time() >= known.until_s:
            claims = self._claims_of(token)
            until_s = float(claims["exp"]) + _CLOCK_TOLERANCE_S
            known = self._verified[token] = _Verified(_caller_of(claims), until_s, _holder(claims))
        if known.holder is not None and not again:
            claims = known.proof_claims(proof)
            if claims["aud"] not in audiences:
                names = " or ".join(sorted(audiences)) or "a service that takes no proofs"
                raise Unauthenticated(
                    f"the caller's token was sent to {claims['aud']!r}, but this is {names}: call it by that address, "
                    "or set its internal_advertise",
                    metadata={"audience": claims["aud"][:_AUDIENCE_CHARACTERS_MAX]},
                )
            age_s = time.time() + PROOF_LIFETIME_S - claims["exp"]
            _ORDER.check(f"{claims['key']} {claims['run']}", claims["number"], age_s)
        return known.caller

    def _claims_of(self, token: str) -> dict[str, Any]:
        if len(token) > _TOKEN_CHARACTERS_MAX:
            raise Unauthenticated(f"the token is too long; {_REMEDY}")
        for key in self._public_keys:
            try:
                claims: dict[str, Any] = jwt.decode(
                    token,
                    key,
                    algorithms=[_ALGORITHM],
                    issuer=_ISSUER,
                    leeway=_CLOCK_TOLERANCE_S,
                    options={"require": ["exp", "role"], "verify_iat": False},
                )
            except jwt.InvalidSignatureError:
                continue
            except jwt.ExpiredSignatureError as error:
                raise Unauthenticated(f"the token has expired; {_REMEDY}") from error
            except jwt.InvalidTokenError as error:
                raise Unauthenticated(f"the token is not valid ({error}); {_REMEDY}") from error
            return claims
        raise Unauthenticated(
            f"the token was signed with a key that this deployment does not know; {_REMEDY}"
        )


_PROOFS_MAX: Final = 1_024
_AUDIENCE_CHARACTERS_MAX: Final = 300


def _holder(claims: dict[str, Any]) -> Ed25519PublicKey | None:
    """The key that a token names; None for one that every caller may use."""
    if "cnf" not in claims:
        return None
    try:
        key = jwt.algorithms.OKPAlgorithm.from_jwk(claims["cnf"]["jwk"])
    except (KeyError, TypeError, jwt.InvalidKeyError) as error:
        raise Unauthenticated(f"the token names no key of its holder; {_REMEDY}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise Unauthenticated(f"the token names no Ed25519 key of its holder; {_REMEDY}")
    return key


def _caller_of(claims: dict[str, Any]) -> Caller:
    try:
        role = Role(claims["role"])
    except ValueError as error:
        raise Unauthenticated(f"the token names an unknown role; {_REMEDY}") from error
    return caller_with(role, str(claims.get("sub", "")))


def _load_private(pem: bytes) -> Ed25519PrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"not a private key in PEM without a password: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError("not an Ed25519 key: create one with `headrace token keygen`")
    return key


def _load_public(pem: bytes) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"not a public key in PEM: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError("not an Ed25519 key: create one with `headrace token keygen`")
    return key


FOLDER_VARIABLE: Final = "HEADRACE_CREDENTIALS_DIR"
_KEY_FILE: Final = "local_key.pem"


def local_folder() -> Path:
    """The folder of the key: HEADRACE_CREDENTIALS_DIR, else headrace/credentials in the user's state folder."""
    given = os.environ.get(FOLDER_VARIABLE, "")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return root / "headrace" / "credentials"


def load_local_key() -> bytes:
    """The private key in PEM. Creates it if there is none.

    Raises ConfigError when the file cannot be created, or when other users can read or replace it.
    """
    folder = local_folder()
    path = folder / _KEY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        if not path.exists():
            _create(path)
        _check_private(path)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot use the local key {path}: {error.strerror}; set {FOLDER_VARIABLE} to a folder of this user, or "
            "configure TLS or tokens"
        ) from error


def _create(path: Path) -> None:
    """Creates the key file. If another process is first, its file stays."""
    draft = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(new_private_key())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _check_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} must belong to this user and be closed to all others: run `chmod go-rwx {path}`, or set "
            f"{FOLDER_VARIABLE} to another folder"
        )
