"""Five containers with mutual TLS: registry, router, planner, and one simulated worker of each role."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from headrace_common import ports
from headrace_common.access.credentials import TlsFiles
from tests.images.engine import ContainerError, Engine
from tests.suite.certificates import Authority

SERVICES: Final = ("registry", "router", "prefill", "decode", "planner")
IMAGES: Final = {
    "registry": "headrace/registry:dev",
    "router": "headrace/router:dev",
    "planner": "headrace/planner:dev",
    "prefill": "headrace/prefill:sim",
    "decode": "headrace/decode:sim",
}
MODEL: Final = "sim"
DECODE_STEP_S: Final = 0.05
READY_TIMEOUT_S: Final = 120.0
# Longer than drain_grace_s and what comes after it.
STOP_GRACE_S: Final = 30
_CONFINED: Final = (
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--tmpfs=/tmp:rw,noexec,nosuid,nodev,size=64m,mode=1777",
)
_POLL_S: Final = 0.2
_FOLDER: Final = "/credentials"
_SETTINGS: Final[dict[str, tuple[str, ...]]] = {
    "registry": (f"--internal-listen=0.0.0.0:{ports.REGISTRY}",),
    "router": (
        f"--listen=0.0.0.0:{ports.ROUTER}",
        f"--advertise=router:{ports.ROUTER}",
        f"--internal-listen=0.0.0.0:{ports.ROUTER_INTERNAL}",
        f"--model={MODEL}",
    ),
    "prefill": (
        "--worker-id=prefill-0",
        f"--internal-listen=0.0.0.0:{ports.PREFILL}",
        "--engine=sim",
        f"--model=sim:decode_step_s={DECODE_STEP_S}",
        f"--served-model={MODEL}",
    ),
    "decode": (
        "--worker-id=decode-0",
        f"--internal-listen=0.0.0.0:{ports.DECODE}",
        "--engine=sim",
        f"--model=sim:decode_step_s={DECODE_STEP_S}",
        f"--served-model={MODEL}",
    ),
    "planner": (f"--internal-listen=0.0.0.0:{ports.PLANNER}", f"--model={MODEL}"),
}
_INTERNAL: Final = {
    "registry": ports.REGISTRY,
    "router": ports.ROUTER_INTERNAL,
    "prefill": ports.PREFILL,
    "decode": ports.DECODE,
    "planner": ports.PLANNER,
}


@dataclass(frozen=True, slots=True)
class Deployment:
    """The containers, by service, and the router's address on this host with a client's certificate."""

    engine: Engine
    network: str
    folder: Path
    containers: dict[str, str]
    endpoint: str
    client: TlsFiles

    def headrace(self, role: str, *arguments: str) -> tuple[int, str]:
        """Runs `headrace` in a container of the network with the certificate of a role, or with none for an empty role.

        Returns its exit status and what it prints.
        """
        options = ["run", "--rm", f"--network={self.network}", *_CONFINED]
        if role:
            options += [f"--volume={self.folder / role}:{_FOLDER}:ro", *_variables()]
        done = self.engine.attempt(
            *(*options, "--entrypoint=headrace", IMAGES["registry"], *arguments)
        )
        return done.returncode, done.stdout + done.stderr


def _variables() -> list[str]:
    named = TlsFiles(f"{_FOLDER}/certificate.pem", f"{_FOLDER}/key.pem", f"{_FOLDER}/authority.pem")
    return [f"--env=HEADRACE_{name.upper()}={path}" for name, path in asdict(named).items()]


@contextmanager
def deployed(engine: Engine, folder: Path) -> Iterator[Deployment]:
    """Starts the containers and waits until all are healthy. Removes them, and prints their logs after a failure."""
    prefix = f"headrace-test-{secrets.token_hex(3)}"
    containers = {service: f"{prefix}-{service}" for service in SERVICES}
    client = _create_credentials(folder)
    try:
        engine.call("network", "create", prefix)
        for service in SERVICES:
            _start(engine, prefix, folder, service)
        for service in SERVICES:
            _wait_healthy(engine, containers[service])
        published = engine.call("port", containers["router"], f"{ports.ROUTER}/tcp").split()[0]
        yield Deployment(engine, prefix, folder, containers, published, client)
    except BaseException:
        for service, container in containers.items():
            print(f"--- {service}\n{engine.logs(container)}", flush=True)
        raise
    finally:
        engine.remove(list(containers.values()), prefix)


def _create_credentials(folder: Path) -> TlsFiles:
    """A folder for each role, which its container mounts. Returns the files of a client."""
    authority = Authority(folder / "authority")
    for role in (*SERVICES, "operator"):
        files = authority.sign(role, role, hosts=(role,))
        own = folder / role
        own.mkdir(mode=0o755)
        for name, path in zip(
            ("certificate", "key", "authority"), asdict(files).values(), strict=True
        ):
            copy = own / f"{name}.pem"
            copy.write_bytes(Path(path).read_bytes())
            # The containers' user is not the user of this process.
            copy.chmod(0o644)
    folder.chmod(0o755)
    return authority.sign("client")


def _start(engine: Engine, network: str, folder: Path, service: str) -> None:
    flags = [
        *_SETTINGS[service],
        f"--internal-advertise={service}:{_INTERNAL[service]}",
        f"--tls-certificate-file={_FOLDER}/certificate.pem",
        f"--tls-key-file={_FOLDER}/key.pem",
        f"--tls-authority-file={_FOLDER}/authority.pem",
    ]
    if service != "registry":
        flags.append(f"--registry=registry:{ports.REGISTRY}")
    published = (f"--publish=127.0.0.1::{ports.ROUTER}",) if service == "router" else ()
    engine.call(
        *("run", "--detach", f"--name={network}-{service}", f"--network={network}"),
        *(f"--network-alias={service}", *_CONFINED, *published),
        f"--volume={folder / service}:{_FOLDER}:ro",
        *(IMAGES[service], *flags),
    )


def _wait_healthy(engine: Engine, container: str) -> None:
    """Returns when the image's own health check succeeds. Raises ContainerError when the container ends first."""
    image = engine.inspect("container", container)["Config"]
    check: Sequence[str] = image["Healthcheck"]["Test"]
    if check[0] != "CMD":
        raise ContainerError(f"the health check of {container} needs a shell: {check}")
    give_up = time.monotonic() + READY_TIMEOUT_S
    answer = ""
    while time.monotonic() < give_up:
        state = engine.inspect("container", container)["State"]
        if state["Status"] not in ("created", "running"):
            raise ContainerError(f"{container} ended with {state['ExitCode']}")
        done = engine.attempt("exec", container, *check[1:])
        if done.returncode == 0:
            return
        answer = done.stderr.strip()
        time.sleep(_POLL_S)
    raise ContainerError(f"{container} was not healthy within {READY_TIMEOUT_S:g} s: {answer}")


def engine_of(root: Path) -> Engine:
    """The engine with which docker/build.sh has built the images. Raises ContainerError when it has not run."""
    program = root / ".cache" / "images" / "engine"
    if not os.access(program, os.X_OK):
        raise ContainerError(f"{program} is missing: run docker/build.sh first")
    return Engine(program)
