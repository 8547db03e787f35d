"""A chaos run depends on its seed alone, however slow the machine is."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

from tests.chaos.plan import ChaosPlan, process_faults, requests, scenario, slowed

SLOWNESS = 5.0
NO_TIMES = {
    *("seed", "requests", "concurrency", "decode_tensor_parallel", "prefill_tensor_parallel"),
    *("routers", "wire", "kinds", "layer_s", "block_count", "head_bytes", "credentials"),
}
WIRE_TIMES = {
    *("delay_max_s", "cut_after_silence_s", "slow_write_max_s", "slow_turn_max_s"),
    "watch_interval_s",
}


def test_a_seed_gives_the_same_run() -> None:
    one, other = scenario("all", 7, 50), scenario("all", 7, 50)
    assert list(requests(one)) == list(requests(other))
    assert list(islice(process_faults(one), 40)) == list(islice(process_faults(other), 40))


def test_a_slow_machine_gets_more_time_and_the_same_requests_and_faults() -> None:
    plan = scenario("all", 7, 50)
    slow = slowed(plan, SLOWNESS)
    for quick_request, slow_request in zip(requests(plan), requests(slow), strict=True):
        assert quick_request.prompt == slow_request.prompt
        assert quick_request.answer_tokens == slow_request.answer_tokens
        assert (quick_request.cancel_after_s is None) == (slow_request.cancel_after_s is None)
    faults = zip(islice(process_faults(plan), 40), islice(process_faults(slow), 40), strict=True)
    for quick, slower in faults:
        assert (slower.kind, slower.target) == (quick.kind, quick.target)
        assert slower.gap_s == quick.gap_s * SLOWNESS
        assert slower.down_s == quick.down_s * SLOWNESS


def test_only_times_are_scaled() -> None:
    plan = ChaosPlan(1, 10)
    before, after = asdict(plan), asdict(slowed(plan, SLOWNESS))
    for name, value in before.items():
        if name == "freezes_s":
            assert after[name] == [freeze_s * SLOWNESS for freeze_s in value]
        elif name == "wire":
            for wire_name, wire_value in value.items():
                times = SLOWNESS if wire_name in WIRE_TIMES else 1
                assert after[name][wire_name] == (wire_value * times if times != 1 else wire_value)
        else:
            assert after[name] == (value if name in NO_TIMES else value * SLOWNESS), name


def test_only_a_run_with_a_pool_breaks_its_store() -> None:
    def targets(plan: ChaosPlan) -> set[str]:
        return {fault.target.partition("-")[0] for fault in islice(process_faults(plan), 200)}

    everything = {"prefill", "decode", "router", "registry", "etcd"}
    assert targets(scenario("all", 7, 50)) == everything
    assert targets(scenario("all", 7, 50, pool=True)) == {*everything, "pool"}
    assert targets(scenario("pool", 7, 50)) == {"pool"}
