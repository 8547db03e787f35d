"""The commands in the documents exist, with the options that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from headrace_cli.app import app
from headrace_common.config import ServiceConfig
from headrace_common.process.settings import flag_of
from headrace_common.telemetry.schema_tables import METRICS
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from headrace_worker.config import BothConfig
from tests.documented import blocks_of, words_of
from tests.unit.test_architecture import ROOT
from tests.unit.test_documents import PAGES

OPERATIONS_PAGES = (
    *sorted((ROOT / "docs" / "operations").glob("*.md")),
    ROOT / "docs" / "quickstart-gpu.md",
)
COMMAND_PAGES = tuple(page for page in PAGES if any(blocks_of(page)))
SERVICES: dict[str, type[ServiceConfig]] = {
    "headrace-registry": RegistryConfig,
    "headrace-router": RouterConfig,
    "headrace-prefill": PrefillConfig,
    "headrace-decode": DecodeConfig,
    "headrace-worker": BothConfig,
    "headrace-planner": PlannerConfig,
}
TARGETS = set(
    re.findall(r"^([a-z][a-z-]*)[a-z -]*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
)
TARGETS |= {
    name
    for line in re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in line.split()
}
METRIC = re.compile(r"`((?:headrace|gen_ai)\.[a-z_.]+)`")


def problems_of(words: list[str]) -> Iterator[str]:
    """What is wrong with the words of one program."""
    name = Path(words[0]).name
    if name == "headrace":
        yield from problems_of_headrace(words[1:])
    elif name in SERVICES:
        known = {flag_of(field) for field in SERVICES[name].model_fields}
        known |= {"--config", "--help", "--version", "-h"}
        rest = words[1:]
        while rest:
            flag, equals, _ = rest.pop(0).partition("=")
            if flag.startswith("--") and flag not in known:
                yield f"{name} has no {flag}"
            elif flag.startswith("--") and not equals and rest and rest[0] not in known:
                # Its value, which may begin with dashes too.
                rest.pop(0)
    elif name == "make":
        targets = [word for word in words[1:] if "=" not in word]
        yield from (f"make has no {target}" for target in targets if target not in TARGETS)


def problems_of_headrace(words: list[str]) -> Iterator[str]:
    """Subcommands and options that do not exist."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if word.startswith("-") and len(word) > 1:
            options = {
                text: one for one in command.params for text in (*one.opts, *one.secondary_opts)
            }
            option = options.get(name)
            if option is None and name not in ("--help", "-h"):
                yield f"headrace {' '.join(words)}: no option {name}"
                return
            if option is not None and not equals and not option.is_flag:
                del rest[: option.nargs]
        elif hasattr(command, "commands"):
            if word not in command.commands:
                yield f"headrace {' '.join(words)}: no command {word}"
                return
            command = command.commands[word]


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_in_reasons_exist(page: Path) -> None:
    named = {name for block in blocks_of(page) for name in block.named_files}
    assert not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    found = [
        f"{page.name}:{block.line}: {problem}"
        for block in blocks_of(page)
        for command in block.commands
        for words in words_of(command)
        for problem in problems_of(words)
    ]
    assert not found


@pytest.mark.parametrize("page", OPERATIONS_PAGES, ids=lambda page: page.name)
def test_metrics_of_an_operations_page_are_in_the_schema(page: Path) -> None:
    named = set(METRIC.findall(page.read_text(encoding="utf-8")))
    assert named <= METRICS.keys()
