"""LoRA adapters under hand-over: the tokens are those of one engine with the same adapter."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.errors import ConfigError, InvalidRequest
from headrace_engine.vllm.service.adapters import LORA_MODULES, lora_arguments, read_adapters
from headrace_engine.vllm.service.engine_args import parse_engine_args, split_engine_args
from tests.devices import CPU, DEVICES, require, shared
from tests.kit.examples import run_example
from tests.ports import free_port
from tests.suite.deployment import Suite, greedy, suite
from tests.vllm.adapters import ARGUMENTS, FOLDER, LENGTHS, NAMES
from tests.vllm.conftest import IMPORTS_VLLM, RunJob
from tests.vllm.pair import prompt_of
from tests.waiting import until

pytestmark = IMPORTS_VLLM
MODEL = Path("models/tiny-llama")


@pytest.fixture(autouse=True)
def _adapters() -> None:
    if not Path(FOLDER).is_dir():
        pytest.skip(f"{FOLDER} is missing: make test-vllm makes it")


def _read(text: str, *, on_cpu: bool = False) -> dict[str, object]:
    """vLLM's arguments for the adapters of a command line."""
    given = parse_engine_args(split_engine_args(text))
    adapters = read_adapters(given.pop(LORA_MODULES, ()), given | {"model": MODEL})
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
        return [
            one.identity.digest
            for one in read_adapters(given[LORA_MODULES], given | {"model": MODEL})
        ]

    poet, coder = digests(ARGUMENTS)
    assert poet != coder
    assert digests(f"--enable-lora --lora-modules other={FOLDER}/poet") == [poet]
    assert poet not in digests(f"{ARGUMENTS} --lora-dtype bfloat16")


@pytest.mark.core
def test_answers_equal_plain_vllm_with_the_same_adapter(run_job: RunJob) -> None:
    result = run_job("tests.vllm.adapters:measure", model="tiny-llama")
    prefill, decode = result["digests"]
    assert prefill == decode
    assert set(decode) == {"poet", "coder"}
    plain = result["plain"]
    for number in range(len(LENGTHS)):
        assert len({tuple(plain[name][number]) for name in NAMES}) == len(NAMES)
    assert result["split"] == result["hidden"] == plain
    # Requests without an adapter in a batch with others, too.
    assert result["mixed"] == result["together"] == plain
    # Each finds its own blocks, and only these.
    assert result["cached"] == dict.fromkeys(NAMES, 160)
    # Whole blocks of 32 tokens: the prompts and the answers' beginnings, with each adapter and without.
    assert result["announced"] == len(NAMES) * (1 + 5)


COUNT = 8
_REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", DEVICES)
def test_adapters_of_run_time_answer_as_vllm_that_was_started_with_them(
    device: str, tmp_path: Path, run_job: RunJob
) -> None:
    require(device)
    folder = tmp_path / "adapters"
    shutil.copytree(FOLDER, folder)
    prompts = [prompt_of(length) for length in LENGTHS]
    plain = run_job(
        "tests.vllm.plain:adapter_tokens",
        model="tiny-llama",
        dtype=dtype_of(device),
        folders={name: str(folder / name) for name in ("poet", "coder")},
        prompts=prompts,
        max_tokens=[COUNT] * len(prompts),
    )["tokens"]
    assert len({tuple(plain[name][0]) for name in NAMES}) == len(NAMES)
    asyncio.run(_use(tmp_path, device, folder, prompts, plain))


def dtype_of(device: str) -> str:
    """A type that vLLM's kernels for adapters have."""
    return "float32" if device == CPU else "bfloat16"


async def _use(
    tmp_path: Path,
    device: str,
    folder: Path,
    prompts: list[list[int]],
    plain: dict[str, list[list[int]]],
) -> None:
    page, listen = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    # Room for two adapters: on processors, the last one stays empty.
    room = 3 if device == CPU else 2
    settings = (
        ("router", "status_listen", page),
        ("router", "http_listen", listen),
        *shared(
            device,
            dtype=dtype_of(device),
            max_model_len=512,
            engine_args=f"--enforce-eager --enable-lora --max-loras {room}",
            adapter_folders=folder,
        ),
    )
    headers = {TOKEN_KEY: create_token(load_local_key(), Role.OPERATOR, "", 600)}
    async with (
        suite(tmp_path, engine="vllm", model="models/tiny-llama", settings=settings) as it,
        httpx.AsyncClient(base_url=f"http://{page}", headers=headers, timeout=60) as operator,
        httpx.AsyncClient(base_url=f"http://{listen}", timeout=60) as client,
    ):

        async def load(name: str, path: str, **fields: object) -> httpx.Response:
            body = {"lora_name": name, "lora_path": str(folder / path), **fields}
            return await operator.post("/v1/load_lora_adapter", json=body)

        async def unload(name: str) -> None:
            answer = await operator.post("/v1/unload_lora_adapter", json={"lora_name": name})
            assert answer.status_code == 200, answer.text

        await _check(it, prompts, "", plain[""])
        for name in ("poet", "coder"):
            assert (await load(name, name)).text == (
                f"Success: LoRA adapter '{name}' added successfully."
            )
            body = {"model": name, "prompt": prompts[0], "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            await _check(it, prompts, name, plain[name])
        await _check(it, prompts, "", plain[""])
        assert "coder (adapter of tiny-llama): " in await run_example("lora.py", listen)
        # Poet is announced while its successor is loaded, so there is no room before coder is unloaded.
        full = await load("poet", "coder", load_inplace=True)
        assert full.status_code == 400
        assert "room for 2" in full.json()["error"]["message"]
        await _check(it, prompts, "poet", plain["poet"])
        await unload("coder")
        assert (await load("poet", "coder", load_inplace=True)).status_code == 200
        await _check(it, prompts, "poet", plain["coder"], before=plain["poet"])
        for path, words in write_broken(folder).items():
            refused = await load("other", path)
            assert refused.status_code == 400
            assert words in refused.json()["error"]["message"], refused.text
        broken = await load("other", "..")
        assert "is not in one of this worker's adapter_folders" in broken.text
        await unload("poet")

        async def missing() -> bool:
            body = {"model": "poet", "prompt": prompts[0], "max_tokens": 1}
            answer = await client.post("/v1/completions", json=body)
            return answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"

        await until(missing)
        await _check(it, prompts, "", plain[""])


def write_broken(folder: Path) -> dict[str, str]:
    """Copies of an adapter that cannot be used, by folder, and what the refusal says."""
    import torch
    from safetensors.torch import load_file, save_file

    def changed(name: str) -> tuple[Path, dict[str, torch.Tensor], str]:
        shutil.copytree(folder / "poet", folder / name)
        file = folder / name / "adapter_model.safetensors"
        weights = load_file(file)
        return file, weights, next(one for one in weights if one.endswith("q_proj.lora_A.weight"))

    file, weights, first = changed("nan")
    weights[first][0, 0] = float("nan")
    save_file(weights, file)
    file, weights, first = changed("names")
    weights[first.replace("layers.0", "layers.99")] = weights.pop(first)
    save_file(weights, file)
    file, weights, first = changed("shapes")
    weights[first] = weights[first][:, :-8].contiguous()
    save_file(weights, file)
    file, _, _ = changed("deep")
    (file.parent / "adapter_config.json").write_text("[" * 100_000)
    return {
        "nan": "values that are no numbers",
        "names": "has no module for",
        "shapes": "and the model another",
        "deep": "nested too deeply",
    }


async def _check(
    it: Suite,
    prompts: list[list[int]],
    name: str,
    expected: list[list[int]],
    before: list[list[int]] | None = None,
) -> None:
    """Waits until the router has the adapter, and a prefill worker computes its prompts.

    Answers must be equal to `expected`, or meanwhile to those of the adapter `before`.
    """

    async def answers() -> list[list[int]]:
        found = []
        for prompt in prompts:
            request = greedy(prompt, COUNT, _REMOTE, "")
            request.model = name
            outcome = await it.ask(request)
            if not outcome.last.timing.prefill_worker_id:
                return []
            found.append(list(outcome.token_ids))
        return found

    found: list[list[int]] = []

    async def equal() -> bool:
        nonlocal found
        try:
            found = await answers()
        except InvalidRequest:
            return False
        for answer, old, new in zip(found, before or expected, expected, strict=bool(found)):
            assert answer in (old, new)
        return found == expected

    await until(equal, 20.0, lambda: f"{name}: {found}, not {expected}")
