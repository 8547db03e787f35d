"""Role tokens: JSON Web Tokens (RFC 7519) signed with Ed25519 (RFC 8037), and the key of deployments on loopback.

Services and commands of one user on one host sign their own tokens with that key. Other users cannot read it, so they
cannot call internal RPCs. It needs no setting.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from headrace_common.access.roles import Caller, Role, caller_with
from headrace_common.errors import ConfigError, Unauthenticated
from headrace_common.identity import is_worker_id

_ALGORITHM: Final = "EdDSA"
_ISSUER: Final = "headrace"
_TOKEN_CHARACTERS_MAX: Final = 2_048
_CLOCK_TOLERANCE_S: Final = 60.0
_CACHE_MAX: Final = 4_096
_PEM_END: Final = b"-----END PUBLIC KEY-----"
_KEYS_MAX: Final = 8
_REMEDY: Final = "create one with `headrace token create`"


def new_private_key() -> bytes:
    """A new private key in PEM."""
    return Ed25519PrivateKey.generate().private_bytes(
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


def create_token(private_key: bytes, role: Role, name: str, lifetime_s: float) -> str:
    """A token for a role. An empty `name` binds it to no worker. Raises ConfigError for an invalid key or name."""
    if name and not is_worker_id(name):
        raise ConfigError(
            f"the name {name!r} is no worker id: use 1 to 63 characters of a-z, 0-9, '.', '_', '-'"
        )
    claims = {"iss": _ISSUER, "role": role.value, "sub": name, "exp": time.time() + lifetime_s}
    return jwt.encode(claims, _load_private(private_key), algorithm=_ALGORITHM)


class TokenVerifier:
    """Verifies tokens with the public keys of a deployment. Keeps the callers of valid tokens."""

    def __init__(self, public_keys: Sequence[Ed25519PublicKey]) -> None:
        self._public_keys = tuple(public_keys)
        self._verified: OrderedDict[str, tuple[Caller, float]] = OrderedDict()

    @classmethod
    def from_pem(cls, text: bytes) -> TokenVerifier:
        """A verifier with all public keys of a PEM file. Raises ConfigError when there is none, or another kind."""
        parts = [part + _PEM_END for part in text.split(_PEM_END)[:-1]]
        if not 0 < len(parts) <= _KEYS_MAX:
            raise ConfigError(f"give 1 to {_KEYS_MAX} public keys in PEM, one after the other")
        return cls([_load_public(part.strip()) for part in parts])

    def verify(self, token: str) -> Caller:
        """The caller that a token stands for. Raises Unauthenticated with the remedy."""
        now_s = time.time()
        known = self._verified.get(token)
        if known is not None and now_s < known[1]:
            return known[0]
        claims = self._claims_of(token)
        caller = _caller_of(claims)
        self._verified[token] = caller, float(claims["exp"]) + _CLOCK_TOLERANCE_S
        if len(self._verified) > _CACHE_MAX:
            self._verified.popitem(last=False)
        return caller

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
