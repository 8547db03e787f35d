"""The extras of the distribution `headrace`, and which of them an installation lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from headrace_common.errors import ConfigError

MODULES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cli": (
            "cryptography",
            "grpc_health",
            "grpc_reflection",
            "jwt",
            "opentelemetry.exporter.otlp.proto.grpc",
            "opentelemetry.sdk",
            "pydantic",
            "rich",
            "typer",
            "uvloop",
        ),
        "registry": ("httptools",),
        "planner": ("httptools",),
        "kubernetes": ("httpx2", "lightkube"),
        "etcd": ("etcd3", "tenacity"),
        "router": (
            "httpcore2",
            "httptools",
            "jinja2",
            "kitoken",
            "numpy",
            "sortedcontainers",
            "tokenizers",
            "xxhash",
        ),
        "http": ("httpcore2", "httptools", "jinja2", "kitoken", "tokenizers"),
        "worker": ("httptools", "numpy", "xxhash"),
        "sim": ("mooncake",),
        "vllm-cpu": ("mooncake", "torch", "vllm"),
        "vllm-cuda": ("mooncake", "torch", "vllm"),
        "vllm-cuda12": ("mooncake", "torch", "vllm"),
    }
)
"""The modules that an extra of pyproject.toml installs by itself, without those of the extras that it includes."""


def install_command(extra: str) -> str:
    """The command that installs an extra. No package index has Headrace."""
    return f"pip install '.[{extra}]' in a clone (docs/installation.md has other ways)"


def require_extra(what: str, extra: str) -> None:
    """Raises ConfigError, which names the extra, when `what` needs it and a module of it is not installed.

    Imports none of them.
    """
    missing = [module for module in MODULES[extra] if not _installed(module)]
    if missing:
        raise missing_extra(what, extra, missing[0])


def missing_extra(what: str, extra: str, module: str) -> ConfigError:
    """The error of `what`, which cannot run without a module of `extra`."""
    return ConfigError(
        f"{what} needs the extra {extra}, and its module {module} is not installed: {install_command(extra)}",
        metadata={"extra": extra, "module": module},
    )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # A package that contains the module is missing.
        return False
