"""Settings: precedence of sources, all errors at once, secrets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import Field, SecretStr

from headrace_common.config import NonNegativeCount, PositiveCount, ServiceConfig, WorkerId
from headrace_common.errors import ConfigError
from headrace_common.process.settings import load_config, redacted


class KilnConfig(ServiceConfig):
    """Settings of a service for these tests."""

    bricks_max: PositiveCount = Field(default=8, description="Bricks fired at once.")
    spare_bricks: NonNegativeCount = Field(default=0, description="Bricks kept, 100% dry.")
    quick: bool = Field(default=False, description="Fires hotter.")
    worker_id: WorkerId = Field(default="kiln-0", description="Name of this kiln.")
    signing_key: SecretStr = Field(default=SecretStr(""), description="Signs answers.")


def load(argv: Sequence[str] = (), environment: dict[str, str] | None = None) -> KilnConfig:
    with patch.dict(os.environ, environment or {}):
        return load_config(
            KilnConfig, list(argv), prog="headrace-kiln", env_prefix="HEADRACE_KILN_"
        )


def problems_of(argv: Sequence[str] = (), environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv, environment)
    assert "\n" not in caught.value.detail
    return caught.value.detail


SOURCES = st.fixed_dictionaries(
    {},
    optional={
        "file": st.integers(1, 10**6),
        "environment": st.integers(1, 10**6),
        "flag": st.integers(1, 10**6),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bricks=SOURCES, grace=SOURCES)
def test_flags_override_environment_and_environment_overrides_file(
    tmp_path: Path, bricks: dict[str, int], grace: dict[str, int]
) -> None:
    given_values = {"bricks_max": bricks, "drain_grace_s": grace}
    path = tmp_path / "kiln.toml"
    path.write_text(
        "".join(f"{name} = {v['file']}\n" for name, v in given_values.items() if "file" in v)
    )
    environment = {
        f"HEADRACE_KILN_{name.upper()}": str(values["environment"])
        for name, values in given_values.items()
        if "environment" in values
    }
    argv = [f"--config={path}"]
    for name, values in given_values.items():
        if "flag" in values:
            argv += ["--" + name.replace("_", "-"), str(values["flag"])]
    config = load(argv, environment)

    def expected(values: dict[str, int], default: int) -> int:
        return values.get("flag", values.get("environment", values.get("file", default)))

    assert config.bricks_max == expected(bricks, 8)
    assert config.drain_grace_s == expected(grace, 20)


def test_file_can_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "kiln.toml"
    path.write_text('internal_listen = "127.0.0.1:7003"\nquick = true\n')
    config = load(environment={"HEADRACE_KILN_CONFIG": str(path)})
    assert (config.internal_listen, config.quick) == ("127.0.0.1:7003", True)


def test_every_wrong_setting_is_listed_with_its_source_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "kiln.toml"
    path.write_text('bricks_max = -1\nbricks_mx = 3\nregistry = "localhost"\n')
    detail = problems_of(
        [f"--config={path}", "--drain-grace-s", "-2", "--drain-grace", "5", "stray"],
        {"HEADRACE_KILN_LOG_LEVEL": "loud", "HEADRACE_KILN_QUICKLY": "1"},
    )
    assert f"bricks_max = -1 (file {path}): must be more than 0" in detail
    assert f"bricks_mx (file {path}): unknown key: did you mean bricks_max?" in detail
    assert f"registry = 'localhost' (file {path}): write it as host:port" in detail
    assert "drain_grace_s = '-2' (flag --drain-grace-s): must be " in detail
    assert "--drain-grace: unknown flag: did you mean --drain-grace-s?" in detail
    assert "stray: unexpected argument" in detail
    assert "log_level = 'loud' (environment HEADRACE_KILN_LOG_LEVEL)" in detail
    assert "HEADRACE_KILN_QUICKLY: unknown environment variable" in detail
    assert "HEADRACE_KILN_QUICK?" in detail


def test_a_missing_file_and_invalid_toml_are_distinguished(tmp_path: Path) -> None:
    assert "No such file" in problems_of(["--config", str(tmp_path / "none.toml")])
    path = tmp_path / "wrong.toml"
    path.write_text("internal_listen = ")
    assert "is not TOML" in problems_of(["--config", str(path)])


def test_variables_of_kubernetes_are_ignored() -> None:
    load(
        environment={
            "HEADRACE_KILN_SERVICE_HOST": "10.0.0.1",
            "HEADRACE_KILN_SERVICE_PORT_GRPC": "7000",
            "HEADRACE_KILN_PORT": "tcp://10.0.0.1:7000",
            "HEADRACE_KILN_PORT_7000_TCP_ADDR": "10.0.0.1",
        }
    )


_ADDRESSES = ("localhost", "localhost:", ":7000", "localhost:70000", "a b:1", "http://a:1", "::1:7")
_OTLP_ENDPOINTS = ("kiln", "http://kiln", "grpc://kiln:4317", "http://kiln:0")


@pytest.mark.parametrize(
    "flag, problem",
    [
        ("--bricks-max", "--bricks-max: needs a value"),
        *((f"--internal-listen={text}", "host:port") for text in _ADDRESSES),
        *((f"--otlp-endpoint={text}", "otlp_endpoint") for text in _OTLP_ENDPOINTS),
        ("--registry=127.0.0.1:0", "name the port"),
        ("--registry=127.0.0.1:99999", "no port 99999"),
        ("--registry=http://127.0.0.1:7050", "not as a URL"),
        ("--tls-key-file=key.pem", "together"),
        ("--internal-listen=0.0.0.0:7000", "needs internal_advertise"),
    ],
)
def test_an_invalid_flag_is_rejected_with_its_problem(flag: str, problem: str) -> None:
    assert problem in problems_of([flag])


@pytest.mark.parametrize(
    "address",
    [
        "--internal-listen=10.0.0.1:7000",
        "--internal-listen=router:7000",
        "--internal-advertise=router:7000",
    ],
)
def test_an_address_beyond_loopback_needs_credentials(address: str) -> None:
    name = address.removeprefix("--").partition("=")[0].replace("-", "_")
    problem = problems_of([address])
    assert f"{name} is" in problem
    assert "set insecure" in problem
    assert load([address, "--token-keys-file=keys.pem"]).insecure is False
    load([address, "--insecure"])


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--signing-key=hunter2", "HEADRACE_KILN_SIGNING_KEY"),
        ("--otlp-endpoint=http://me:hunter2@collector:4317", "HEADRACE_KILN_OTLP_ENDPOINT"),
    ],
)
def test_a_flag_with_a_secret_is_refused(flag: str, remedy: str) -> None:
    problem = problems_of([flag])
    assert f"{flag.partition('=')[0]}: contains a secret" in problem
    assert f"set {remedy} instead" in problem
    assert "hunter2" not in problem


def test_secrets_are_never_shown() -> None:
    config = load(
        environment={
            "HEADRACE_KILN_OTLP_ENDPOINT": "http://me:hunter2@collector:4317",
            "HEADRACE_KILN_SIGNING_KEY": "hunter2",
        }
    )
    assert config.signing_key.get_secret_value() == "hunter2"
    shown = redacted(config)
    assert "hunter2" not in repr(shown)
    assert "hunter2" not in repr(config.signing_key)
    assert shown["signing_key"] == "***"
    assert shown["otlp_endpoint"] == "http://***@collector:4317"
    assert shown["bricks_max"] == 8


def test_standard_variables_choose_the_sampler_and_ours_override_them() -> None:
    standard = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    config = load(environment=standard)
    assert config.traces_sampler == "traceidratio=0.25"
    assert load(environment={"OTEL_TRACES_SAMPLER_ARG": "1"}).traces_sampler == (
        "parentbased_traceidratio=1"
    )
    both = {**standard, "HEADRACE_KILN_TRACES_SAMPLER": "always_off"}
    assert load(environment=both).traces_sampler == "always_off"
    assert load(["--traces-sampler", "always_on"], both).traces_sampler == "always_on"
