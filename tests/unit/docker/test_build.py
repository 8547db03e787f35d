"""build.sh and available.sh with stand-ins for engines: choice of the engine, limits, and what a failure prints."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.unit.docker.checkout import SLEEPS_S, Checkout

# Hides what Debian has in /usr/sbin, iptables among it.
NO_SBIN = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs none /usr/sbin && exec "$@"',
    "sh",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_docker_builds_where_its_daemon_answers(checkout: Checkout) -> None:
    calls = checkout.folder.parent / "calls"
    checkout.program("docker", f'echo "$*" >>{calls}', 'echo "headrace/router:dev  200MB"')
    done = checkout.run("build.sh", "router", "decode-sim")
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
    done = checkout.run("build.sh", "router")
    assert done.returncode == 1
    assert "the cause of the failure" in done.stderr
    assert "headrace/router:dev failed" in done.stderr


def test_a_build_without_an_end_is_ended(checkout: Checkout) -> None:
    checkout.program(
        "docker", f'case $1 in build) echo "the last words"; exec sleep {SLEEPS_S};; esac'
    )
    done = checkout.run("build.sh", "router", BUILD_TIMEOUT_S="1")
    assert done.returncode == 1
    assert "the last words" in done.stderr
    assert "took more than 1 s" in done.stderr


def test_a_daemon_that_never_answers_is_not_used(checkout: Checkout) -> None:
    checkout.program("docker", f"exec sleep {SLEEPS_S}")
    # The other engine fails at once.
    for name in ("podman", "mmdebstrap", "iptables", "runc", "buildah"):
        checkout.program(name, "exit 1")
    done = checkout.run("build.sh", "router", ASK_TIMEOUT_S="1", CALL_TIMEOUT_S="5")
    assert done.returncode == 1
    assert "cannot be pulled" in done.stderr
    assert "mmdebstrap failed" in done.stderr


def podman_without_iptables(checkout: Checkout) -> None:
    """Programs with which only iptables is missing. Skips the test where it cannot be hidden."""
    if not shutil.which("unshare") or os.getuid() != 0:
        pytest.skip("needs root")
    for name in ("podman", "mmdebstrap", "runc", "buildah"):
        checkout.program(name, "exit 1")


def test_without_iptables_it_is_named_with_the_command_that_installs_it(
    checkout: Checkout,
) -> None:
    podman_without_iptables(checkout)
    checkout.program("id", "echo 1000")
    done = checkout.run("build.sh", "router", before=NO_SBIN, HEADRACE_CONTAINER_ENGINE="podman")
    assert done.returncode == 2, done.stderr
    assert "not installed: iptables. Run: sudo apt-get install" in done.stderr
    assert " iptables" in done.stderr.partition("apt-get install")[2]


@pytest.mark.parametrize("last", ["exit 100", f"exec sleep {SLEEPS_S}"])
def test_an_installation_that_fails_or_never_ends_prints_its_log(
    checkout: Checkout, last: str
) -> None:
    podman_without_iptables(checkout)
    checkout.program("apt-get", 'echo "Err: the mirror is gone" >&2', last)
    variables = {"HEADRACE_CONTAINER_ENGINE": "podman", "INSTALL_TIMEOUT_S": "2"}
    done = checkout.run("build.sh", "router", before=NO_SBIN, **variables)
    assert done.returncode == 1, done.stderr
    assert "not installed: iptables. Installing" in done.stderr
    assert "the mirror is gone" in done.stderr
    assert "apt-get failed, or took more than 2 s" in done.stderr


def test_files_with_different_versions_of_a_package_are_fetched_apart(checkout: Checkout) -> None:
    calls = checkout.folder.parent / "calls"
    for name in ("podman", "mmdebstrap", "iptables", "runc", "buildah"):
        checkout.program(name)
    checkout.program(".venv/bin/python", f'echo "$*" >>{calls}')
    done = checkout.run("build.sh", "prefill-cuda", HEADRACE_CONTAINER_ENGINE="podman")
    assert "fetching the wheels of requirements/worker-cuda.txt" in done.stderr
    lines = calls.read_text().splitlines()
    fetched = [line.partition(" -r ")[2] for line in lines]
    assert fetched == ["requirements/worker-cuda.txt", "requirements/build.txt"]
    # Another lock file has torch+cpu, which pip would take for torch.
    assert all("/wheels/worker-cuda -r " in line for line in lines)


def test_wheels_that_never_come_are_not_waited_for(checkout: Checkout) -> None:
    checkout.program("podman")
    for name in ("mmdebstrap", "iptables", "runc", "buildah"):
        checkout.program(name, "exit 1")
    checkout.program("index", 'echo "the index is silent"', f"exec sleep {SLEEPS_S}")
    done = checkout.run(
        "build.sh",
        "router",
        HEADRACE_CONTAINER_ENGINE="podman",
        PYTHON=str(checkout.folder.parent / "programs" / "index"),
        FETCH_TIMEOUT_S="1",
    )
    assert done.returncode == 1, done.stderr
    assert "the index is silent" in done.stderr
    assert "pip could not fetch the wheels of requirements/router.txt within 1 s" in done.stderr


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
    done = checkout.run("build.sh", *images, **variables)
    assert done.returncode == 2
    assert problem in done.stderr


def test_images_can_be_built_where_docker_answers(checkout: Checkout) -> None:
    checkout.program("docker")
    done = checkout.run("available.sh")
    assert done.returncode == 0, done.stderr


def test_without_a_base_image_none_can_be_built(checkout: Checkout) -> None:
    for name in ("podman", "iptables", "runc"):
        checkout.program(name, "exit 1")
    checkout.program("mmdebstrap", "echo 'the mirror is gone'; exit 1")
    done = checkout.run("available.sh", HEADRACE_CONTAINER_ENGINE="podman")
    assert done.returncode == 1, done.stderr
    assert "the mirror is gone" in done.stderr
