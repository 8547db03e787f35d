"""Checks of a model's folder and of engine settings before the model is loaded."""

from __future__ import annotations

import json
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.config import EngineConfig
from headrace_engine.vllm import model_folder
from headrace_engine.vllm.model_folder import (
    digest_of_adapter,
    read_model_folder,
    require_modules,
)
from headrace_engine.vllm.service import launch
from headrace_kv.layout import WorkerRef
from headrace_kv.tiers.tiers import TierSettings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def folder(path: Path, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "model.safetensors").touch()
    return path


def write_weights(path: Path, **tensors: float) -> None:
    """A file of safetensors with one matrix for each name, filled with a number."""
    header, data = {}, b""
    for name, value in tensors.items():
        values = struct.pack("<f", value) * 256
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F32", "shape": [16, 16], "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_the_processing_of_images_is_part_of_the_identity(tmp_path: Path) -> None:
    def fingerprint(pixels_max: int) -> str:
        path = folder(tmp_path / "m", text_config={"max_position_embeddings": 512})
        settings = path / "preprocessor_config.json"
        settings.write_text(json.dumps({"max_pixels": pixels_max}))
        found = read_model_folder(str(path), 0)
        assert found.max_model_len == 512
        return found.fingerprint

    assert fingerprint(100) == fingerprint(100) != fingerprint(200)


def test_checkpoints_of_one_shape_have_different_fingerprints(tmp_path: Path) -> None:
    def fingerprint(copy: str, **files: dict[str, float]) -> str:
        parent = tmp_path / copy
        parent.mkdir()
        path = folder(parent / "m")
        (path / "model.safetensors").unlink()
        for name, tensors in files.items():
            write_weights(path / f"{name}.safetensors", **tensors)
        return read_model_folder(str(path), 0).fingerprint

    base = fingerprint("base", model={"q": 1.0, "k": 2.0})
    assert fingerprint("tuned", model={"q": 1.0, "k": 2.5}) != base
    assert fingerprint("renamed", model={"q": 1.0, "v": 2.0}) != base
    # Other files, same weights.
    assert fingerprint("shards", a={"k": 2.0}, b={"q": 1.0}) == base


@pytest.mark.parametrize("max_model_len", [0, 1, 2048])
def test_a_context_up_to_the_models_own_is_accepted(tmp_path: Path, max_model_len: int) -> None:
    read_model_folder(str(folder(tmp_path / "m")), max_model_len)


def error_of(path: Path, max_model_len: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        read_model_folder(str(path), max_model_len)
    assert "\n" not in caught.value.detail
    return caught.value.detail


@pytest.mark.parametrize("model", ["", "sim", "sim:layers=2"])
def test_an_engine_without_a_model_names_the_remedy(model: str) -> None:
    with pytest.raises(ConfigError, match="make model"):
        read_model_folder(model, 0)


def test_wrong_folders_are_rejected_in_one_line(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "missing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in error_of(empty)
    broken = folder(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert "cannot read" in error_of(broken)
    (broken / "config.json").write_text("[]")
    assert "holds no object" in error_of(broken)
    assert "no architectures" in error_of(folder(tmp_path / "other", architectures=None))
    garbled = folder(tmp_path / "garbled")
    (garbled / "model.safetensors").write_bytes(b"no weights, but some bytes")
    assert "cannot read the weights" in error_of(garbled)
    weightless = folder(tmp_path / "weightless")
    (weightless / "model.safetensors").unlink()
    assert "no weights" in error_of(weightless)
    assert "2049" in error_of(folder(tmp_path / "m"), 2049)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": 5, "block_size": 32, "max_model_len": 129}, "max_model_len"),
    ],
)
def test_settings_that_cannot_work_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], word: str
) -> None:
    monkeypatch.setattr(launch, "require_vllm", lambda: "0.32.0")
    values = {
        "engine": "vllm",
        "model": str(folder(tmp_path / "m")),
        "role": "decode",
        "ref": WorkerRef("d0", "1"),
        "num_gpu_blocks_override": 5,
        "max_model_len": 128,
    }
    # Four blocks of 32 hold 128 tokens. Without block_size, vLLM has not chosen it yet.
    for allowed in (
        {},
        {"block_size": 32},
        {"max_model_len": 2048},
        {"tiers": TierSettings(1.0), "pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ):
        launch.check_config(EngineConfig(**(values | allowed)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=word):
        launch.check_config(EngineConfig(**(values | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("role", "expected"), [("prefill", "kv_both"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_vllm_keeps_back_blocks_that_a_step_may_write_wherever_kv_is_received(
    role: Literal["prefill", "decode", "both"], expected: str
) -> None:
    """Only for a consumer, vLLM does so, and prefill receives prefixes."""
    config = EngineConfig(engine="vllm", model="m", role=role, ref=WorkerRef("w", "1"))
    assert launch.kv_role(config) == expected


def test_a_gpu_gets_a_fixed_cache_size_and_graphs(tmp_path: Path) -> None:
    config = EngineConfig(
        engine="vllm",
        model=str(folder(tmp_path / "m")),
        role="decode",
        ref=WorkerRef("d", "1"),
        kv_cache_gib=2.5,
    )
    model = read_model_folder(config.model, 0)
    assert launch._device_args(config, model, on_cpu=True) == {"enforce_eager": True}
    on_gpu = launch._device_args(config, model, on_cpu=False)
    assert on_gpu["enforce_eager"] is False
    assert on_gpu["kv_cache_memory_bytes"] == 5 << 29
    assert 0.0 < on_gpu["gpu_memory_utilization"] < 0.1
    eager = launch._device_args(replace(config, enforce_eager=True), model, on_cpu=False)
    assert eager["enforce_eager"] is True


@pytest.mark.parametrize(
    ("dtype", "on_cpu", "chosen"),
    [
        ("float32", True, "CPU_MLA"),
        ("float16", True, "CPU_MLA"),
        ("bfloat16", True, None),
        ("auto", True, None),
        ("float32", False, None),
    ],
)
def test_latent_attention_runs_in_every_dtype_on_processors_with_amx(
    tmp_path: Path, dtype: str, on_cpu: bool, chosen: str | None
) -> None:
    path = folder(tmp_path / "m", kv_lora_rank=512)
    config = EngineConfig(
        engine="vllm", model=str(path), role="decode", ref=WorkerRef("d", "1"), dtype=dtype
    )
    model = read_model_folder(config.model, 0)
    assert (
        launch._device_args(config, model, on_cpu=on_cpu).get("attention_backend", None) == chosen
    )


@pytest.mark.parametrize(
    ("dtype", "layer", "on_cpu", "refused"),
    [
        ("float32", "linear_attention", True, True),
        ("bfloat16", "linear_attention", True, False),
        ("float32", "full_attention", True, False),
        ("float32", "linear_attention", False, False),
    ],
)
def test_gated_delta_nets_need_bfloat16_on_processors(
    dtype: str, layer: str, on_cpu: bool, refused: bool
) -> None:
    text = SimpleNamespace(layer_types=["full_attention", layer])
    model: Any = SimpleNamespace(dtype=f"torch.{dtype}", hf_text_config=text)
    with pytest.raises(ConfigError, match="need dtype bfloat16") if refused else nullcontext():
        launch.require_dtype(model, on_cpu=on_cpu)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


def write_adapter(path: Path, config: str = '{"r": 16}', **tensors: float) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(config)
    write_weights(path / "adapter_model.safetensors", **tensors)
    return path


def test_a_digest_of_an_adapter_depends_on_every_byte_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_adapter(tmp_path / "a", a=1.0, b=2.0)
    first = digest_of_adapter(path)
    file = path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    # Not in the middle of a tensor, where models are sampled.
    content[-1] ^= 0x80
    file.write_bytes(content)
    second = digest_of_adapter(path)
    assert second != first
    monkeypatch.setattr(model_folder, "_tensors_in", None)
    assert digest_of_adapter(path) == second


def _file(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"short",
        struct.pack("<Q", 1 << 60),
        _file(b"[" * 200_000),
        _file(b"{"),
        _file([1]),
        _file({"a": 1}),
        _file({"a": {}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 0]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 4]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]}}),
        _file({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0\0\xc0\x7f" * 2),
        _file({"a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]}}, b"\x80\xff" * 4),
    ],
)
def test_a_malformed_file_of_weights_is_an_error_that_the_caller_expects(
    tmp_path: Path, content: bytes
) -> None:
    path = write_adapter(tmp_path / "a", a=1.0)
    (path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises((ValueError, KeyError, TypeError)):
        digest_of_adapter(path)


@pytest.mark.parametrize("config", ["[" * 100_000, "[]", "{", "\udcff"])
def test_so_is_a_malformed_configuration(tmp_path: Path, config: str) -> None:
    path = write_adapter(tmp_path / "a", a=1.0)
    (path / "adapter_config.json").write_bytes(config.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"nested|object|Expecting|decode"):
        digest_of_adapter(path)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({f"{Q_PROJ}.lora_A.weight": 1.0, f"{Q_PROJ}.lora_B.weight": 1.0}, ""),
        ({f"{Q_PROJ.replace('.0.', '.7.')}.lora_A.weight": 1.0}, "the model has no module for"),
        ({f"{Q_PROJ.replace('q_proj', 'k_proj')}.lora_B.weight": 1.0}, "and the model another"),
        ({f"{Q_PROJ.replace('q_proj', 'quantized')}.lora_B.weight": 1.0}, ""),
        ({f"{Q_PROJ.replace('q_proj', 'experts.3.up')}.lora_A.weight": 1.0}, ""),
        ({"base_model.model.lm_head.lora_A.weight": 1.0}, ""),
    ],
)
def test_an_adapter_must_fit_the_modules_of_the_model(
    tmp_path: Path, names: dict[str, float], problem: str
) -> None:
    model = folder(tmp_path / "m")
    matrix = {"dtype": "F32", "data_offsets": [0, 8]}
    layers = "model.language_model.layers.0.self_attn"
    header = {
        f"{layers}.q_proj.weight": {**matrix, "shape": [16, 16]},
        f"{layers}.k_proj.weight": {**matrix, "shape": [8, 16]},
        f"{layers}.quantized.qweight": {**matrix, "shape": [2, 16], "dtype": "I32"},
        f"{layers}.quantized.scales": {**matrix, "shape": [1, 2]},
    }
    (model / "model.safetensors").write_bytes(_file(header))
    adapter = write_adapter(tmp_path / "a")
    write_weights(adapter / "adapter_model.safetensors", **names)
    if problem:
        with pytest.raises(ValueError, match=problem):
            require_modules(adapter, model)
    else:
        require_modules(adapter, model)
