"""Which deployment a command calls, and with which credentials: flags, then variables, then the context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from headrace_cli.app import app as headrace
from headrace_cli.contexts.choice import AddressedCommand
from headrace_cli.contexts.store import Context, changed_contexts
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router, RouterInternal

VARIABLES = (
    "HEADRACE_ENDPOINT", "HEADRACE_REGISTRY", "HEADRACE_CONTEXT", "HEADRACE_TOKEN_FILE",
    "HEADRACE_API_KEY_FILE", "HEADRACE_API_KEY", "HEADRACE_TLS_AUTHORITY_FILE",
    "HEADRACE_TLS_CERTIFICATE_FILE", "HEADRACE_TLS_KEY_FILE",
)  # fmt: skip
PROD = Context(
    "10.0.0.5:7050",
    "10.0.0.5:7051",
    token_file="/prod/token",
    api_key_file="/prod/key",
    tls_authority_file="/prod/ca",
)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for variable in VARIABLES:
        # Set first, so that what a command sets is undone.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def call(*arguments: str, use: str = "prod", **environment: str) -> dict[str, Any]:
    """What a command would use. `use` is the current context."""
    with changed_contexts() as contexts:
        contexts.add("prod", PROD)
        contexts.use(use)
    used: dict[str, Any] = {}
    app = typer.Typer()

    @app.callback()
    def root(
        context: Annotated[str, typer.Option(envvar="HEADRACE_CONTEXT")] = "",
    ) -> None: ...

    @app.command(cls=AddressedCommand)
    def ask(
        router: Router = DEFAULT_ROUTER,
        registry: Registry = "",
        internal: RouterInternal = "",
        url: str = "",
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


def test_without_a_context_the_deployment_of_this_machine_is_called() -> None:
    used = call("ask", use="local")
    assert (used["router"], used["registry"]) == (DEFAULT_ROUTER, "")
    assert "HEADRACE_TOKEN_FILE" not in used


def test_the_context_in_use_gives_addresses_and_credentials() -> None:
    used = call("ask")
    assert (used["router"], used["registry"], used["internal"]) == (PROD.router, PROD.registry, "")
    assert used["HEADRACE_TOKEN_FILE"] == "/prod/token"
    assert used["HEADRACE_API_KEY_FILE"] == "/prod/key"
    assert used["HEADRACE_TLS_AUTHORITY_FILE"] == "/prod/ca"
    assert "HEADRACE_TLS_KEY_FILE" not in used


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (("ask", "--router", "10.0.0.9:7050"), {}),
        (("ask", "--registry", "10.0.0.9:7051"), {}),
        (("ask", "--internal", "10.0.0.9:7054"), {}),
        (("ask", "--url", "http://10.0.0.9:8000"), {}),
        (("ask",), {"HEADRACE_ENDPOINT": "10.0.0.9:7050"}),
        (("ask",), {"HEADRACE_REGISTRY": "10.0.0.9:7051"}),
        (("--context", "local", "ask"), {}),
        (("ask",), {"HEADRACE_CONTEXT": "local"}),
    ],
)
def test_credentials_of_a_context_go_to_its_deployment_only(
    arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    used = call(*arguments, **environment)
    assert used["status"] == 0
    assert not {"HEADRACE_TOKEN_FILE", "HEADRACE_API_KEY_FILE"} & used.keys()
    assert PROD.router not in used.values()


def test_a_flag_that_repeats_the_contexts_address_keeps_its_credentials() -> None:
    used = call("ask", "--registry", PROD.registry)
    assert used["HEADRACE_TOKEN_FILE"] == "/prod/token"


def test_a_context_and_an_address_that_contradict_each_other_are_refused() -> None:
    used = call("--context", "prod", "ask", "--router", "10.0.0.9:7050", use="local")
    assert used["status"] == 2
    assert "leave out --router or --context" in used["error"]


@pytest.mark.parametrize("variable", ["HEADRACE_API_KEY", "HEADRACE_API_KEY_FILE"])
def test_a_variable_replaces_the_contexts_credential(variable: str) -> None:
    used = call("ask", **{variable: "mine", "HEADRACE_TLS_AUTHORITY_FILE": "/my/ca"})
    assert used[variable] == "mine"
    assert "/prod/key" not in used.values()
    assert used["HEADRACE_TLS_AUTHORITY_FILE"] == "/my/ca"
    assert used["HEADRACE_TOKEN_FILE"] == "/prod/token"


def test_an_unknown_context_is_refused_with_the_names() -> None:
    used = call("--context", "staging", "ask")
    assert used["status"] == 1
    assert "there are: local, prod" in used["error"]


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
    used = call("ask", *arguments, use="local", **environment)
    assert used["status"] == 2
    assert words in used["error"]
    assert len(used["error"].splitlines()) == 1


ADDRESSED = [
    ("chat", "x"), ("route", "x"), ("workers",), ("reset-cache", "w"), ("drain", "w"), ("trace",),
    ("policy", "get"), ("policy", "set", "temperature="), ("doctor",), ("bench",),
]  # fmt: skip


@pytest.mark.parametrize("command", ADDRESSED, ids=" ".join)
def test_every_command_that_calls_a_deployment_checks_its_address(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(headrace, [*command, "--router", "127.0.0.1:99999"])
    assert result.exit_code == 2
    assert "there is no port 99999" in result.stderr
