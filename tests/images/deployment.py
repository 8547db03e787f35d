"""Containers with mutual TLS: registry, router, prefill, decode, and what is not left out of the others."""

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
from tests.images.workers import Workers
from tests.suite.certificates import Authority

REQUIRED: Final = ("registry", "router", "prefill", "decode")
SERVICES: Final = (*REQUIRED, "worker", "planner")
_WORKERS: Final = ("prefill", "decode", "worker")
# Longer than drain_grace_s and what comes after it.
STOP_GRACE_S: Final = 30
_CONFINED: Final = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
_TEMPORARY_MIB: Final = 64
_POLL_S: Final = 0.2
_FOLDER: Final = "/credentials"
_INTERNAL: Final = {
    "registry": ports.REGISTRY,
    "router": ports.ROUTER_INTERNAL,
    "prefill": ports.PREFILL,
    "decode": ports.DECODE,
    "worker": ports.WORKER,
    "planner": ports.PLANNER,
}


def image_of(service: str, workers: Workers) -> str:
    """The image's name, as docker/build.sh gives it."""
    return f"headrace/{service}:{workers.tag if service in _WORKERS else 'dev'}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """The containers, by service, and the router's address on this host with a client's certificate."""

    engine: Engine
    workers: Workers
    network: str
    folder: Path
    containers: dict[str, str]
    endpoint: str
    client: TlsFiles

    def headrace(self, role: str, *arguments: str) -> tuple[int, str]:
        """Runs `headrace` in a container of the network with the certificate of a role, or with none for an empty role.

        Returns its exit status and what it prints.
        """
        options = ["run", "--rm", f"--network={self.network}", *_confined(_TEMPORARY_MIB)]
        if role:
            options += [f"--volume={self.folder / role}:{_FOLDER}:ro", *_variables()]
        done = self.engine.attempt(
            *(*options, "--entrypoint=headrace", image_of("registry", self.workers), *arguments)
        )
        return done.returncode, done.stdout + done.stderr


def _confined(temporary_mib: int) -> list[str]:
    return [*_CONFINED, f"--tmpfs=/tmp:rw,noexec,nosuid,nodev,size={temporary_mib}m,mode=1777"]


def _variables() -> list[str]:
    named = TlsFiles(f"{_FOLDER}/certificate.pem", f"{_FOLDER}/key.pem", f"{_FOLDER}/authority.pem")
    return [f"--env=HEADRACE_{name.upper()}={path}" for name, path in asdict(named).items()]


@contextmanager
def deployed(
    engine: Engine, folder: Path, workers: Workers, services: Sequence[str]
) -> Iterator[Deployment]:
    """Starts the containers and waits until all are healthy. Removes them, and prints their logs after a failure."""
    prefix = f"headrace-test-{secrets.token_hex(3)}"
    containers = {service: f"{prefix}-{service}" for service in services}
    client = _create_credentials(folder, services)
    try:
        engine.call("network", "create", prefix)
        for service in services:
            _start(engine, prefix, folder, service, workers)
        for container in containers.values():
            wait_healthy(engine, container, workers.ready_timeout_s)
        published = engine.call("port", containers["router"], f"{ports.ROUTER}/tcp").split()[0]
        yield Deployment(engine, workers, prefix, folder, containers, published, client)
    except BaseException:
        for service, container in containers.items():
            print(f"--- {service}\n{engine.logs(container)}", flush=True)
        raise
    finally:
        engine.remove(list(containers.values()), prefix)


def _create_credentials(folder: Path, services: Sequence[str]) -> TlsFiles:
    """A folder for each role, which its container mounts. Returns the files of a client."""
    authority = Authority(folder / "authority")
    for role in (*services, "operator"):
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


def _settings(service: str, workers: Workers) -> tuple[str, ...]:
    if service in _WORKERS:
        return (f"--worker-id={service}-0", *workers.flags)
    if service == "router":
        listen = (f"--listen=0.0.0.0:{ports.ROUTER}", f"--advertise=router:{ports.ROUTER}")
        return (*listen, f"--model={workers.model}")
    return ("--model=sim",) if service == "planner" else ()


def _start(engine: Engine, network: str, folder: Path, service: str, workers: Workers) -> None:
    flags = [
        *_settings(service, workers),
        f"--internal-listen=0.0.0.0:{_INTERNAL[service]}",
        f"--internal-advertise={service}:{_INTERNAL[service]}",
        f"--tls-certificate-file={_FOLDER}/certificate.pem",
        f"--tls-key-file={_FOLDER}/key.pem",
        f"--tls-authority-file={_FOLDER}/authority.pem",
    ]
    if service != "registry":
        flags.append(f"--registry=registry:{ports.REGISTRY}")
    published = (f"--publish=127.0.0.1::{ports.ROUTER}",) if service == "router" else ()
    volumes = {folder / service: _FOLDER}
    temporary_mib = _TEMPORARY_MIB
    if service in _WORKERS:
        temporary_mib = workers.temporary_mib
    if service in (*_WORKERS, "router"):
        volumes |= workers.volumes
    engine.call(
        *("run", "--detach", f"--name={network}-{service}", f"--network={network}"),
        *(f"--network-alias={service}", *_confined(temporary_mib), *published),
        *(f"--volume={source}:{target}:ro" for source, target in volumes.items()),
        *(f"--env={variable}" for variable in workers.environment),
        *(image_of(service, workers), *flags),
    )


def wait_healthy(engine: Engine, container: str, timeout_s: float) -> None:
    """Returns when the image's own health check succeeds. Raises ContainerError when the container ends first."""
    image = engine.inspect("container", container)["Config"]
    check: Sequence[str] = image["Healthcheck"]["Test"]
    if check[0] != "CMD":
        raise ContainerError(f"the health check of {container} needs a shell: {check}")
    give_up = time.monotonic() + timeout_s
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
    raise ContainerError(f"{container} was not healthy within {timeout_s:g} s: {answer}")


def engine_of(root: Path) -> Engine:
    """The engine with which docker/build.sh has built the images. Raises ContainerError when it has not run."""
    program = root / ".cache" / "images" / "engine"
    if not os.access(program, os.X_OK):
        raise ContainerError(f"{program} is missing: run docker/build.sh first")
    return Engine(program)
