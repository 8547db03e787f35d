"""Checks whether a planned prefill and decode worker can hand KV over, from their configuration files alone."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace_cli.doctor.finding import Finding, Verdict
from headrace_cli.size.model_config import read_model_config
from headrace_common.errors import ConfigError
from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.pairs import PairSide, pair_faults
from headrace_kv.layout.time_model import kv_shape

SUBJECT: Final = "planned pair"
_FILE_BYTES_MAX: Final = 1 << 20
_SIM: Final = "sim"
# Of the simulated engine's settings, prefill and decode may differ in these.
_SIM_OWN: Final = frozenset(
    (
        *("order", "index_block_tokens", "stages", "host_blocks", "disk_blocks", "clock"),
        *("prefill_s_per_token", "decode_step_s", "layer_s", "host_copy_s_per_token"),
    )
)
_CACHE_DTYPE: Final = "--kv-cache-dtype"
_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """The settings of a worker that decide on pairs, as its file has them."""

    path: Path
    worker_id: str
    engine: str
    model: str
    served_model: str
    transport: str
    tensor_parallel_size: int
    stage_count: int
    cache_dtype: str

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_model or (_SIM if self.engine == _SIM else Path(self.model).name)

    @property
    def rank_count(self) -> int:
        """Ranks of all stages. Those of the simulated engine's model are not counted."""
        return self.tensor_parallel_size * self.stage_count


def check_plan(prefill: Path, decode: Path) -> list[Finding]:
    """What keeps a prefill worker with one file from handing KV over to a decode worker with the other.

    Raises ConfigError for a file that cannot be read.
    """
    workers = read_worker(prefill), read_worker(decode)
    findings = list(_differences(*workers))
    if not findings:
        sides = [_side(worker) for worker in workers]
        findings = [
            Finding(
                Verdict.ERROR, SUBJECT, str(fault), "give both the same model and cache settings"
            )
            for fault in pair_faults(sides[:1], sides[1:])
        ]
    if findings:
        return findings
    layout = _side(workers[0]).layout
    ranks = " to ".join(str(worker.rank_count) for worker in workers)
    detail = f"{layout.layer_count} layers of {layout.dtype} fit each other, from ranks {ranks}"
    return [Finding(Verdict.OK, SUBJECT, f"{workers[0].name}: {detail}")]


def read_worker(path: Path) -> PlannedWorker:
    """Reads the --config FILE.toml of a worker. Its service checks the other settings. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        values = tomllib.loads(content[:_FILE_BYTES_MAX].decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a worker's file") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return PlannedWorker(
        path=path,
        worker_id=_text(path, values, "worker_id", ""),
        engine=_text(path, values, "engine", "vllm"),
        model=_text(path, values, "model", _SIM),
        served_model=_text(path, values, "served_model", ""),
        transport=_text(path, values, "transport", "mooncake"),
        tensor_parallel_size=_count(path, values, "tensor_parallel_size"),
        stage_count=_count(path, values, "pipeline_parallel_size"),
        cache_dtype=_cache_dtype(path, values),
    )


def _count(path: Path, values: dict[str, Any], field: str) -> int:
    value = values.get(field, 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {field} must be a whole number above 0")
    return value


def _text(path: Path, values: dict[str, Any], field: str, default: str) -> str:
    value = values.get(field, default)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {field} must be text in quotes")
    return value


def _cache_dtype(path: Path, values: dict[str, Any]) -> str:
    """The element type of the KV cache: vLLM's argument, else `dtype`, else empty for the model's own."""
    given = values.get("engine_args", "")
    words = [str(word) for word in given] if isinstance(given, list) else shlex.split(str(given))
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == _CACHE_DTYPE:
            found = value if equals else "".join(words[index + 1 : index + 2])
            return "" if found == _AUTO else found
    dtype = _text(path, values, "dtype", _AUTO)
    return "" if dtype == _AUTO else dtype


def _differences(prefill: PlannedWorker, decode: PlannedWorker) -> Iterator[Finding]:
    """Differences that show without the model's own files."""
    if prefill.engine != decode.engine:
        detail = f"one worker has the engine {prefill.engine}, and the other {decode.engine}"
        yield Finding(Verdict.ERROR, SUBJECT, detail, "use one engine")
    if prefill.name != decode.name:
        detail = f"clients would see two models, {prefill.name} and {decode.name}"
        yield Finding(Verdict.ERROR, SUBJECT, detail, "set served_model to one name")
    if prefill.worker_id and prefill.worker_id == decode.worker_id:
        detail = f"both have the worker_id {prefill.worker_id}, so one would replace the other"
        yield Finding(Verdict.ERROR, SUBJECT, detail, "give each worker a name of its own")


def _side(worker: PlannedWorker) -> PairSide:
    """The worker's layout, as far as files show it. Raises ConfigError."""
    if worker.engine == _SIM:
        model, layers, heads, parts, dtype = _sim_model(worker.model), 1, 1, {"kv": 1}, "uint8"
    else:
        config = read_model_config(worker.model)
        shape = kv_shape(config, worker.cache_dtype)
        # Tensor parallelism and block sizes may differ. The bytes of a token and layer may not.
        model, layers, heads = "", shape.layer_count, 1
        parts, dtype = {shape.attention: shape.layer_bytes}, shape.dtype
    layout = KvLayout.attention(
        model=model,
        dtype=dtype,
        layer_count=layers,
        kv_head_count=heads,
        block_tokens=1,
        parts=parts,
        tensor_parallel_size=worker.tensor_parallel_size,
    )
    return PairSide(worker.worker_id or str(worker.path), worker.name, layout, worker.transport)


def _sim_model(model: str) -> str:
    """The settings of the simulated engine that both sides need."""
    name, _, settings = model.partition(":")
    kept = sorted(
        item for item in settings.split(",") if item and item.partition("=")[0] not in _SIM_OWN
    )
    return f"{name}:{','.join(kept)}"
