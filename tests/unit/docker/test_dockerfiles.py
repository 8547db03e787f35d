"""The Dockerfiles, as they are parsed: bases and users. `make test-images` checks what is in an image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.test_architecture import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
USER = "10001:10001"
PINNED = re.compile(r"docker\.io/library/[a-z]+:[a-z0-9.-]+(@sha256:[0-9a-f]{64})?")

Instruction = tuple[str, str]


def instructions_of(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, with continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, rest.strip()) for name, _, rest in pairs]


def stages_of(path: Path) -> list[list[Instruction]]:
    """The stages, each with its FROM first. What is before them is left out."""
    stages: list[list[Instruction]] = []
    for name, rest in instructions_of(path):
        if name == "FROM":
            stages.append([])
        if stages:
            stages[-1].append((name, rest))
    return stages


def values(stage: list[Instruction], wanted: str) -> list[str]:
    return [rest for name, rest in stage if name == wanted]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_without_root(path: Path) -> None:
    stage = stages_of(path)[-1]
    names = [name for name, _ in stage]
    assert values(stage, "USER") == [USER]
    after_user = names[names.index("USER") :]
    assert "RUN" not in after_user
    assert "COPY" not in after_user
    assert "ENTRYPOINT" in after_user
    assert not {"ADD", "ONBUILD"} & {name for name, _ in instructions_of(path)}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_based_on_a_named_official_image(path: Path) -> None:
    arguments = dict(rest.split("=", 1) for name, rest in instructions_of(path) if name == "ARG")
    known: set[str] = set()
    for stage in stages_of(path):
        base, *alias = stage[0][1].split()
        if base not in known:
            argument = base.removeprefix("${").removesuffix("}")
            assert base == f"${{{argument}}}"
            assert PINNED.fullmatch(arguments[argument]), arguments[argument]
        if alias:
            known.add(alias[-1])
