"""How many files a KV layer and a token cross, and how many Python calls they cost, as tests/budget.toml promises."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from budget import MEASURED_BY_TEST, read_budget
from headrace.inference.v1 import inference_pb2
from headrace_cli.up.supervisor import Spawn, spawn_program
from tests.suite.deployment import prompt_of, suite

PROBE = Path(__file__).resolve().parents[1] / "paths"
REQUESTS = 10
PROMPT_TOKENS = 64
LAYERS, MORE_LAYERS = 2, 42
TOKENS, MORE_TOKENS = 3, 60
# Slow enough that every layer and every token goes alone. A prompt takes as long with many layers as with few, so what
# is called by time cancels out.
PACE = "prefill_s_per_token=0.001,decode_step_s=0.01"
# How often a thread wakes for a layer depends on the load of the machine.
TOLERANCE = 1.15
SKIPPED = ("libs/headrace/", "libs/headrace_engine/sim/")
"""Not on the path between the engines."""


def real_processes(_: Spawn) -> Spawn:
    return spawn_program


async def run(folder: Path, monkeypatch: pytest.MonkeyPatch, layers: int, tokens: int) -> None:
    """Counts the calls by service and function of a deployment that answers REQUESTS requests."""
    monkeypatch.setenv("HEADRACE_CALLS", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(PROBE))
    models = dict.fromkeys(("prefill", "decode"), f"sim:layers={layers},{PACE}")
    settings = tuple((role, "model", model) for role, model in models.items())
    async with suite(folder, spawning=real_processes, settings=settings) as running:
        for number in range(REQUESTS):
            await running.generate(
                prompt_of(PROMPT_TOKENS, number),
                tokens,
                placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
            )


def read_calls(folder: Path) -> Counter[str]:
    """The calls by service and function."""
    found: Counter[str] = Counter()
    for file in folder.glob("headrace_*.json"):
        service = file.name.partition(".")[0]
        for function, count in json.loads(file.read_text()).items():
            found[f"{service} {function}"] += count
    return found


def growth(more: Counter[str], less: Counter[str], count: int) -> dict[str, float]:
    """The calls for each of `count` more layers or tokens, by function. What is called now and then is left out."""
    grown = {name: (calls - less[name]) / count for name, calls in more.items()}
    return {
        name: calls
        for name, calls in grown.items()
        if calls > 0.9 and not file_of(name).startswith(SKIPPED)
    }


def file_of(name: str) -> str:
    return name.partition(" ")[2].partition(":")[0]


@pytest.mark.core
@pytest.mark.timeout(120)
async def test_a_layer_and_a_token_cross_no_more_files_and_calls_than_the_budget_allows(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        "few": (LAYERS, TOKENS),
        "layers": (MORE_LAYERS, TOKENS),
        "tokens": (LAYERS, MORE_TOKENS),
    }
    calls = {}
    for name, (layers, tokens) in runs.items():
        folder = tmp_path_factory.mktemp(name)
        await run(folder, monkeypatch, layers, tokens)
        calls[name] = read_calls(folder)
    layer = growth(calls["layers"], calls["few"], REQUESTS * (MORE_LAYERS - LAYERS))
    token = growth(calls["tokens"], calls["few"], REQUESTS * (MORE_TOKENS - TOKENS))
    measured = {
        "layer_files": len(set(map(file_of, layer))),
        "layer_calls": round(sum(layer.values())),
        "token_files": len(set(map(file_of, token))),
        "token_calls": round(sum(token.values())),
    }
    print(measured)
    budget = read_budget()[MEASURED_BY_TEST]
    assert min(measured.values()) > 0
    assert {name: n for name, n in measured.items() if n > TOLERANCE * budget[name]} == {}, (
        layer,
        token,
    )
