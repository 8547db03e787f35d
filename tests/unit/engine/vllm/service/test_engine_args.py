"""Arguments for vLLM that are checked before vLLM is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.config import EngineConfig
from headrace_engine.factory import build_engine
from headrace_engine.vllm.service.engine_args import (
    ARGUMENTS_MAX,
    REFUSED,
    SETTINGS,
    check_combinations,
    fingerprint_with,
    link_address,
    node_rank,
    split_engine_args,
    take_kv_events,
    take_offloading,
)
from headrace_engine.worker.config import WorkerConfig
from headrace_kv.layout import WorkerRef


def test_arguments_are_split_as_in_a_shell() -> None:
    text = """--quantization fp8 --hf-overrides '{"a": 1}' --no-enable-prefix-caching"""
    assert split_engine_args(text) == (
        *("--quantization", "fp8", "--hf-overrides", '{"a": 1}'),
        "--no-enable-prefix-caching",
    )
    assert split_engine_args("") == ()


@pytest.mark.parametrize("name", [*SETTINGS, *REFUSED])
@pytest.mark.parametrize("form", ["--{dashed} 1", "--{name}=1", "--no-{dashed}", "--{dashed}.x 1"])
def test_an_argument_that_headrace_owns_is_refused_by_name(name: str, form: str) -> None:
    argument = form.format(name=name, dashed=name.replace("_", "-"))
    with pytest.raises(ConfigError) as caught:
        split_engine_args(f"--max-logprobs 5 {argument}")
    assert caught.value.metadata["field"] == "engine_args"
    assert f"engine_args: {name} " in caught.value.detail
    assert SETTINGS.get(name, REFUSED.get(name, "")) in caught.value.detail


def test_vllms_offloading_is_the_only_other_connector() -> None:
    config = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config={"a": 1})
    given: dict[str, object] = {"seed": 3}
    assert take_offloading(given) is None
    given |= {"kv_offloading_size": 0.5}
    assert take_offloading(given) == {"cpu_bytes_to_use": 1 << 29}
    given |= {"kv_transfer_config": config}
    assert take_offloading(given) == {"a": 1}
    assert given == {"seed": 3}
    config.kv_connector = "NixlConnector"
    with pytest.raises(ConfigError, match="NixlConnector, and OffloadingConnector is the only"):
        take_offloading({"kv_transfer_config": config})


def test_others_read_kv_events_without_a_replay() -> None:
    config = SimpleNamespace(publisher="zmq", replay_endpoint=None)
    given: dict[str, object] = {"seed": 3, "kv_events_config": config}
    assert take_kv_events(given) is config
    assert (take_kv_events(given), given) == (None, {"seed": 3})
    config.publisher = "null"
    assert take_kv_events({"kv_events_config": config}) is None
    config = SimpleNamespace(publisher="zmq", replay_endpoint="tcp://*:1")
    with pytest.raises(ConfigError, match="replay_endpoint"):
        take_kv_events({"kv_events_config": config})


def test_all_refused_arguments_are_named_together() -> None:
    with pytest.raises(ConfigError) as caught:
        split_engine_args("--dtype half --kv-offloading-backend lmcache --config file.yaml")
    for word in ("set dtype instead", "kv_offloading_backend belongs", "config is no argument"):
        assert word in caught.value.detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--hf-overrides '{", "open quote"),
        ("models/a --quantization fp8", "the model is the setting model"),
        ("-x " * (ARGUMENTS_MAX + 1), f"more than {ARGUMENTS_MAX}"),
    ],
)
def test_broken_texts_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        split_engine_args(text)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data_parallel_size": 2}, "start 2 workers, with the ranks 0 to 1"),
        ({"data_parallel_rank": 1}, "give a rank below the size"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "give a rank below the size"),
        ({"data_parallel_external_lb": True}, "leave it out"),
    ],
)
def test_a_worker_is_one_data_parallel_rank(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_combinations(given, 1)


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        ("", 0),
        ("--nnodes 2 --node-rank 1", 1),
        ("--node_rank=3 -n 4", 3),
        ("-r 2 --seed 1", 2),
        ("--node-rank x", 0),
    ],
)
def test_the_number_of_a_host_is_read_without_vllm(text: str, rank: int) -> None:
    assert node_rank(text) == rank


def test_hosts_of_one_engine_share_the_address_of_the_first() -> None:
    hosts = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.7"}
    check_combinations(hosts, 1)
    assert link_address({}) == ""
    assert link_address(hosts) == "10.0.0.7:29502"
    assert link_address({**hosts, "master_port": 4000}) == "10.0.0.7:4001"
    assert link_address({**hosts, "master_addr": "fd00::7"}) == "[fd00::7]:29502"
    with pytest.raises(ConfigError, match="give the address of the host with node_rank 0"):
        check_combinations({"nnodes": 2}, 1)
    with pytest.raises(ConfigError, match="leave out nnodes, or data_parallel_size"):
        check_combinations({**hosts, "data_parallel_size": 2, "data_parallel_rank": 0}, 1)


def test_data_parallel_ranks_and_experts_are_passed_through() -> None:
    text = "--data-parallel-size 4 --data-parallel-rank 3 --data-parallel-address h --enable-expert-parallel"
    assert split_engine_args(text) == tuple(text.split())
    ranks = {"data_parallel_size": 4, "data_parallel_rank": 3, "enable_expert_parallel": True}
    check_combinations(ranks, 1)
    # Each rank's cache is as that of a worker of its own.
    assert fingerprint_with("m:1", ranks) == "m:1"


def test_only_arguments_about_kv_change_the_models_identity() -> None:
    assert fingerprint_with("m:1", {"max_logprobs": 3}) == "m:1"
    assert fingerprint_with("m:1", {"kv_cache_dtype": "fp8"}) == "m:1;kv_cache_dtype=fp8"


def test_a_draft_model_is_part_of_the_models_identity() -> None:
    found = fingerprint_with("m:1", {"kv_cache_dtype": "fp8"}, "mtp")
    assert found == "m:1;kv_cache_dtype=fp8;draft=mtp"


def test_a_file_may_have_a_list() -> None:
    values = {"worker_id": "d", "model": "m", "engine_args": ["--hf-overrides", '{"a": 1}']}
    text = WorkerConfig.model_validate(values).engine_args
    assert split_engine_args(text) == ("--hf-overrides", '{"a": 1}')


def test_the_simulated_engine_refuses_them() -> None:
    config = EngineConfig("sim", "sim", "decode", WorkerRef("d", "1"), engine_args="--seed 1")
    with pytest.raises(ConfigError, match="takes no engine_args"):
        build_engine(config, lambda *_: None)  # type: ignore[arg-type]
