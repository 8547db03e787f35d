"""The profiles that are computed for workers, and the search among ways to use devices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_pace.accelerators import ACCELERATORS as PACES
from headrace_common.errors import ConfigError
from headrace_kv.model_layout import kv_layout, prompt_bytes
from headrace_simulator.accelerators import (
    ACCELERATORS,
    LoadSize,
    computed_profile,
    sent_s_per_byte,
    tensor_parallel_sizes,
    work_of,
)
from headrace_simulator.advice import (
    BOTH,
    PLAIN,
    POOLS,
    REQUESTS_MAX,
    Fleet,
    Search,
    Spread,
    busiest,
    fleets_of,
    made_load,
    reason,
)
from headrace_simulator.settings import Way
from tests.unit.kv.test_model_layout import config_of
from tests.unit.simulator.samples import request

H100 = ACCELERATORS["H100"]
LOAD = LoadSize(4_000, 200, 16_000)


@pytest.mark.parametrize(
    ("model", "billions", "active", "bytes_each"),
    [("llama-3.3-70b", 70.6, 69.5, 2), ("qwen3-8b", 8.19, 7.57, 2), ("deepseek-v3", 671, 37, 1)],
)
def test_weights_are_those_of_the_published_models(
    model: str, billions: float, active: float, bytes_each: int
) -> None:
    work = work_of(config_of(model))
    assert work.weight_bytes == pytest.approx(1e9 * billions * bytes_each, rel=0.01)
    assert work.active_parameters == pytest.approx(1e9 * active, rel=0.03)


def test_a_computed_profile_has_the_pace_that_engines_were_measured_at() -> None:
    profile = computed_profile(config_of("llama-3.3-70b"), H100, 4, 400, LOAD)
    assert profile is not None
    pace, steps = PACES["70b-4xh100"], profile.steps
    # The pace has no overhead of ranks and steps.
    assert 1e3 * steps.fixed_s == pytest.approx(pace.step_ms, rel=0.3)
    assert 1e6 * steps.s_per_prompt_token == pytest.approx(pace.token_us, rel=0.3)
    assert steps.s_per_prompt_token / steps.s_per_attended_token == pytest.approx(53e3, rel=0.3)
    assert profile.kv_bytes_per_token == 327_680
    assert "not measured" in profile.measured


def test_only_workers_that_start_are_proposed() -> None:
    llama, deepseek = config_of("llama-3.3-70b"), config_of("deepseek-v3")
    assert tensor_parallel_sizes(llama, H100, 8) == [1, 2, 4, 8]
    started = [
        size for size in (1, 2, 4, 8) if computed_profile(llama, H100, size, 100, LOAD) is not None
    ]
    assert started == [4, 8]
    assert computed_profile(deepseek, H100, 8, 100, LOAD) is None
    found = computed_profile(deepseek, ACCELERATORS["H200"], 8, 100, LOAD)
    # Every rank has a copy of latent KV.
    assert found is not None
    assert 400_000 < found.kv_tokens < 700_000
    small = ACCELERATORS["L40S"].model_copy(update={"machine_devices": 2})
    assert tensor_parallel_sizes(llama, small, 8) == [1, 2]


def test_the_network_takes_the_times_that_capacity_planning_shows() -> None:
    page = Path("docs/operations/capacity.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| ([\d,]+) \| [\d,.]+ MiB \| ([\d,.]+) ms \|", page)
    assert len(rows) == 3
    layout = kv_layout(config_of("deepseek-v3"), 8)
    for tokens, time_ms in rows:
        sent_bytes = prompt_bytes(layout, int(tokens.replace(",", "")))
        found = 1e3 * sent_bytes * sent_s_per_byte(100)
        assert found == pytest.approx(float(time_ms.replace(",", "")), abs=0.02)


def results(shares: Mapping[tuple[str, int], float], asked: list[Fleet]) -> Any:
    """Simulates nothing: `shares` are those of a kind with at least so many workers."""

    known = {**dict.fromkeys(((PLAIN, 0), (POOLS, 0), (BOTH, 0)), 0.1), **shares}

    def simulate(ranks: int, fleets: Sequence[Fleet]) -> list[dict[str, Any]]:
        asked.extend(fleets)
        found = [
            max(s for (k, n), s in known.items() if k == one.kind and n * ranks <= one.devices)
            for one in fleets
        ]
        return [{"attainment": one, "ttft_attainment": 1.0, "itl_attainment": one} for one in found]

    return simulate


@pytest.mark.parametrize(
    ("shares", "kind", "devices", "why"),
    [
        ({(PLAIN, 3): 0.95, (BOTH, 3): 0.99}, PLAIN, 3, "Do not disaggregate"),
        ({(PLAIN, 6): 0.95, (BOTH, 3): 0.99}, BOTH, 3, "They need 8 devices"),
        (
            {(PLAIN, 1): 0.2, (POOLS, 5): 0.91},
            POOLS,
            5,
            "for 20% of the requests: prompts delay running answers",
        ),
        ({(BOTH, 2): 0.6}, BOTH, 2, "No way keeps the bounds"),
    ],
)
def test_the_cheapest_way_that_keeps_the_bounds_is_chosen(
    shares: dict[tuple[str, int], float], kind: str, devices: int, why: str
) -> None:
    asked: list[Fleet] = []
    search = Search(results(shares, asked))
    best = search.run({1: 8})
    if best.is_good:
        assert best.fleet.devices == devices
    assert best.fleet.kind == kind
    assert why in reason(best, search.outcomes.values())
    assert len(asked) == len(set(asked))


def test_every_split_of_the_workers_is_tried() -> None:
    fleets = fleets_of(2, 4)
    assert [one.kind for one in fleets] == [PLAIN, POOLS, POOLS, POOLS, BOTH]
    assert {one.devices for one in fleets} == {8}
    assert fleets[0].settings(1.0, 0.1).way is Way.PLAIN
    assert len(fleets_of(1, 16)) == 17
    assert len(fleets_of(1, 1_000)) < 20
    assert fleets[2].settings(1.0, 0.1).prefill_workers == 2


def test_a_made_load_has_the_lengths_rate_and_hits_that_were_asked_for() -> None:
    load = made_load(Spread(4_000, 2_000), Spread(300), 5.0, 0.5, count=2_000)
    assert sum(one.prompt_tokens for one in load) / 2_000 == pytest.approx(4_000, rel=0.1)
    assert {one.answer_tokens for one in load} == {300}
    assert load[-1].arrival_s == pytest.approx(400, rel=0.1)
    shared = sum(len(one.hash_ids) * 512 for one in load) / sum(one.prompt_tokens for one in load)
    assert shared == pytest.approx(0.5, abs=0.1)
    with pytest.raises(ConfigError, match="--prompt-tokens 4k: give MEAN"):
        Spread.of("--prompt-tokens", "4k")


def test_the_busiest_part_of_a_trace_is_replayed_at_the_asked_rate() -> None:
    slow = [request(number, 10.0 * number) for number in range(REQUESTS_MAX)]
    fast = [
        request(REQUESTS_MAX + number, 1e5 + 0.5 * number, ids=(number,))
        for number in range(REQUESTS_MAX)
    ]
    part = busiest([*slow, *fast])
    assert [one.number for one in part] == list(range(REQUESTS_MAX))
    assert part[0].arrival_s == 0
    assert part[-1].hash_ids == (REQUESTS_MAX - 1,)
    assert busiest(fast, rate=4.0)[-1].arrival_s == pytest.approx((REQUESTS_MAX - 1) / 4)
