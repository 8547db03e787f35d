"""Arguments that users pass through to vLLM."""

from __future__ import annotations

from dataclasses import fields

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.drafts import METHODS
from headrace_engine.vllm.service.engine_args import (
    KV_ARGUMENTS,
    REFUSED,
    SETTINGS,
    check_combinations,
    parse_engine_args,
    split_engine_args,
    take_offloading,
)
from tests.vllm.conftest import IMPORTS_VLLM, RunJob

pytestmark = IMPORTS_VLLM


def test_the_tables_name_arguments_of_the_installed_vllm() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in fields(AsyncEngineArgs)}
    assert {*SETTINGS, *REFUSED, *KV_ARGUMENTS} <= names


def test_only_given_arguments_are_set() -> None:
    text = "-q fp8 --no-enable-prefix-caching --kv_cache_dtype=fp8 --compilation-config.mode 3 -O2"
    given = parse_engine_args(split_engine_args(text))
    assert given.pop("compilation_config").mode == 3
    assert given == {
        "quantization": "fp8",
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "optimization_level": "2",
    }


def test_vllms_offloading_runs_beside_headrace() -> None:
    config = (
        '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"block_size": 64}}'
    )
    for text, extra in (
        ("--kv-offloading-size 0.5", {"cpu_bytes_to_use": 1 << 29}),
        (f"--kv-transfer-config '{config}'", {"block_size": 64}),
        ("--seed 3", None),
    ):
        given = parse_engine_args(split_engine_args(text))
        assert take_offloading(given) == extra
        assert given.keys() <= {"seed"}


def speculation(method: str, role: str) -> object:
    text = f'--speculative-config \'{{"method": "{method}", "num_speculative_tokens": 3}}\''
    return parse_engine_args(split_engine_args(text), role)["speculative_config"]


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_drafts_that_are_not_handed_over_are_refused_by_name(role: str) -> None:
    for method in METHODS:
        assert speculation(method, role) == {"method": method, "num_speculative_tokens": 3}
    for method in ("medusa", "suffix", "dflash", "extract_hidden_states"):
        with pytest.raises(ConfigError, match=f"'{method}', and Headrace does not hand over"):
            speculation(method, role)
    with pytest.raises(ConfigError, match="method None"):
        parse_engine_args(["--speculative-config.num_speculative_tokens", "3"], role)


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_only_decode_drafts_without_a_model(role: str) -> None:
    assert speculation("ngram", "decode") == {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="'ngram', which drafts answers without a model"):
        speculation("ngram", role)


@pytest.mark.parametrize(
    ("text", "stages", "words"),
    [
        ("--async-scheduling --speculative-config.method ngram", 1, "leave out async_scheduling"),
        ("--async-scheduling --speculative-config.method draft_model", 1, ""),
        ("--speculative-config.method draft_model", 2, "speculative_config"),
        ("--async-scheduling", 2, "leave out async_scheduling"),
        ("--speculative-config.method ngram", 2, "speculative_config"),
        ("--no-async-scheduling --speculative-config.method ngram", 1, ""),
        ("--no-async-scheduling", 2, ""),
        ("--async-scheduling", 1, ""),
    ],
)
def test_steps_ahead_exclude_drafts_and_stages(text: str, stages: int, words: str) -> None:
    given = parse_engine_args(split_engine_args(text), "decode")
    if not words:
        check_combinations(given, stages)
        return
    with pytest.raises(ConfigError, match=words):
        check_combinations(given, stages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--quantizaton fp8", "no argument --quantizaton: did you mean --quantization?"),
        ("--wholly-unknown 1", "no argument --wholly-unknown: `vllm serve --help=all` lists them"),
        # It could be short for several arguments.
        ("--max-num 4", "no argument --max-num"),
        ("--max-logprobs many", "rejects them: argument --max-logprobs: invalid int value: 'many'"),
        ("--scheduling-policy lifo", "choose from 'fcfs', 'priority'"),
        ("--max-logprobs 3 stray", "unrecognized arguments: stray"),
        ("-tp 2", "set tensor_parallel_size instead"),
        ("-sc {}", "speculative_config has method None"),
        (
            "--structured-outputs-config.reasoning_parser=qwen3",
            "set reasoning_parser of the router",
        ),
    ],
)
def test_what_vllm_does_not_know_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_engine_args(split_engine_args(text))
    assert words in caught.value.detail
    assert caught.value.metadata["field"] == "engine_args"


def test_arguments_take_effect(run_job: RunJob) -> None:
    result = run_job("tests.vllm.engine_args:answer", model="tiny-llama")
    assert result["in_effect"] == {
        "enable_prefix_caching": False,
        "max_logprobs": 3,
        "scheduling_policy": "priority",
        "long_prefill_token_threshold": 64,
        "load_format": "safetensors",
        "hf_overrides": 20000.0,
        "prefix_caching_hash_algo": "sha256_cbor",
        "watermark": 0.05,
        "additional_config": {"note": 1},
        "structured_outputs_config.backend": "guidance",
        "max_num_scheduled_tokens": 256,
    }
    # Without a prefix cache, the second answer transfers the whole prompt again.
    assert result["cached"] == [0, 0]
    first, second, plain = result["answers"]
    assert first == second == plain
    assert ";hf_overrides={" in result["identity"]
