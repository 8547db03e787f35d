"""Containers: compose.yaml and the Dockerfiles, as they are parsed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.config import ServiceConfig
from headrace_common.process.settings import load_config
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from tests.unit.test_architecture import ROOT

DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVICES: dict[str, type[ServiceConfig]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
# Only started on request.
OPTIONAL: dict[str, type[ServiceConfig]] = {"planner": PlannerConfig}
USER = "10001:10001"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PINNED = re.compile(r"docker\.io/library/[a-z]+:[a-z0-9.-]+(@sha256:[0-9a-f]{64})?")


def mounts_of(container: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Path in the container: source and mode."""
    mounts = {}
    for text in container.get("volumes", ()):
        source, target, *mode = re.sub(r"\$\{[^}]*\}", "VARIABLE", text).split(":")
        mounts[target] = (source, mode[0] if mode else "rw")
    return mounts


def settings_of(container: Mapping[str, Any]) -> list[str]:
    """The command, with the default of each variable."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in container["command"]]


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_is_confined(name: str) -> None:
    container = CONTAINERS[name]
    assert container["user"] == USER
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    given = container.keys() & {
        *("privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "cgroup", "env_file"),
    }
    assert not given
    assert container.get("network_mode", "none") == "none"
    for text in container["tmpfs"]:
        path, _, options = text.partition(":")
        assert path == "/tmp"
        assert {"noexec", "nosuid", "nodev"} <= set(options.split(","))
        assert re.search(r"\bsize=\d+[mg]\b", options)
    for port in container.get("ports", ()):
        assert port.startswith("127.0.0.1:")


def test_only_the_store_and_the_first_step_write_to_volumes() -> None:
    writable = {
        (name, source)
        for name, container in CONTAINERS.items()
        for source, mode in mounts_of(container).values()
        if mode != "ro"
    }
    credentials = {source for source, _ in mounts_of(CONTAINERS["credentials"]).values()}
    credentials -= {"./credentials.sh"}
    assert writable == {("etcd", "etcd-data"), *(("credentials", name) for name in credentials)}


@pytest.mark.parametrize("name", [*SERVICES, *OPTIONAL, "operator"])
def test_a_service_has_its_own_credentials_only(name: str) -> None:
    mounts = mounts_of(CONTAINERS[name])
    assert mounts.pop("/credentials") == (f"{name}-credentials", "ro")
    assert mounts in ({}, {"/models": ("VARIABLE", "ro")})
    written = mounts_of(CONTAINERS["credentials"])
    assert written[f"/credentials/{name}"] == (f"{name}-credentials", "rw")


@pytest.mark.parametrize("name", [*SERVICES, *OPTIONAL])
def test_a_service_accepts_its_settings_and_uses_tokens(name: str) -> None:
    words = settings_of(CONTAINERS[name])
    kind = {**SERVICES, **OPTIONAL}[name]
    config = load_config(kind, words, prog=name, env_prefix=f"HEADRACE_{name.upper()}_")
    assert not config.insecure
    assert config.token_file == "/credentials/token"
    assert config.token_keys_file == "/credentials/token_keys.pem"
    needs = CONTAINERS[name]["depends_on"]["credentials"]
    assert needs == {"condition": "service_completed_successfully"}


def test_the_named_tokens_belong_to_the_workers_of_the_deployment() -> None:
    script = (DOCKER / "credentials.sh").read_text(encoding="utf-8")
    named = dict(re.findall(r"^create (\w+) --name (\S+)$", script, re.MULTILINE))
    ids = {
        name: word.partition("=")[2]
        for name in ("prefill", "decode")
        for word in settings_of(CONTAINERS[name])
        if word.startswith("--worker-id=")
    }
    assert named == ids


def test_only_the_registry_reaches_etcd() -> None:
    assert COMPOSE["networks"]["store"] == {"internal": True}
    members = {
        name for name, container in CONTAINERS.items() if "store" in container.get("networks", ())
    }
    assert members == {"etcd", "registry"}
    assert CONTAINERS["etcd"]["networks"] == ["store"]
    assert "ports" not in CONTAINERS["etcd"]


def instructions_of(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with continued lines joined."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = (line.partition(" ") for line in text.splitlines() if line)
    return [(name, rest.strip()) for name, _, rest in pairs]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_runs_without_root(path: Path) -> None:
    names = [name for name, _ in instructions_of(path)]
    stage = instructions_of(path)[len(names) - 1 - names[::-1].index("FROM") :]
    assert [rest for name, rest in stage if name == "USER"] == [USER]
    after_user = [name for name, _ in stage[[name for name, _ in stage].index("USER") :]]
    assert "RUN" not in after_user
    assert "ENTRYPOINT" in after_user
    assert not {"ADD", "ONBUILD"} & set(names)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_based_on_a_named_official_image(path: Path) -> None:
    instructions = instructions_of(path)
    arguments = dict(rest.split("=", 1) for name, rest in instructions if name == "ARG")
    bases = {rest.split()[0] for name, rest in instructions if name == "FROM"}
    for base in bases:
        argument = base.removeprefix("${").removesuffix("}")
        assert base == f"${{{argument}}}"
        assert PINNED.fullmatch(arguments[argument]), arguments[argument]


def test_all_images_have_the_same_bases() -> None:
    arguments: dict[str, set[str]] = {}
    for path in DOCKERFILES:
        for name, rest in instructions_of(path):
            if name == "ARG" and "_IMAGE=" in rest:
                argument, _, image = rest.partition("=")
                arguments.setdefault(argument, set()).add(image)
    assert arguments.keys() == {"PYTHON_IMAGE", "DEBIAN_IMAGE"}
    assert all(len(images) == 1 for images in arguments.values())


@pytest.mark.parametrize("answer", ["sha256:" + "ab" * 32, "sha256:ab", ""])
def test_bases_are_pinned_by_the_digest_that_their_registry_gives(
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
        assert b"pin: no digest of docker.io/library/python" in ended[0].stderr
        assert after == before
        return
    assert {done.returncode for done in ended} == {0}
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == calls[2:]
    assert all("@" not in call for call in calls)
    for name, instructions in before.items():
        for old, new in zip(instructions, after[name], strict=True):
            if old[0] == "ARG" and "_IMAGE=" in old[1]:
                assert new[1] == f"{old[1].partition('@')[0]}@{answer}"
            else:
                assert new == old
