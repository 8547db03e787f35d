"""`headrace certs`: what it writes, and that it replaces nothing."""

from __future__ import annotations

import datetime as dt
import ipaddress
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_common.access.authorizer import caller_of_certificate, valid_until
from headrace_common.access.roles import Role, caller_with


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["certs", *map(str, words)])


def leaf(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def caller_of(folder: Path, domain: str = "") -> tuple[frozenset[Role], str]:
    names = [
        text.encode()
        for text in names_of(leaf(folder)).get_values_for_type(x509.UniformResourceIdentifier)
    ]
    caller = caller_of_certificate({"peer_uri": names}, domain)
    return caller.roles, caller.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = run(
        "init", tmp_path / "c", "--host", "10.0.0.7", "--host", "decode.example", "--days", 9
    )
    assert made.exit_code == 0, made.output
    return tmp_path / "c"


def test_one_command_makes_a_folder_for_each_role(folder: Path) -> None:
    roles = {path.name for path in folder.iterdir() if path.is_dir()}
    assert roles == set(Role)
    authority = (folder / "authority.pem").read_bytes()
    for role in roles:
        assert caller_of(folder / role, "headrace") == (caller_with(Role(role)).roles, "")
        assert (folder / role / "authority.pem").read_bytes() == authority
        certificate = leaf(folder / role)
        names = names_of(certificate)
        assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.7")]
        assert names.get_values_for_type(x509.DNSName) == ["decode.example"]
        pem = (folder / role / "certificate.pem").read_bytes()
        end = valid_until(pem, b"", authority)
        assert end is not None
        assert dt.timedelta(days=8) < end - dt.datetime.now(dt.UTC) <= dt.timedelta(days=9)


def test_keys_are_private_and_certificates_are_not(folder: Path) -> None:
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode)
        for path in (folder / "authority_key.pem", *(folder / "prefill").iterdir())
    }
    assert modes["authority_key.pem"] == modes["key.pem"] == 0o600
    assert not (folder / "prefill" / "authority_key.pem").exists()


def test_nothing_is_replaced(folder: Path) -> None:
    before = (folder / "authority_key.pem").read_bytes()
    again = run("init", folder, "--host", "h")
    assert again.exit_code == 2
    assert "exists" in again.output
    assert (folder / "authority_key.pem").read_bytes() == before
