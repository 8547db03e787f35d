"""docker/build.sh with stand-ins for the container engines: choice of the engine, limits, and what a failure prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.test_architecture import ROOT

# Far beyond the limits that the tests set, and below the limit of a test.
RUN_TIMEOUT_S = 60
SLEEPS_S = 50


class Checkout:
    """A folder with docker/ and requirements/, and programs that replace those of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self._programs = folder / "programs"
        self._programs.mkdir()
        shutil.copytree(ROOT / "docker", self.folder / "docker")
        shutil.copytree(ROOT / "requirements", self.folder / "requirements")

    def program(self, name: str, *lines: str) -> None:
        """A shell script that stands for a program."""
        path = self._programs / name
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)

    def build(self, *images: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "docker" / "build.sh", *images],
            env={"PATH": f"{self._programs}:{os.environ['PATH']}", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_TIMEOUT_S,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_docker_builds_where_its_daemon_answers(checkout: Checkout) -> None:
    calls = checkout.folder.parent / "calls"
    checkout.program("docker", f'echo "$*" >>{calls}', 'echo "headrace/router:dev  200MB"')
    done = checkout.build("router", "decode-sim")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "headrace/router:dev  200MB\n"
    built = [line for line in calls.read_text().splitlines() if line.startswith("build ")]
    assert len(built) == 2
    assert "--tag headrace/router:dev --file docker/router.Dockerfile ." in built[0]
    assert "REQUIREMENTS=router" in built[0]
    assert "--tag headrace/decode:sim --file docker/decode.Dockerfile ." in built[1]
    assert "REQUIREMENTS=sim" in built[1]


def test_a_failed_build_prints_the_end_of_its_log(checkout: Checkout) -> None:
    checkout.program(
        "docker", 'case $1 in build) echo "the cause of the failure" >&2; exit 3;; esac'
    )
    done = checkout.build("router")
    assert done.returncode == 1
    assert "the cause of the failure" in done.stderr
    assert "headrace/router:dev failed" in done.stderr


def test_a_build_without_an_end_is_ended(checkout: Checkout) -> None:
    checkout.program(
        "docker", f'case $1 in build) echo "the last words"; exec sleep {SLEEPS_S};; esac'
    )
    done = checkout.build("router", BUILD_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "the last words" in done.stderr
    assert "took more than 1 s" in done.stderr


def test_a_daemon_that_never_answers_is_not_used(checkout: Checkout) -> None:
    checkout.program("docker", f"exec sleep {SLEEPS_S}")
    # The other engine fails at once.
    for name in ("podman", "mmdebstrap", "iptables", "runc", "buildah"):
        checkout.program(name, "exit 1")
    done = checkout.build("router", ASK_TIMEOUT_S="1", CALL_TIMEOUT_S="5")
    assert done.returncode == 1
    assert "cannot be pulled" in done.stderr
    assert "mmdebstrap failed" in done.stderr


@pytest.mark.parametrize(
    "images, variables, problem",
    [
        (("router",), {"HEADRACE_CONTAINER_ENGINE": "lxc"}, "set it to docker or podman"),
        (("gateway",), {}, "there is no image gateway"),
    ],
)
def test_a_wrong_name_is_refused(
    checkout: Checkout, images: tuple[str, ...], variables: dict[str, str], problem: str
) -> None:
    done = checkout.build(*images, **variables)
    assert done.returncode == 2
    assert problem in done.stderr
