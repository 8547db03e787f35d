"""What is checked of images and of running containers. Each check raises AssertionError with what it found."""

from __future__ import annotations

import json
import secrets
from typing import Any, Final
from urllib.parse import unquote

from lock_requirements import FOLDER, parse
from tests.images.deployment import STOP_GRACE_S, Deployment, image_of, wait_healthy
from tests.images.engine import ContainerError, Engine
from tests.images.workers import Workers

CONTROL: Final = ("router", "registry", "planner")
"""The services without an engine."""
IMAGE_BYTES_MAX: Final = 250_000_000
INIT: Final = ("/usr/bin/tini", "-s", "--")
_ENGINE_MODULES: Final = ("torch", "vllm", "transformers")
_ABSENT: Final = {
    "router": (*_ENGINE_MODULES, "mooncake", "pip"),
    "registry": (*_ENGINE_MODULES, "mooncake", "numpy", "pip"),
    "planner": (*_ENGINE_MODULES, "mooncake", "numpy", "pip"),
}
_COMPILERS: Final = ("gcc", "g++", "cc", "c++", "clang", "ld")
_USER: Final = 10001


def check_image(engine: Engine, service: str, workers: Workers) -> int:
    """Returns the size in bytes."""
    image = engine.inspect("image", image_of(service, workers))
    config = image["Config"]
    assert config["User"] == f"{_USER}:{_USER}", config["User"]
    assert config["Entrypoint"] == [*INIT, f"/opt/headrace/bin/headrace-{service}"]
    stop_signal = config.get("StopSignal", "")
    assert stop_signal in ("SIGTERM", "15"), stop_signal
    size = int(image["Size"])
    if service in CONTROL:
        assert size <= IMAGE_BYTES_MAX, f"{service} has {size / 1e6:.0f} MB"
    return size


def check_failed_start(engine: Engine, workers: Workers) -> None:
    """A container that ends at once is not waited for, and its log says why it has ended."""
    container = f"headrace-test-{secrets.token_hex(3)}"
    try:
        engine.call(
            *("run", "--detach", f"--name={container}", "--network=none"),
            *(image_of("registry", workers), "--no-such-flag"),
        )
        ended = ""
        try:
            wait_healthy(engine, container, workers.ready_timeout_s)
        except ContainerError as error:
            ended = str(error)
        assert "ended with" in ended, ended or "a registry with an unknown flag is healthy"
        log = engine.logs(container)
        assert "--no-such-flag: unknown flag" in log, f"the log is {log!r}"
    finally:
        engine.remove([container])


def check_confined(deployed: Deployment, service: str) -> None:
    """No process has a right that it does not need, and none can change their files. Process 1 is the init process."""
    # Health checks may end meanwhile.
    found = _inside(deployed, service, "sh", "-c", "cat /proc/[0-9]*/status 2>/dev/null; true")
    processes = [_fields(f"Name:{text}") for text in found.split("Name:")[1:]]
    names = {fields["Pid"]: fields["Name"] for fields in processes}
    assert names["1"] == "tini", names
    # The kernel keeps 15 characters of a name.
    assert f"headrace-{service}"[:15] in names.values(), names
    for fields in processes:
        assert fields["Uid"].split() == [str(_USER)] * 4, fields["Uid"]
        for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(fields[name], 16) == 0, (service, name, fields[name])
        assert fields["NoNewPrivs"] == "1", fields
    done = deployed.engine.attempt(
        "exec", deployed.containers[service], "sh", "-c", "echo x >/opt/headrace/x"
    )
    assert done.returncode, f"{service} can write to its root file system"
    assert "Read-only" in done.stderr, done.stderr


def _fields(status: str) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)


def check_contents(deployed: Deployment, service: str) -> None:
    """No engine library and no compiler in an image that does not use one."""
    program = (
        "import importlib.util, sys; "
        "print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
    )
    python = ("/opt/headrace/bin/python", "-c", program)
    absent = _ABSENT.get(service, deployed.workers.absent)
    found = _inside(deployed, service, *python, *absent).split()
    assert not found, f"the image of {service} has {found}"
    search = "for name; do command -v $name || true; done"
    found = _inside(deployed, service, "sh", "-c", search, "sh", *_COMPILERS).split()
    expected = service not in CONTROL and deployed.workers.compilers
    assert bool(found) is expected, f"the image of {service} has {found}"


def check_bill(deployed: Deployment, service: str) -> int:
    """The bill of materials has every locked package in its version, and Debian's. Returns the number of components."""
    text = _inside(deployed, service, "cat", "/opt/headrace/share/sbom.cdx.json")
    bill: dict[str, Any] = json.loads(text)
    assert bill["metadata"]["component"]["name"] == f"headrace-{service}"
    python = "pkg:pypi/"
    purls = [
        unquote(each["purl"].removeprefix(python))
        for each in bill["components"]
        if python in each["purl"]
    ]
    found = {name: version for name, _, version in (purl.partition("@") for purl in purls)}
    lock = service if service in CONTROL else deployed.workers.lock
    locked = parse((FOLDER / f"{lock}.txt").read_text(encoding="utf-8"))
    found.pop("headrace")
    expected = {name: pin.version for name, pin in locked.items()}
    differing = {name for name, _ in found.items() ^ expected.items()}
    assert not differing, f"the bill of {service} and its lock file differ: {sorted(differing)}"
    debian = {each["name"] for each in bill["components"] if each["purl"].startswith("pkg:deb/")}
    assert {"libc6", "python3.11-minimal"} <= debian
    return len(bill["components"])


def check_roles(deployed: Deployment) -> None:
    """An operator lists the workers. A worker's certificate does not permit it, and neither does none."""
    command = ("workers", "--registry", "registry:7051")
    status, output = deployed.headrace("operator", *command)
    assert status == 0, output
    assert "prefill-0" in output, output
    assert "decode-0" in output, output
    status, output = deployed.headrace("prefill", "drain", "decode-0", *command[1:])
    assert status != 0, output
    assert "operator" in output, output
    status, output = deployed.headrace("", *command)
    assert status != 0, output


def check_stops(deployed: Deployment, service: str) -> None:
    """SIGTERM ends the service by itself. A container that is killed after the grace has status 137."""
    container = deployed.containers[service]
    deployed.engine.call(
        "stop", "--time", str(STOP_GRACE_S), container, timeout_s=2 * STOP_GRACE_S + 30
    )
    status = deployed.engine.inspect("container", container)["State"]["ExitCode"]
    assert status == 0, f"{service} ended with {status} after SIGTERM"


def _inside(deployed: Deployment, service: str, *command: str) -> str:
    return deployed.engine.call("exec", deployed.containers[service], *command)
