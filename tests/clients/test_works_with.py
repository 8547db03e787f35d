"""Clients that people use, each in a process of its own, against a simulated deployment."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace_engine.sim.model.bit_mixer import mix_words
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from headrace_text.load import load_codecs
from lock_requirements import parse
from tests.clients.commands import run
from tests.clients.installed import PYTHON_LISTS, ROOT, tools
from tests.ports import free_port
from tests.suite.deployment import suite

PAGE = ROOT / "docs/clients.md"
PINS = PYTHON_LISTS / "requirements.txt"
INSTALLED, installed = tools("works-with", PINS)
PYTHON = INSTALLED / "bin/python"
CLIENTS = (
    *("anthropic", "langchain-openai", "litellm", "llama-index-llms-openai-like", "lm-eval"),
    "openai",
)
TOKENIZER = ROOT / "models/tiny-llama"
VOCABULARY = "sim:vocabulary=512"
ENVIRONMENT = {
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}
SHARED = {"chat": True, "stream": True}
TOOL = {"tool": {"a": "b"}}


@asynccontextmanager
async def served(folder: Path, *settings: tuple[str, str, str]) -> AsyncIterator[str]:
    """The URL of a deployment, which must hold nothing at the end."""
    listen = f"127.0.0.1:{free_port()}"
    async with suite(folder, settings=(("router", "http_listen", listen), *settings)) as it:
        yield f"http://{listen}"
        await it.wait_empty("decode-0")


async def found(folder: Path, script: str, python: Path = PYTHON) -> Any:
    """What a script of the folder `python` found."""
    async with served(folder) as url:
        status, out, err = await run(str(python), str(PYTHON_LISTS / script), url, **ENVIRONMENT)
        assert status == 0, err
        return json.loads(out)


@installed
async def test_langchain_chats_streams_and_calls_a_bound_tool(tmp_path: Path) -> None:
    assert await found(tmp_path, "langchain_chat.py") == SHARED | TOOL


@installed
async def test_litellm_recognises_a_long_prompt_and_falls_back(tmp_path: Path) -> None:
    assert await found(tmp_path, "litellm_completion.py") == SHARED | {
        "too long": "ContextWindowExceededError",
        "fallback": "from long",
    }


@installed
async def test_llama_index_chats_and_streams(tmp_path: Path) -> None:
    assert await found(tmp_path, "llama_index_chat.py") == SHARED


@pytest.mark.parametrize(
    "python",
    [pytest.param(PYTHON, marks=installed, id="pinned"), pytest.param(sys.executable, id="ours")],
)
async def test_openais_library_uses_both_apis(tmp_path: Path, python: Path) -> None:
    assert await found(tmp_path, "openai_sdk.py", python) == SHARED | TOOL | {
        "responses": True,
        "too long": "context_length_exceeded",
    }


@installed
async def test_anthropics_library_uses_messages(tmp_path: Path) -> None:
    assert await found(tmp_path, "anthropic_sdk.py") == SHARED | TOOL | {
        "count": True,
        "too long": "invalid_request_error",
    }


@installed
@pytest.mark.skipif(not TOKENIZER.is_dir(), reason="the model is not there: make model")
async def test_lm_eval_runs_a_loglikelihood_and_a_generation_task(tmp_path: Path) -> None:
    model = (("prefill", "model", VOCABULARY), ("decode", "model", VOCABULARY))
    async with served(tmp_path, ("router", "model", f"sim={TOKENIZER}"), *model) as url:
        arguments = {
            "model": "sim",
            "base_url": f"{url}/v1/completions",
            "tokenizer": str(TOKENIZER),
            "tokenizer_backend": "huggingface",
            "num_concurrent": "2",
            "max_retries": "1",
        }
        status, _, err = await run(
            *(str(INSTALLED / "bin/lm_eval"), "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--include_path", str(PYTHON_LISTS / "lm_eval"), "--batch_size", "2"),
            *("--tasks", "headrace_choices,headrace_generation"),
            *("--output_path", str(tmp_path / "results"), "--log_samples"),
            **ENVIRONMENT,
            HF_HOME=str(tmp_path / "hub"),
            HF_HUB_OFFLINE="1",
        )
        assert status == 0, err
    codec, engine = (
        load_codecs({"sim": str(TOKENIZER)})["sim"],
        SimModel(parse_settings(VOCABULARY)),
    )
    scored = samples(tmp_path / "results", "choices")
    assert [len(sample["filtered_resps"]) for sample in scored] == [3, 2]
    for sample in scored:
        pairs = [(one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()]
        for (context, continuation), (found, _) in zip(
            pairs, sample["filtered_resps"], strict=True
        ):
            ids = codec.encode(context + continuation)
            entries = engine.prompt_logprobs(ids, mix_words(engine.prefix_sums(ids)), 0)
            expected = sum(entry.logprob for entry in entries[len(codec.encode(context)) - 1 :])
            assert float(found) == pytest.approx(expected)
    for sample in samples(tmp_path / "results", "generation"):
        ids = codec.encode(sample["arguments"]["gen_args_0"]["arg_0"])
        # The tokenizer drops the space before an answer that stands alone.
        text = codec.decode([*ids, *engine.expected_tokens(ids, 8)])
        assert text.endswith(sample["filtered_resps"][0].strip())


def samples(folder: Path, task: str) -> list[Any]:
    """What lm_eval has written about each question of a task."""
    (file,) = folder.glob(f"*/samples_headrace_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_offers_an_upgrade_to_http2(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    async with served(tmp_path) as url:
        status, out, err = await run(
            *("curl", "--silent", "--show-error", "--http2", "--fail", "--max-time", "30"),
            *("--json", json.dumps(request), f"{url}/v1/chat/completions"),
            **ENVIRONMENT,
        )
        assert status == 0, err
        assert json.loads(out)["usage"]["completion_tokens"] == 8


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK is installed")
async def test_the_jdks_client_offers_an_upgrade_to_http2(tmp_path: Path) -> None:
    async with served(tmp_path) as url:
        source = ROOT / "tests/clients/java/HttpChat.java"
        status, out, err = await run("java", str(source), url)
        assert (status, out) == (0, "200 true\n200 true\n"), err


def test_the_page_names_the_pinned_versions() -> None:
    pins = {name: pin.version for name, pin in parse(PINS.read_text(encoding="utf-8")).items()}
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in CLIENTS if f"| {name} {pins[name]}" not in page] == []
