"""The commands in the documents exist, with the options that they name, and say how a test runs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from build_clients import LANGUAGES
from headrace_cli.app import app
from headrace_common.config import ServiceConfig
from headrace_common.process.settings import flag_of
from headrace_common.telemetry.schema_tables import METRICS
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from tests.documented import Block, blocks_of, commands_of, indented_commands, words_of
from tests.unit.test_architecture import ROOT
from tests.unit.test_documents import PAGES

OPERATIONS_PAGES = (
    *sorted((ROOT / "docs" / "operations").glob("*.md")),
    ROOT / "docs" / "quickstart-gpu.md",
)
COMMAND_PAGES = tuple(page for page in PAGES if any(blocks_of(page)))
# tests/suite/test_documented_commands.py, tests/suite/quickstart_gpu.py, tests/component/registry/store/test_backup.py,
# tests/clients/test_chat_clients.py, tests/clients/test_openai_clients.py
RUNNERS = {
    *("sim", "shell", "up"),
    *("first host", "second host", "both hosts", "second host, beside the next"),
    "etcd",
    *(f"{language} client" for language in (*LANGUAGES, "openai")),
}
SERVICES: dict[str, type[ServiceConfig]] = {
    "headrace-registry": RegistryConfig,
    "headrace-router": RouterConfig,
    "headrace-prefill": PrefillConfig,
    "headrace-decode": DecodeConfig,
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


def test_marks_are_of_known_forms() -> None:
    wrong = [
        f"{block.page.name}:{block.line}: {block.mark!r}"
        for page in PAGES
        for block in blocks_of(page)
        if (block.mark and not block.is_marked) or (block.runs and block.runs not in RUNNERS)
    ]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_has_a_mark(page: Path) -> None:
    unmarked = [block.line for block in blocks_of(page) if not block.is_marked]
    assert not unmarked, 'write "run: NAME" or "not run: REASON": tests/documented.py'
    # Other forms than console hide commands from the test.
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"^```(?:ba|z|k)?sh(?:ell)?$|^```$(?=\n\$ )", text, re.MULTILINE)
    assert not indented_commands(text)


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


def test_wrong_commands_are_found() -> None:
    for command, problem in (
        ("headrace wrokers", "no command wrokers"),
        ("headrace workers --registrie 1:1", "no option --registrie"),
        ("headrace trace slowest --level", "no option --level"),
        ("A=1 headrace policy sett a=1", "no command sett"),
        ("echo | headrace doctor pear x", "no command pear"),
        ("headrace-router --listn 1:1", "headrace-router has no --listn"),
        ("make tests", "make has no tests"),
    ):
        (found,) = (text for words in words_of(command) for text in problems_of(words))
        assert problem in found
    for command in ("headrace trace compare a b", "make test ARGS=--x", "headrace up --set a.b=c"):
        assert not [text for words in words_of(command) for text in problems_of(words)]


def test_blocks_have_marks_commands_and_continued_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run: sim, status 0 or 1 -->\n```console\n$ one --a \\\n    two   # about it\noutput\n"
        "$ for a in b; do\n>   three\n> done\nmore\n```\n\n```console\n$ four\n```\n"
        "<!-- not run: because -->\n```console\n$ five\n```\n"
    )
    first, second, third = blocks_of(page)
    assert first == Block(
        page,
        3,
        "run: sim, status 0 or 1",
        ("one --a \\\n    two", "for a in b; do\n  three\ndone"),
    )
    assert (first.runs, first.statuses, first.is_marked) == ("sim", (0, 1), True)
    assert (second.runs, second.is_marked) == ("", False)
    assert (third.runs, third.is_marked) == ("", True)
    assert list(words_of("A=1 b c >d 2>&1 | e 'f g' && h")) == [
        ["b", "c", "2"],
        ["e", "f g"],
        ["h"],
    ]
    assert list(commands_of("no command\n")) == []


def test_indented_commands_and_files_of_reasons_are_found(tmp_path: Path) -> None:
    text = (
        "    headrace workers\n\n```console\n    $ make x\n```\n    $ ls\n    chat HOST:PORT\n"
        "    .venv/bin/headrace trace\n    make: its output\n"
    )
    assert indented_commands(text) == [
        "    headrace workers",
        "    $ ls",
        "    .venv/bin/headrace trace",
    ]
    block = Block(tmp_path, 1, "not run: needs x; tests/a/b.py and docker/try.sh run it", ("x",))
    assert block.named_files == ["tests/a/b.py", "docker/try.sh"]
