"""The checks of the operator's credentials."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace_cli.checks import Finding, Verdict, check_credentials
from headrace_common.access.roles import Role
from headrace_common.access.tokens import HeldToken, create_token, new_private_key

_DAY_S = 86_400.0


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CREDENTIALS_DIR", str(tmp_path / "credentials"))
    for name in ("TOKEN_FILE", "TLS_CERTIFICATE_FILE", "TLS_KEY_FILE", "TLS_AUTHORITY_FILE"):
        monkeypatch.delenv(f"HEADRACE_{name}", raising=False)


def write_token(path: Path, role: Role, days: float, mode: int = 0o600) -> None:
    path.write_text(HeldToken.create(new_private_key(), role, "", days * _DAY_S).text)
    path.chmod(mode)


def found(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[Finding]:
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(path))
    return check_credentials()


def test_the_local_key_must_be_private(tmp_path: Path) -> None:
    (finding,) = check_credentials()
    assert (finding.verdict, finding.subject) == (Verdict.OK, "local key")
    (tmp_path / "credentials" / "local_key.pem").chmod(0o644)
    (finding,) = check_credentials()
    assert finding.verdict is Verdict.ERROR
    assert "chmod go-rwx" in finding.detail


@pytest.mark.parametrize(
    ("role", "days", "mode", "verdict", "text"),
    [
        (Role.OPERATOR, 90, 0o600, Verdict.OK, "expires in 90.0 days"),
        (Role.OPERATOR, 3, 0o600, Verdict.WARNING, "expires in 3.0 days"),
        (Role.OPERATOR, -1, 0o600, Verdict.ERROR, "has expired"),
        (Role.ROUTER, 90, 0o600, Verdict.ERROR, "has the role router"),
        (Role.OPERATOR, 90, 0o640, Verdict.ERROR, "other users can read"),
    ],
)
def test_a_token_must_be_private_valid_and_an_operators(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    role: Role,
    days: float,
    mode: int,
    verdict: Verdict,
    text: str,
) -> None:
    path = tmp_path / "operator.token"
    write_token(path, role, days, mode)
    findings = found(monkeypatch, path)
    (finding,) = [one for one in findings if text in one.detail]
    assert finding.verdict is verdict
    assert bool(finding.remedy) is (verdict is not Verdict.OK)
    worst = [one for one in findings if one.verdict is not Verdict.OK]
    assert worst == ([] if verdict is Verdict.OK else [finding])


def test_certificates_that_expire_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.x509.oid import NameOID

    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    start = datetime.fromtimestamp(time.time(), UTC) - timedelta(days=30)

    def certificate(days: float) -> bytes:
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + timedelta(days=30 + days))
            .sign(key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    paths = {name: tmp_path / f"{name}.pem" for name in ("certificate", "key", "authority")}
    paths["certificate"].write_bytes(certificate(5))
    # Of several authorities the first to expire counts.
    paths["authority"].write_bytes(certificate(300) + certificate(-1))
    paths["key"].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    paths["key"].chmod(0o600)
    for kind, path in paths.items():
        monkeypatch.setenv(f"HEADRACE_TLS_{kind.upper()}_FILE", str(path))
    verdicts = {one.subject: one.verdict for one in check_credentials()}
    assert verdicts == {
        "TLS key": Verdict.OK,
        "certificate": Verdict.WARNING,
        "authority": Verdict.ERROR,
    }


def test_a_token_without_a_key_of_its_holder_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "operator.token"
    write_token(path, Role.OPERATOR, 90)
    path.write_text(create_token(new_private_key(), Role.OPERATOR, "", 90 * _DAY_S))
    (finding,) = [one for one in found(monkeypatch, path) if one.verdict is not Verdict.OK]
    assert (finding.verdict, "earlier release" in finding.detail) == (Verdict.WARNING, True)
