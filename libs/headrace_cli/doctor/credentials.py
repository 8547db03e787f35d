"""Checks of the operator's credentials: the files exist, only this user reads the secrets, and they expire later."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headrace_cli.doctor.finding import Finding, Verdict
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.local_key import load_local_key, local_folder
from headrace_common.errors import ConfigError

_DAY_S: Final = 86_400.0
_NOTICE_DAYS: Final = 14.0
_RENEW_TOKEN: Final = "write a new one with `headrace token create`"
_RENEW_CERTIFICATE: Final = "replace the certificate and its key: processes read them again"


def check_credentials() -> list[Finding]:
    """The credentials that this environment names, or the local key."""
    findings: list[Finding] = []
    try:
        files = TlsFiles.from_environment()
    except ConfigError as error:
        return [Finding(Verdict.ERROR, "certificates", error.detail, "set all three, or none")]
    token_file = os.environ.get("HEADRACE_TOKEN_FILE", "")
    if files.tls_certificate_file:
        findings += _check_certificate(files)
    if token_file:
        findings += _check_token(Path(token_file))
    if not findings:
        findings.append(_check_local_key())
    return findings


def _check_local_key() -> Finding:
    try:
        load_local_key()
    except ConfigError as error:
        return Finding(
            Verdict.ERROR, "local key", error.detail, "make the file private, or remove it"
        )
    return Finding(Verdict.OK, "local key", f"only this user reads the key in {local_folder()}")


def _check_token(path: Path) -> Iterator[Finding]:
    import jwt

    yield _check_private("token", path)
    try:
        text = path.read_text(encoding="ascii").strip()
        # The signature is checked by the services, which have the public key.
        claims = jwt.decode(text, options={"verify_signature": False})
        expires_s, role = float(claims["exp"]), str(claims.get("role"))
    except (OSError, ValueError, KeyError, jwt.InvalidTokenError) as error:
        yield Finding(Verdict.ERROR, "token", f"{path} holds no token: {error}", _RENEW_TOKEN)
        return
    if role != "operator":
        yield Finding(
            Verdict.ERROR,
            "token",
            f"{path} has the role {role}, and commands need operator",
            _RENEW_TOKEN,
        )
    yield _check_expiry("token", path, expires_s, _RENEW_TOKEN)


def _check_certificate(files: TlsFiles) -> Iterator[Finding]:
    from cryptography import x509

    yield _check_private("TLS key", Path(files.tls_key_file))
    for subject, name in (
        ("certificate", files.tls_certificate_file),
        ("authority", files.tls_authority_file),
    ):
        path = Path(name)
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            detail = f"{path} holds no certificate: {error}"
            yield Finding(Verdict.ERROR, subject, detail, "name a PEM file that this user reads")
            continue
        end_s = min(one.not_valid_after_utc.timestamp() for one in certificates)
        yield _check_expiry(subject, path, end_s, _RENEW_CERTIFICATE)


def _check_expiry(subject: str, path: Path, end_s: float, remedy: str) -> Finding:
    days = (end_s - time.time()) / _DAY_S
    if days <= 0.0:
        return Finding(Verdict.ERROR, subject, f"{path} has expired", remedy)
    detail = f"{path} expires in {days:.1f} days"
    if days < _NOTICE_DAYS:
        return Finding(Verdict.WARNING, subject, detail, remedy)
    return Finding(Verdict.OK, subject, detail)


def _check_private(subject: str, path: Path) -> Finding:
    try:
        status = path.stat()
    except OSError as error:
        detail = f"cannot read {path}: {error.strerror}"
        return Finding(Verdict.ERROR, subject, detail, "name a file that this user reads")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        detail = f"other users can read or replace {path}"
        return Finding(
            Verdict.ERROR, subject, detail, f"run `chown $USER {path}; chmod 600 {path}`"
        )
    return Finding(Verdict.OK, subject, f"only this user reads {path}")
