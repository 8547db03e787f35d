"""Builds the clients in other languages: python scripts/build_clients.py [--install] [LANGUAGE ...]

The sources are in tests/clients/LANGUAGE, and the program is build/clients/LANGUAGE/chat. Nothing is built again from
the same sources. With --install, root installs the Debian packages that are missing. Otherwise their languages are
skipped.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import google.rpc.error_details_pb2

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ROOT / "tests/clients"
BUILT: Final = ROOT / "build/clients"
PROTOS: Final = ROOT / "protos"
GOOGLE_PROTOS: Final = ("google/rpc/status.proto", "google/rpc/error_details.proto")
LANGUAGES: Final = tuple(sorted(path.parent.name for path in SOURCES.glob("*/packages.txt")))
BUILD_TIMEOUT_S: Final = 900.0
INSTALL_TIMEOUT_S: Final = 500.0
_LOG_CHARACTERS: Final = 3_000


class BuildError(Exception):
    """A client could not be built. The text has the end of the compiler's output."""


def missing_packages(language: str) -> list[str]:
    """The Debian packages that a client needs and that are not there, by the programs and files that they have."""
    lines = (SOURCES / language / "packages.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split() for line in lines if not line.startswith("#")]
    return [package for package, sign in pairs if not _is_there(sign)]


def _is_there(sign: str) -> bool:
    return Path(sign).exists() if sign.startswith("/") else shutil.which(sign) is not None


def is_built(language: str) -> bool:
    """Whether the program is that of the sources."""
    stamp = BUILT / language / "inputs"
    return stamp.exists() and stamp.read_text() == _hash_of(language)


def build(language: str) -> Path:
    """Builds a client unless it was built from the same sources. Returns the program. Raises BuildError."""
    out = BUILT / language
    out.mkdir(parents=True, exist_ok=True)
    program, stamp = out / "chat", out / "inputs"
    with _locked(BUILT / f"{language}.lock"):
        if is_built(language):
            return program
        wanted = _hash_of(language)
        stamp.unlink(missing_ok=True)
        environment = {**os.environ, "PROTOS": str(PROTOS), "GOOGLEAPIS": str(_google_protos())}
        try:
            subprocess.run(
                [str(SOURCES / language / "build.sh"), str(out)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=BUILD_TIMEOUT_S,
                check=True,
                text=True,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{language}: not built within {BUILD_TIMEOUT_S:g} s") from error
        except subprocess.CalledProcessError as error:
            raise BuildError(f"{language}:\n{error.stdout[-_LOG_CHARACTERS:]}") from error
        stamp.write_text(wanted)
    return program


def _hash_of(language: str) -> str:
    digest = hashlib.sha256()
    sources = [path for path in (SOURCES / language).iterdir() if path.is_file()]
    for path in (*sorted(sources), *sorted(PROTOS.glob("headrace/inference/v1/*.proto"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _google_protos() -> Path:
    """A folder with the protos of error details, which Python's googleapis-common-protos brings."""
    folder = BUILT / "googleapis"
    with _locked(BUILT / "googleapis.lock"):
        for name in GOOGLE_PROTOS:
            installed = Path(google.rpc.error_details_pb2.__file__).parent / Path(name).name
            target = folder / name
            if not target.exists() or target.read_bytes() != installed.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(installed, target)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(packages: list[str]) -> None:
    """Installs Debian packages. Raises BuildError where apt-get cannot."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid():
        raise BuildError(f"Debian packages are missing; run: sudo {' '.join(command)}")
    print(f"installing Debian packages: {' '.join(packages)}", flush=True)
    for step in (["apt-get", "update"], command):
        done = subprocess.run(
            step,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            text=True,
        )
        if done.returncode:
            raise BuildError(f"apt-get failed:\n{done.stdout[-_LOG_CHARACTERS:]}")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install missing Debian packages")
    parser.add_argument("languages", nargs="*", metavar="LANGUAGE", help=", ".join(LANGUAGES))
    options = parser.parse_args()
    chosen = options.languages or LANGUAGES
    if unknown := set(chosen) - set(LANGUAGES):
        parser.error(f"no client in {', '.join(sorted(unknown))}: choose {', '.join(LANGUAGES)}")
    try:
        wanted = {package for language in chosen for package in missing_packages(language)}
        if wanted and options.install:
            install(sorted(wanted))
        for language in chosen:
            if missing := missing_packages(language):
                print(f"{language}: SKIPPED, without the Debian packages {' '.join(missing)}")
                continue
            started_s = time.monotonic()
            program = build(language)
            took_s = time.monotonic() - started_s
            print(f"{language}: {program.relative_to(ROOT)} ({took_s:.1f} s)", flush=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
