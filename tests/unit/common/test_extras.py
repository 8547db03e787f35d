"""What a command prints when an extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_cli.up.deployment import require_extras
from headrace_cli.up.topology import SIM, Topology
from headrace_common import extras
from headrace_common.errors import ConfigError
from headrace_common.extras import MODULES, install_command
from tests.unit.test_architecture import ROOT

SOURCES = (
    "libs",
    *(f"services/{name}" for name in ("registry", "router", "prefill", "decode", "planner")),
)
TIMEOUT_S = 60.0
# Hides modules as if their distributions were not installed.
HIDING = """
import importlib.abc, runpy, sys
hidden = set(sys.argv[1].split(","))
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
module, sys.argv = sys.argv[2], sys.argv[2:]
if module == "headrace_client":
    import headrace_client
else:
    runpy.run_module(module, run_name="__main__")
"""


def _hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = extras._installed
    monkeypatch.setattr(
        extras, "_installed", lambda module: module not in modules and found(module)
    )


@pytest.mark.parametrize(
    ("module", "argument", "hidden", "extra"),
    [
        ("headrace_cli", "workers", "typer", "cli"),
        ("headrace_registry", "--help", "uvloop", "registry"),
        ("headrace_planner_service", "--help", "uvloop", "planner"),
        ("headrace_router", "--help", "sortedcontainers", "router"),
        ("headrace_prefill", "--help", "pydantic", "worker"),
        ("headrace_decode", "--help", "numpy", "worker"),
    ],
)
def test_a_program_names_the_extra_that_it_lacks(
    module: str, argument: str, hidden: str, extra: str
) -> None:
    done = _run(hidden, module, argument)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"needs the extra {extra}" in done.stderr
    assert install_command(extra) in done.stderr
    assert hidden in done.stderr


@pytest.mark.parametrize(
    ("hidden", "topology", "extra"),
    [
        ("httptools", Topology(engine=SIM), "router"),
        ("etcd3", Topology(engine=SIM, store="etcd://127.0.0.1:2379"), "etcd"),
        ("xxhash", Topology(engine=SIM), "router"),
        ("mooncake", Topology(engine=SIM), "sim"),
        ("vllm", Topology(), "vllm-cpu or vllm-cuda"),
    ],
)
def test_up_names_the_extra_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, hidden: str, topology: Topology, extra: str
) -> None:
    _hide(monkeypatch, hidden)
    with pytest.raises(ConfigError, match=f"the extra {extra}") as caught:
        require_extras(topology)
    assert hidden in caught.value.metadata["module"]


def test_the_client_imports_no_module_of_an_extra() -> None:
    # What its own requirements install is allowed: tests/suite/test_installation.py installs no more.
    modules = {module for found in MODULES.values() for module in found}
    done = _run(",".join(sorted(modules)), "headrace_client")

    assert done.returncode == 0, done.stderr


def _run(hidden: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a package as a program without the hidden modules. Imports headrace_client, which is none."""
    path = [str(ROOT / source) for source in SOURCES]
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = {path!r}\n{HIDING}",
            hidden,
            module,
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
