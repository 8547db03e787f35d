"""The harness of `make test-images` with a stand-in for the container engine: limits, and what it says of a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.images import deployment, engine
from tests.images.deployment import SERVICES, deployed, wait_healthy
from tests.images.engine import ContainerError, Engine
from tests.images.workers import WORKERS

CONTAINER = {"Config": {"Healthcheck": {"Test": ["CMD", "probe"]}}}


def engine_that(folder: Path, *lines: str) -> Engine:
    """An engine that is a shell script. It appends its arguments to the file `calls`."""
    program = folder / "engine"
    program.write_text("\n".join(["#!/bin/sh", f'echo "$*" >>{folder}/calls', *lines, ""]))
    program.chmod(0o755)
    return Engine(program)


def calls_of(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def inspected(status: str, exit_status: int = 0) -> str:
    """A line of the script: what `inspect` prints of a container."""
    state = {"State": {"Status": status, "ExitCode": exit_status}}
    return f"[ $2 != inspect ] || echo '{json.dumps([CONTAINER | state])}'"


def test_a_call_without_an_end_is_ended(tmp_path: Path) -> None:
    called = engine_that(tmp_path, "exec sleep 50")
    with pytest.raises(ContainerError, match=r"`pull image` did not end within 0\.5 s"):
        called.call("pull", "image", timeout_s=0.5)


def test_a_failed_call_has_the_words_of_the_engine(tmp_path: Path) -> None:
    called = engine_that(tmp_path, "echo 'no such image' >&2; exit 125")
    with pytest.raises(ContainerError, match="`pull image` exited with 125: no such image"):
        called.call("pull", "image")


def test_a_container_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    called = engine_that(tmp_path, inspected("exited", 2), "[ $1 != exec ]")
    with pytest.raises(ContainerError, match="router ended with 2"):
        wait_healthy(called, "router", 50.0)


def test_a_container_that_is_never_healthy_is_not_waited_for(tmp_path: Path) -> None:
    check = "[ $1 != exec ] || { echo 'NOT_SERVING' >&2; exit 1; }"
    called = engine_that(tmp_path, inspected("running"), check)
    with pytest.raises(ContainerError, match=r"router was not healthy within 3 s: NOT_SERVING"):
        wait_healthy(called, "router", 3.0)


def test_a_healthy_container_is_waited_for(tmp_path: Path) -> None:
    tries = f"[ $1 != exec ] || [ $(grep -c '^exec' {tmp_path}/calls) = 3 ]"
    wait_healthy(engine_that(tmp_path, inspected("running"), tries), "router", 50.0)
    assert calls_of(tmp_path)[-1] == "exec router probe"


def test_a_log_is_cut_to_its_last_lines_without_the_engine(tmp_path: Path) -> None:
    called = engine_that(tmp_path, "echo one; echo two; echo three >&2")
    assert called.logs("router", lines=2) == "two\nthree"
    # `podman logs --tail` leaves out a line that was written in parts.
    assert calls_of(tmp_path) == ["logs router"]


def test_a_deployment_that_fails_prints_every_log_and_removes_every_container(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    called = engine_that(tmp_path, inspected("exited", 3), '[ $1 != logs ] || echo "the log of $2"')
    folder = tmp_path / "credentials"
    folder.mkdir()
    with (
        pytest.raises(ContainerError, match="registry ended with 3"),
        deployed(called, folder, WORKERS["sim"], SERVICES),
    ):
        pytest.fail("the containers have ended")
    printed = capfd.readouterr().out
    calls = calls_of(tmp_path)
    for service in SERVICES:
        assert f"--- {service}\nthe log of headrace-test-" in printed
        assert sum(c.startswith("rm --force") and c.endswith(service) for c in calls) == 1
    assert calls[-1].startswith("network rm headrace-test-")


def test_what_cannot_be_removed_is_printed_and_the_rest_is_removed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "REMOVE_TIMEOUT_S", 3.0)
    engine_that(tmp_path, "case $* in *stuck) exec sleep 50 ;; esac").remove(
        ["stuck", "other"], "network"
    )
    assert "`rm --force --volumes stuck` did not end within 3 s" in capfd.readouterr().out
    assert calls_of(tmp_path)[1:] == ["rm --force --volumes other", "network rm network"]


def test_images_must_be_built_before(tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match=r"run docker/build\.sh first"):
        deployment.engine_of(tmp_path)
