"""The settings of the router."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError
from headrace_common.process.settings import load_config
from headrace_router.config import RouterConfig
from headrace_router.main import join_models


def _load(*arguments: str) -> RouterConfig:
    return load_config(
        RouterConfig, join_models(arguments), prog="headrace-router", env_prefix="TEST_ROUTER_"
    )


@pytest.mark.parametrize(
    "arguments,models",
    [
        (["--model", "a=/x", "--model", "/models/B-1/"], {"a": "/x", "B-1": "/models/B-1/"}),
        (["--model=sim"], {"sim": "sim"}),
        (["--model", "a=sim,b=/y", "--worker-wait-s", "3"], {"a": "sim", "b": "/y"}),
    ],
)
def test_model_settings_map_names_to_folders(arguments: list[str], models: dict[str, str]) -> None:
    assert _load(*arguments).models == models


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "model: is required"),
        (["--model", "a=x,a=y"], "a is used twice"),
        (["--model", "=x"], "NAME=FOLDER"),
        (["--model"], "at least one model"),
        (["--model", "sim", "--retry-budget", "1"], "docs/upgrading.md"),
        (["--model", "sim", "--admission-wait-s", "-1"], "admission_wait_s"),
        (["--model", "sim", "--router-id", "Not Good"], "router_id"),
        (
            ["--model", "sim", "--tool-call-parser", "x"],
            "'x' is no parser; use none, or one of: deepseek_v3",
        ),
        (["--model", "sim", "--reasoning-parser", "x"], "or one of: deepseek_r1"),
        (["--model", "sim", "--tool-call-parser", "b=hermes"], "the model 'b', which model does"),
        (["--model", "sim", "--tool-call-parser", "hermes,mistral"], "two parsers"),
        *(
            (["--model", "sim", "--image-hosts", host], "is no host; write HOST or HOST:PORT")
            for host in ("http://a", "a/b", "u@a", "a:x", "a:0", ":80", "*")
        ),
        *(
            (["--model", "sim", "--http-origins", origin], "is no origin")
            for origin in ("chat.test", "https://Chat.test", "https://a/", "https://*.a")
        ),
    ],
)
def test_invalid_settings_are_reported(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(*arguments)


def test_hosts_of_images_are_names_or_addresses() -> None:
    assert _load("--model", "sim").image_hosts == ()
    hosts = "images.test,127.0.0.1:8080,[::1]:80"
    assert _load("--model", "sim", "--image-hosts", hosts).image_hosts == tuple(hosts.split(","))


def test_each_model_has_its_parsers() -> None:
    config = _load(
        "--model", "a=sim,b=sim", "--tool-call-parser", "b=hermes", "--reasoning-parser", "qwen3"
    )
    assert config.parsers == {"a": ("", "qwen3"), "b": ("hermes", "qwen3")}
