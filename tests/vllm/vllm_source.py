"""Checks Headrace's use of vLLM against a source tree of vLLM, without importing it.

    python -m tests.vllm.vllm_source FOLDER

FOLDER has the package `vllm`, as an unpacked wheel has. mypy checks the modules that import vLLM against that package:
imports, attributes, calls, overridden and replaced methods. It also checks what contract.py lists, because types do not
show every use. Prints names that are missing, and other errors that the installed vLLM does not cause. The exit status
is then 1.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from headrace_engine.vllm.service.engine_args import LORA_PARSER_MODULES
from tests.vllm.contract import BASE, CALLS, ENVIRONMENT, FIELDS, HOOKS, PROPERTIES

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("libs", "services", "bench", "tests")
"""Folders of modules that may import vLLM."""
MISSING: Final = frozenset(
    ("attr-defined", "call-arg", "call-overload", "import-not-found", "name-defined")
)
"""mypy's codes for names and parameters that do not exist."""
_CONTRACT: Final = "what contract.py lists"
# With these, mypy finds the fields and parameters of vLLM's configurations and messages.
_TYPED: Final = (
    "annotated_types",
    "msgspec",
    "numpy",
    "pydantic",
    "pydantic_core",
    "typing_inspection",
)
_IMPORT: Final = re.compile(r"^\s*(?:from|import) vllm\b", re.MULTILINE)
_ERROR: Final = re.compile(r"^(?P<file>.+?):(?P<line>\d+): error: (?P<text>.*)  \[(?P<code>.+)\]$")
_TIMEOUT_S: Final = 300.0


def installed() -> Path:
    """The folder of the installed package. Does not import it."""
    return _package("vllm").parent


def differences(folder: Path) -> tuple[list[str], list[str]]:
    """What this vLLM lacks, and mypy's other errors that the installed vLLM does not cause."""
    found = errors(folder)
    lacks = [text for text, code in found.items() if code in MISSING]
    variables = (folder / "vllm/envs.py").read_text(encoding="utf-8")
    lacks += [
        f"{name} is not read from the environment"
        for name in ENVIRONMENT
        if f'"{name}":' not in variables
    ]
    if not any(_module_file(folder, name) for name in LORA_PARSER_MODULES):
        lacks.append(f"none of {', '.join(LORA_PARSER_MODULES)}")
    others = [text for text, code in found.items() if code not in MISSING]
    if not others or folder.resolve() == installed().resolve():
        return lacks, []
    usual = errors(installed())
    return lacks, [text for text in others if text not in usual]


def errors(folder: Path) -> dict[str, str]:
    """mypy's errors in our modules with this vLLM, each with its code."""
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-source-") as name:
        own = Path(name)
        packages = own / "packages"
        packages.mkdir()
        # In the whole of site-packages, mypy would find modules that this vLLM lacks.
        (packages / "vllm").symlink_to(folder.resolve() / "vllm")
        for typed in _TYPED:
            (packages / typed).symlink_to(_package(typed))
        contract = own / "contract.py"
        contract.write_text(uses(folder), encoding="utf-8")
        config = own / "mypy.ini"
        config.write_text(
            "[mypy]\npython_version = 3.11\nno_site_packages = true\ncheck_untyped_defs = true\n"
            "explicit_package_bases = true\nnamespace_packages = true\nfollow_imports = silent\n"
            f"ignore_missing_imports = true\nmypy_path = {packages}:{ROOT / 'libs'}:{ROOT}\n"
            f"cache_dir = {own / 'cache'}\n[mypy-vllm.*]\nignore_missing_imports = false\n",
            encoding="utf-8",
        )
        files = {str(file.relative_to(ROOT)): str(file.relative_to(ROOT)) for file in importers()}
        files[str(contract)] = _CONTRACT
        command = (sys.executable, "-m", "mypy", "--config-file", str(config))
        done = subprocess.run(
            (*command, "--no-error-summary", "--no-pretty", *files),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = filter(None, map(_ERROR.match, done.stdout.splitlines()))
    return {
        f"{files[one['file']]}:{one['line']}: {one['text']}": one["code"]
        for one in found
        if one["file"] in files
    }


def importers() -> list[Path]:
    """The modules of this checkout that import vLLM."""
    return [
        file
        for part in PARTS
        for file in sorted((ROOT / part).rglob("*.py"))
        if _IMPORT.search(file.read_text(encoding="utf-8"))
    ]


def uses(folder: Path) -> str:
    """A module that calls and reads all that the contract lists."""
    base = f"{BASE}.KVConnectorBase_V1"
    calls = {f"{base}.{name}": names for name, names in HOOKS.items()}
    calls |= {name: tuple(given.split()) for name, given in CALLS.items()}
    lines = ["from typing import Any"]
    for number, (name, parameters) in enumerate(calls.items()):
        module, owner, member = _split(folder, name.removesuffix(".__init__"))
        given = ", ".join(f"{one}=it" for one in parameters if one != "kwargs")
        lines += [f"import {module}", f"def call_{number}(one: Any, it: Any) -> None:"]
        if owner:
            lines[-1] = f"def call_{number}(one: {module}.{owner}, it: Any) -> None:"
        lines.append(f"    {'one' if owner else module}.{member}({given})")
    for number, (name, fields) in enumerate({base: " ".join(PROPERTIES), **FIELDS}.items()):
        module, _, kind = _split(folder, name)
        lines += [f"import {module}", f"def read_{number}(one: {module}.{kind}) -> None:"]
        lines += [f"    one.{field}" for field in fields.split()] or ["    pass"]
    return "\n".join(lines)


def _split(folder: Path, name: str) -> tuple[str, str, str]:
    """The module of a dotted name, the class of a method, and the last part."""
    parts = name.split(".")
    count = len(parts) - 1
    while count > 1 and not _module_file(folder, ".".join(parts[:count])):
        count -= 1
    return ".".join(parts[:count]), ".".join(parts[count:-1]), parts[-1]


def _module_file(folder: Path, name: str) -> Path | None:
    path = folder.joinpath(*name.split("."))
    return next(
        (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None
    )


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None, f"{name} is not installed"  # noqa: PT018
    return Path(spec.origin).parent


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="a folder with the package vllm")
    lacks, differs = differences(parser.parse_args().folder)
    for text in (*(f"missing: {one}" for one in lacks), *(f"different: {one}" for one in differs)):
        print(text)
    print(f"{len(lacks)} missing, {len(differs)} different from the installed vLLM")
    return int(bool(lacks or differs))


if __name__ == "__main__":
    sys.exit(main())
