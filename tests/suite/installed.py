"""The wheel in environments of its own: all services, the client alone, and a decode worker with HTTP of its own.

    python -m tests.suite.installed [--versions constraints|lowest|newest] [--one] [PYTHON...]

installs them with each PYTHON, or with the first of this machine, from pip's index. Then it asks one question of each
deployment. The output names the interpreters that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from packaging.requirements import Requirement

from build_dist import build
from lock_requirements import ROOT, roots_of
from tests.ports import free_port

CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
PYTHONS = ("python3.11", "python3.12", "python3.13")
CLIENT = ("client",)
SERVICES = ("router", "sim")
CLIENT_PACKAGES = {
    "googleapis-common-protos",
    "grpcio",
    "grpcio-status",
    "headrace",
    "protobuf",
    "typing-extensions",
}
"""What a client needs, and nothing else."""
WORKER = ("registry", "http", "sim")
"""For a decode worker with HTTP of its own, without a router."""
INSTALL_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0
_CHAT = """
import asyncio, sys
from headrace_client import Client

async def main():
    async with Client(sys.argv[1]) as client:
        pieces = [piece async for piece in client.generate(messages=[("user", "hello")], max_tokens=5)]
    print(sum(len(piece.token_ids) for piece in pieces), "tokens")

asyncio.run(main())
"""
_NAMES = "from importlib.metadata import distributions; print(*(d.metadata['Name'] for d in distributions()))"


def install(
    folder: Path, archive: Path, extras: Sequence[str], options: Sequence[str | Path], python: str
) -> Path:
    """A new environment of `python` with an archive or wheel, its extras and what they need. `options` are pip's."""
    subprocess.run(
        [python, "-m", "venv", "--without-pip", folder], timeout=CALL_TIMEOUT_S, check=True
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"),
            *("-qq", "--no-compile", "--only-binary=:all:", "--disable-pip-version-check"),
            *(*options, f"{archive}[{','.join(extras)}]"),
        ],
        timeout=INSTALL_TIMEOUT_S,
        check=True,
    )
    return folder


def installed_names(environment: Path) -> set[str]:
    """The distributions in an environment."""
    names = run(environment / "bin" / "python", "-I", "-c", _NAMES).stdout.split()
    return {name.lower().replace("_", "-") for name in names}


def is_client_alone(client: Path) -> bool:
    """Whether an environment has the client and nothing else, and its command names the extra that it lacks."""
    surplus = installed_names(client) - CLIENT_PACKAGES
    refused = run(client / "bin" / "headrace", "workers")
    names_extra = refused.returncode == 2 and "needs the extra cli" in refused.stderr
    print(f"the client brings {surplus or 'no other package'}: {refused.stderr.strip()}")
    return not surplus and names_extra


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a program of an environment, which finds nothing of this checkout."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=CALL_TIMEOUT_S,
        env=_environment(),
        check=False,
    )


def chat(client: Path, address: str) -> subprocess.CompletedProcess[str]:
    """Asks the router for 5 tokens with the client library."""
    return run(client / "bin" / "python", "-I", "-c", _CHAT, address)


@contextmanager
def deployed(services: Path, logs: Path) -> Iterator[str]:
    """The client address of `headrace up`, with the simulated engine. Raises AssertionError when it does not start."""
    port = free_port()
    command: list[str | Path] = [services / "bin" / "headrace", "up", "--engine", "sim"]
    with subprocess.Popen(
        [*command, "--port", str(port), "--logs", logs],
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
    ) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            # The line of its addresses follows when all workers are ready. It ends within deadlines of its own.
            for line in process.stderr:
                lines.append(line)
                if "is served on" in line:
                    break
            assert process.poll() is None, "".join(lines)
            yield f"127.0.0.1:{port}"
            process.terminate()
            process.communicate(timeout=STOP_TIMEOUT_S)
            assert process.returncode == 0
        finally:
            process.kill()


def ask_worker(environment: Path, logs: Path) -> str:
    """Asks a decode worker over its own HTTP. Returns the finish reason. Raises when it does not answer in time."""
    logs.mkdir()
    registry, door = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:

        def start(service: str, *flags: str) -> None:
            log = stack.enter_context((logs / service).open("wb"))
            command: list[str | Path] = [environment / "bin" / f"headrace-{service}", *flags]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
            )
            stack.callback(process.kill)

        start("registry", f"--internal-listen={registry}")
        start(
            *("decode", f"--registry={registry}", "--model=sim", "--worker-id=decode-0"),
            *(f"--http-listen={door}", "--internal-listen=127.0.0.1:0"),
        )
        body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5})
        asked = urllib.request.Request(
            f"http://{door}/v1/chat/completions",
            body.encode(),
            {"content-type": "application/json"},
        )
        ends_s = time.monotonic() + CALL_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(asked, timeout=CALL_TIMEOUT_S) as response:
                    return str(json.load(response)["choices"][0]["finish_reason"])
            except OSError as error:
                if time.monotonic() > ends_s:
                    log = (logs / "decode").read_text()
                    raise TimeoutError(f"{door} does not answer ({error}):\n{log}") from error
                time.sleep(0.2)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _version_options(versions: str, folder: Path) -> list[str | Path]:
    if versions == "newest":
        return []
    if versions == "constraints":
        return ["--constraint", CONSTRAINTS]
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = [f"headrace[{extra}]" for extra in (*CLIENT, *SERVICES, *WORKER)]
    lowest = folder / "lowest.txt"
    with lowest.open("w", encoding="utf-8") as file:
        for root in map(Requirement, roots_of(pyproject, names)):
            (bound,) = [each.version for each in root.specifier if each.operator == ">="]
            print(f"{root.name}=={bound}", file=file)
    return ["--constraint", lowest]


def _interpreter(name: str) -> str | None:
    """The program of this name, if it runs."""
    path = shutil.which(name)
    if path is None or (
        # A program of pyenv may stand for a version that is not chosen.
        subprocess.run([path, "-c", ""], check=False, timeout=CALL_TIMEOUT_S).returncode
    ):
        print(f"{name}: not on this machine")
        return None
    return path


def main() -> int:
    """Returns 0 when at least one Python was tested, and all answers were as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=PYTHONS)
    parser.add_argument(
        "--versions", choices=("constraints", "lowest", "newest"), default="constraints"
    )
    parser.add_argument("--one", action="store_true", help="only the first Python found")
    options = parser.parse_args()
    found = [path for name in options.pythons if (path := _interpreter(name))]
    if options.one:
        del found[1:]
    if not found:
        print("no Python was tested", file=sys.stderr)
        return 1
    failed = False
    with tempfile.TemporaryDirectory(prefix="headrace-installed-") as name:
        archive, wheel = build(Path(name) / "dist")
        chosen = _version_options(options.versions, Path(name))
        for python in found:
            folder = Path(name) / Path(python).name
            # The client comes from the source archive, so pip builds with the requirements that pyproject.toml states.
            wanted = ((archive, CLIENT), (wheel, SERVICES), (wheel, WORKER))
            with ThreadPoolExecutor() as pool:
                installing = [
                    pool.submit(install, folder / "-".join(extras), file, extras, chosen, python)
                    for file, extras in wanted
                ]
            client, services, worker = (one.result() for one in installing)
            failed = failed or not is_client_alone(client)
            with deployed(services, folder / "logs") as address:
                done = chat(client, address)
            print(f"{python}, {options.versions}: {done.stdout.strip() or done.stderr.strip()}")
            failed = failed or done.returncode != 0
            reason = ask_worker(worker, folder / "worker-logs")
            print(f"{python}, {options.versions}, a worker's HTTP: {reason}")
            failed = failed or reason != "length"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
