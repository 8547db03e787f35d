"""docker/try.sh with stand-ins for docker and the command line: limits, and what a failure prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.docker.checkout import SLEEPS_S, Checkout

CONFINED = r"""
Uid:\t10001\t10001\t10001\t10001
CapPrm:\t0000000000000000
CapBnd:\t0000000000000000
NoNewPrivs:\t1
"""
WORKERS = 'echo "prefill-0 decode-0"'
NO_MODULE = "exit 1"


class Deployment:
    """A `docker` of a deployment that passes all checks, with what the tests change."""

    def __init__(self, folder: Path) -> None:
        self._checkout = Checkout(folder)
        self.up = ""
        self.workers = WORKERS
        self.restarts = "echo 0"
        self.status = CONFINED
        self.imports = NO_MODULE
        self.chat = 'echo "Paris"'

    def run(self, **variables: str) -> tuple[int, str]:
        """The exit status of try.sh, and what it prints."""
        status = self.status.replace("\n", r"\n")
        self._checkout.program(
            "docker",
            f'echo "$*" >>{self._checkout.folder}/calls',
            'case "$*" in',
            f"*' up -d') {self.up} ;;",
            f"*' operator workers '*) {self.workers} ;;",
            f"inspect*) {self.restarts} ;;",
            'logs*) echo "the log of $2" >&2 ;;',
            f"*/proc/*) printf '{status}' ;;",
            "*/opt/x*) echo 'Read-only file system' >&2; exit 1 ;;",
            "*'ls /credentials/key') exit 1 ;;",
            f"*' -c import '*) {self.imports} ;;",
            "esac",
        )
        self._checkout.program(
            ".venv/bin/headrace",
            f'case $1 in chat) {self.chat} ;; *) echo "no credential" >&2; exit 1 ;; esac',
        )
        done = self._checkout.run("try.sh", HEADRACE_CONTAINER_ENGINE="docker", **variables)
        return done.returncode, done.stdout + done.stderr

    @property
    def calls(self) -> list[str]:
        """The commands of docker."""
        return (self._checkout.folder / "calls").read_text().splitlines()


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def check_failed(deployment: Deployment, status: int, output: str) -> None:
    """The containers' logs are printed, and the containers are removed."""
    assert status == 1, output
    for name in ("credentials", "registry", "router", "prefill", "decode", "etcd"):
        assert f"--- {name}\nthe log of headrace-{name}-1" in output
    assert deployment.calls[-1].endswith(" down --volumes --timeout 30")


def test_a_deployment_that_answers_passes(deployment: Deployment) -> None:
    status, output = deployment.run()
    assert status == 0, output
    assert "Paris" in output
    assert "the log of" not in output
    assert deployment.calls[-1].endswith(" down --volumes --timeout 30")


@pytest.mark.parametrize("up", ['echo "no such network" >&2; exit 3', f"exec sleep {SLEEPS_S}"])
def test_containers_that_do_not_start_are_not_waited_for(deployment: Deployment, up: str) -> None:
    deployment.up = up
    status, output = deployment.run(UP_TIMEOUT_S="2")
    check_failed(deployment, status, output)
    assert "the containers did not start within 2 s" in output
    assert ("no such network" in output) is ("exit" in up)


def test_workers_that_never_register_are_not_waited_for(deployment: Deployment) -> None:
    deployment.workers = 'echo "prefill-0"'
    status, output = deployment.run(READY_TIMEOUT_S="1")
    check_failed(deployment, status, output)
    assert "the workers did not register within 1 s" in output


def test_a_service_that_ends_again_and_again_ends_the_wait(deployment: Deployment) -> None:
    deployment.workers = "exit 1"
    deployment.restarts = "case $4 in *decode*) echo 6 ;; *) echo 5 ;; esac"
    status, output = deployment.run()
    check_failed(deployment, status, output)
    assert "decode ended 6 times" in output


def test_an_answer_that_never_comes_is_not_waited_for(deployment: Deployment) -> None:
    deployment.chat = f"exec sleep {SLEEPS_S}"
    status, output = deployment.run(CALL_TIMEOUT_S="2")
    check_failed(deployment, status, output)
    assert "no answer within 2 s" in output


@pytest.mark.parametrize(
    "line, found",
    [
        ("CapBnd", r"CapBnd:\t0000000000000001"),
        # Two processes, of which one is root.
        ("Uid", r"Uid:\t0\t0\t0\t0\nUid:\t10001\t10001\t10001\t10001"),
        ("NoNewPrivs", ""),
    ],
)
def test_a_process_with_a_right_is_found(deployment: Deployment, line: str, found: str) -> None:
    kept = [each for each in CONFINED.splitlines() if not each.startswith(line)]
    deployment.status = "\n".join([*kept, found, ""])
    status, output = deployment.run()
    check_failed(deployment, status, output)
    assert "registry is not confined" in output
    assert line in output


def test_an_image_with_torch_is_found(deployment: Deployment) -> None:
    deployment.imports = "exit 0"
    status, output = deployment.run()
    check_failed(deployment, status, output)
    assert "the image of the registry holds torch" in output
