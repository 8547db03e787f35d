"""Which deployment a command calls, and with which credentials: flags, then variables, then the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router, RouterInternal

VARIABLES = (
    "HEADRACE_ENDPOINT", "HEADRACE_REGISTRY", "HEADRACE_CONFIG", "HEADRACE_TOKEN_FILE",
    "HEADRACE_API_KEY_FILE", "HEADRACE_API_KEY", "HEADRACE_TLS_AUTHORITY_FILE",
    "HEADRACE_TLS_CERTIFICATE_FILE", "HEADRACE_TLS_KEY_FILE",
)  # fmt: skip
PROD = {
    "router": "10.0.0.5:7050",
    "registry": "10.0.0.5:7051",
    "token_file": "token",
    "api_key_file": "/prod/key",
    "tls_authority_file": "/prod/ca",
}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in VARIABLES:
        # Set first, so that what a command sets is undone.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def config_path() -> Path:
    return Path(os.environ["XDG_CONFIG_HOME"]) / "headrace" / "config.toml"


def write_file(text: str, mode: int = 0o644) -> None:
    config_path().parent.mkdir(exist_ok=True)
    config_path().write_text(text)
    config_path().chmod(mode)


def call(
    *arguments: str, use: bool = True, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a command would use. `use`: with a file that names PROD."""
    if use:
        write_file("".join(f'{name} = "{value}"\n' for name, value in PROD.items()))
    used: dict[str, Any] = {}
    app = typer.Typer()

    @app.callback()
    def root() -> None: ...

    @app.command(cls=AddressedCommand)
    def ask(
        router: Router = DEFAULT_ROUTER,
        registry: Registry = "",
        internal: RouterInternal = "",
    ) -> None:
        used.update(router=router, registry=registry, internal=internal)
        used.update({name: os.environ[name] for name in VARIABLES if os.environ.get(name)})

    before = dict(os.environ)
    try:
        result = CliRunner(env=environment).invoke(app, list(arguments))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return used | {"status": result.exit_code, "error": result.stderr}


def test_without_a_file_the_deployment_of_this_machine_is_called() -> None:
    used = call("ask", use=False)
    assert (used["status"], used["router"], used["registry"]) == (0, DEFAULT_ROUTER, "")
    assert "HEADRACE_TOKEN_FILE" not in used


def test_the_file_gives_addresses_and_credentials() -> None:
    used = call("ask")
    assert (used["router"], used["registry"]) == (PROD["router"], PROD["registry"])
    assert used["internal"] == ""
    assert used["HEADRACE_TOKEN_FILE"] == str(config_path().with_name("token"))
    assert used["HEADRACE_API_KEY_FILE"] == "/prod/key"
    assert used["HEADRACE_TLS_AUTHORITY_FILE"] == "/prod/ca"
    assert "HEADRACE_TLS_KEY_FILE" not in used


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("ask", "--router", "10.0.0.9:7050"), {}),
        (("ask", "--registry", "10.0.0.9:7051"), {}),
        (("ask", "--internal", "10.0.0.9:7054"), {}),
        (("ask",), {"HEADRACE_ENDPOINT": "10.0.0.9:7050"}),
        (("ask",), {"HEADRACE_REGISTRY": "10.0.0.9:7051"}),
        (("ask",), {"HEADRACE_CONFIG": ""}),
    ],
)
def test_credentials_of_the_file_go_to_its_deployment_only(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    used = call(*arguments, environment=environment)
    assert used["status"] == 0
    assert not {"HEADRACE_TOKEN_FILE", "HEADRACE_API_KEY_FILE"} & used.keys()
    assert PROD["router"] not in used.values()


def test_a_variable_names_another_file(tmp_path: Path) -> None:
    other = tmp_path / "staging.toml"
    other.write_text('router = "10.0.0.7:7050"\ntoken_file = "~/token"\n')
    used = call("ask", environment={"HEADRACE_CONFIG": str(other)})
    assert (used["router"], used["registry"]) == ("10.0.0.7:7050", "")
    assert used["HEADRACE_TOKEN_FILE"] == str(Path("~/token").expanduser())
    missing = call("ask", environment={"HEADRACE_CONFIG": str(tmp_path / "nothing")})
    assert missing["status"] == 2
    assert "which does not exist" in missing["error"]


@pytest.mark.parametrize("variable", ["HEADRACE_API_KEY", "HEADRACE_API_KEY_FILE"])
def test_a_variable_replaces_the_files_credential(variable: str) -> None:
    used = call("ask", environment={variable: "mine", "HEADRACE_TLS_AUTHORITY_FILE": "/my/ca"})
    assert used[variable] == "mine"
    assert "/prod/key" not in used.values()
    assert used["HEADRACE_TLS_AUTHORITY_FILE"] == "/my/ca"
    assert used["HEADRACE_TOKEN_FILE"]


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        ('router = "10.0.0.5:7050"\n', 0o666, "other users can change"),
        ("router =", 0o600, "is not TOML"),
        ('registry = "h:1"', 0o600, "names no router"),
        ('router = "h:1"\ntoken = "x"', 0o600, "wrong at token"),
        ('router = "h:1"\nregistry = 3', 0o600, "texts only"),
        ('router = "h"', 0o600, "router of"),
    ],
)
def test_a_wrong_file_is_explained(text: str, mode: int, words: str) -> None:
    write_file(text, mode)
    used = call("ask", use=False)
    assert used["status"] == 2
    assert words in used["error"]


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("--router", "127.0.0.1:99999"), {}, "--router is '127.0.0.1:99999': there is no port 99999"),
        (("--router", "http://127.0.0.1:7050"), {}, "not as a URL"),
        (("--router", "127.0.0.1"), {}, "write it as host:port"),
        (("--registry", "127.0.0.1:0"), {}, "--registry is '127.0.0.1:0': no server has port 0"),
        ((), {"HEADRACE_ENDPOINT": "https://h:1"}, "HEADRACE_ENDPOINT is 'https://h:1'"),
        ((), {"HEADRACE_REGISTRY": "h:70000"}, "HEADRACE_REGISTRY is 'h:70000': there is no port"),
    ],
)  # fmt: skip
def test_a_wrong_address_is_explained_in_one_line(
    arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    used = call("ask", *arguments, use=False, environment=environment)
    assert used["status"] == 2
    assert words in used["error"]
    assert len(used["error"].splitlines()) == 1
