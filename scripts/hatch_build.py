"""Adds the compiled protos to a wheel. hatchling runs it, and also builds from a clone without libs/headrace."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles the protos aside. An editable installation has them in libs/headrace, as a checkout has."""

    PLUGIN_NAME = "stubs"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before hatchling collects the files. `version` is "standard" or "editable"."""
        if self.target_name != "wheel":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-stubs-"))
        _compile_into(self._folder, Path(self.root))
        stubs = self._folder / "headrace"
        if version == "editable":
            checkout = Path(self.root) / "libs" / "headrace"
            shutil.rmtree(checkout, ignore_errors=True)
            shutil.copytree(stubs, checkout)
        else:
            build_data["force_include"][str(stubs)] = "headrace"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the archive is complete."""
        if self.target_name == "wheel":
            shutil.rmtree(self._folder, ignore_errors=True)


def _compile_into(folder: Path, root: Path) -> None:
    # hatchling loads this file by its path, so the module beside it cannot be imported by name.
    path = root / "scripts" / "compile_protos.py"
    specification = importlib.util.spec_from_file_location("compile_protos", path)
    if specification is None or specification.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.compile_protos(folder)
