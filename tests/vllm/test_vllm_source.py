"""Headrace's use of vLLM, checked by types against a source tree that is not imported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.vllm.vllm_source import differences, errors, installed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]


def test_the_installed_vllm_lacks_nothing_that_headrace_uses() -> None:
    assert differences(installed()) == ([], [])


def test_names_that_a_tree_lacks_are_found_where_headrace_uses_them(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    shutil.copytree(
        installed() / "vllm",
        package,
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.json"),
    )

    def rename(file: str, old: str, new: str) -> None:
        text = (package / file).read_text(encoding="utf-8")
        assert old in text
        (package / file).write_text(text.replace(old, new), encoding="utf-8")

    rename("v1/core/block_pool.py", "def touch(", "def touched(")
    rename("v1/engine/async_llm.py", "disable_log_stats", "no_log_stats")
    rename("lora/request.py", "class LoRARequest", "class AdapterRequest")
    rename("utils/argparse_utils.py", "FlexibleArgumentParser", "Parser")
    found = {(text.partition(":")[0], code) for text, code in errors(tmp_path).items()}
    package_of_ours = "libs/headrace_engine/vllm"
    assert {
        ("what contract.py lists", "attr-defined"),
        ("what contract.py lists", "call-arg"),
        (f"{package_of_ours}/scheduler/transfers.py", "attr-defined"),
        (f"{package_of_ours}/compat.py", "call-arg"),
        (f"{package_of_ours}/service/adapters.py", "attr-defined"),
        (f"{package_of_ours}/service/engine_args.py", "attr-defined"),
    } <= found
