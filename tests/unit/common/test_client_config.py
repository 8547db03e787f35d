"""Settings of the client listener."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace_common.access.credentials import TlsFiles
from headrace_common.client_config import ClientFacingConfig
from headrace_router.config import RouterConfig

_TLS: dict[str, Any] = {
    "tls_certificate_file": "own.pem",
    "tls_key_file": "own.key",
    "tls_authority_file": "authority.pem",
}
_TOKENS: dict[str, Any] = {"token_keys_file": "keys.pem"}
_OPEN: dict[str, Any] = {"listen": "10.0.0.5:7050"}
_SERVED: dict[str, Any] = {
    "listen_tls_certificate_file": "web.pem",
    "listen_tls_key_file": "web.key",
}


def problem_of(**settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        ClientFacingConfig(**settings)
    (error,) = caught.value.errors()
    return error["msg"]


@pytest.mark.parametrize(
    "settings",
    [
        _OPEN,
        {"advertise": "router:7050"},
        {**_OPEN, **_TOKENS},
        {**_OPEN, **_TLS, "client_certificates": False},
        {**_OPEN, **_SERVED, "client_certificates": False},
    ],
)
def test_listen_beyond_loopback_needs_a_credential_of_clients(settings: dict[str, Any]) -> None:
    problem = problem_of(**settings)
    name = "listen" if "listen" in settings else "advertise"
    assert f"{name} is {settings[name]}, which other hosts may reach" in problem
    assert "set api_keys_file, or TLS with client_certificates, or set anonymous_clients" in problem
    RouterConfig.model_validate({"model": "sim", "api_keys_file": "keys", **settings})
    ClientFacingConfig(**settings, insecure=True)
    ClientFacingConfig(**settings, anonymous_clients=True)


def test_certificates_are_credentials_of_clients() -> None:
    ClientFacingConfig(**_OPEN, **_TLS)
    ClientFacingConfig(**_OPEN, **_SERVED, listen_tls_authority_file="clients.pem")


def test_credentials_of_clients_open_no_internal_address() -> None:
    with pytest.raises(ValidationError, match=r"internal_listen is 10\.0\.0\.5:7051, which"):
        RouterConfig.model_validate(
            {"model": "sim", "api_keys_file": "keys", "internal_listen": "10.0.0.5:7051"}
        )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"listen": "0.0.0.0:7050"}, "listen on 0.0.0.0 needs advertise"),
        ({"listen": "[::]:7050"}, "listen on [::] needs advertise"),
        ({"listen": "[::1]:7050", "internal_listen": "[::1]:7050"}, "both take port 7050"),
        (
            {
                "listen": "127.0.0.1:7050",
                "internal_listen": "0.0.0.0:7050",
                "internal_advertise": "router:7050",
                "insecure": True,
            },
            "both take port 7050",
        ),
        ({"listen_tls_key_file": "key"}, "listen_tls_key_file together"),
        (_SERVED, "client_certificates needs listen_tls_authority_file"),
        ({"listen_tls_authority_file": "a"}, "listen_tls_authority_file needs listen_tls_cert"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], problem: str) -> None:
    assert problem in problem_of(**settings)


def test_listen_serves_the_internal_certificate_unless_it_has_its_own() -> None:
    assert ClientFacingConfig(**_TLS).listen_tls == TlsFiles(**_TLS)
    config = ClientFacingConfig(**_TLS, **_SERVED, client_certificates=False)
    assert config.listen_tls == TlsFiles("web.pem", "web.key")
    config = ClientFacingConfig(**_TLS, **_SERVED, listen_tls_authority_file="clients.pem")
    assert config.listen_tls == TlsFiles("web.pem", "web.key", "clients.pem")
    assert ClientFacingConfig().listen_tls == TlsFiles()
