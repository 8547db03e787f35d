"""LoRA adapters under hand-over: the tokens are those of one engine with the same adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.service.adapters import LORA_MODULES, lora_arguments, read_adapters
from headrace_engine.vllm.service.engine_args import parse_engine_args, split_engine_args
from tests.vllm.adapters import ARGUMENTS, FOLDER, LENGTHS, NAMES
from tests.vllm.conftest import IMPORTS_VLLM, RunJob

pytestmark = IMPORTS_VLLM


@pytest.fixture(autouse=True)
def _adapters() -> None:
    if not Path(FOLDER).is_dir():
        pytest.skip(f"{FOLDER} is missing: make test-vllm makes it")


def _read(text: str, *, on_cpu: bool = False) -> dict[str, object]:
    """vLLM's arguments for the adapters of a command line."""
    given = parse_engine_args(split_engine_args(text))
    adapters = read_adapters(given.pop(LORA_MODULES, ()), given)
    return lora_arguments(adapters, given, on_cpu=on_cpu)


def test_vllm_keeps_all_adapters() -> None:
    assert _read(ARGUMENTS) == {"max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 2}
    # On processors, the last slot stays empty.
    assert _read(ARGUMENTS, on_cpu=True)["max_loras"] == 3
    with pytest.raises(ConfigError, match="--max-loras is 2: make it 3"):
        _read(f"{ARGUMENTS} --max-loras 2", on_cpu=True)
    assert _read(f"{ARGUMENTS} --max-loras 4")["max_cpu_loras"] == 4
    assert _read("--max-logprobs 3") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"--lora-modules poet={FOLDER}/poet", "--lora-modules needs --enable-lora"),
        ("--enable-lora --lora-modules poet=missing", "missing is no adapter"),
        ("--enable-lora --lora-modules poet=models/tiny-llama", "is no adapter"),
        (f"--enable-lora --lora-modules a={FOLDER}/poet a={FOLDER}/coder", "names adapter a twice"),
        (f"--enable-lora --lora-modules {'x' * 64}={FOLDER}/poet", "1 to 63 visible ASCII"),
        (f"{ARGUMENTS} --max-cpu-loras 1", "make it 2, so that vLLM keeps all adapters"),
        ("--enable-lora --lora-modules {broken", "Invalid JSON format"),
        ("--enable-lora --default-mm-loras '{}'", "give --enable-lora and --lora-modules"),
    ],
)
def test_wrong_adapters_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _read(text)
    assert words in caught.value.detail
    assert caught.value.metadata["field"] == "engine_args"


def test_a_digest_depends_on_the_files_and_the_type() -> None:
    def digests(text: str) -> list[str]:
        given = parse_engine_args(split_engine_args(text))
        return [one.identity.digest for one in read_adapters(given[LORA_MODULES], given)]

    poet, coder = digests(ARGUMENTS)
    assert poet != coder
    assert digests(f"--enable-lora --lora-modules other={FOLDER}/poet") == [poet]
    assert poet not in digests(f"{ARGUMENTS} --lora-dtype bfloat16")


def test_answers_equal_plain_vllm_with_the_same_adapter(run_job: RunJob) -> None:
    result = run_job("tests.vllm.adapters:measure", model="tiny-llama")
    prefill, decode = result["digests"]
    assert prefill == decode
    assert set(decode) == {"poet", "coder"}
    plain = result["plain"]
    for number in range(len(LENGTHS)):
        assert len({tuple(plain[name][number]) for name in NAMES}) == len(NAMES)
    assert result["split"] == plain
    # Requests without an adapter in a batch with others, too.
    assert result["mixed"] == result["together"] == plain
    # Each finds its own blocks, and only these.
    assert result["cached"] == dict.fromkeys(NAMES, 160)
    # Whole blocks of 32 tokens: the prompts and the answers' beginnings, with each adapter and without.
    assert result["announced"] == len(NAMES) * (1 + 5)
