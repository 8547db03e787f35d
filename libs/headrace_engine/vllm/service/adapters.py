"""The LoRA adapters of an engine: which ones it loads, and how requests select them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace_common.errors import ConfigError
from headrace_common.registry.adapters import (
    ADAPTER_NAME_CHARACTERS_MAX,
    ADAPTERS_MAX,
    Adapter,
    is_adapter_name,
)
from headrace_engine.vllm.model_folder import digest_of_adapter

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

LORA_MODULES: Final = "lora_modules"
"""An argument of vLLM's server, which its engine does not have."""
# Arguments that change what an adapter computes.
_ADAPTER_ARGUMENTS: Final = ("lora_dtype", "lora_target_modules")
_DIGEST_CHARACTERS: Final = 24


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a folder of this host. `request` selects it in vLLM."""

    identity: Adapter
    request: LoRARequest
    rank: int


def read_adapters(
    modules: Sequence[LoRAModulePath], given: Mapping[str, Any]
) -> tuple[LoadedAdapter, ...]:
    """The adapters of `--lora-modules`. `given`: all arguments of vLLM. Raises ConfigError."""
    if modules and not given.get("enable_lora"):
        raise _wrong("--lora-modules needs --enable-lora: add it")
    if len(modules) > ADAPTERS_MAX:
        raise _wrong(f"--lora-modules names {len(modules)} adapters: give at most {ADAPTERS_MAX}")
    names = [module.name for module in modules]
    for name in names:
        if not is_adapter_name(name):
            raise _wrong(
                f"--lora-modules: the name {name!r} must have 1 to {ADAPTER_NAME_CHARACTERS_MAX} visible ASCII "
                "characters"
            )
        if names.count(name) > 1:
            raise _wrong(f"--lora-modules names adapter {name} twice: give each name once")
    return tuple(_read(number, module, given) for number, module in enumerate(modules, 1))


def _read(number: int, module: LoRAModulePath, given: Mapping[str, Any]) -> LoadedAdapter:
    from vllm.lora.request import LoRARequest

    folder = Path(module.path)
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        weights = digest_of_adapter(folder)
        rank = int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _wrong(
            f"--lora-modules: {module.path} is no adapter ({exc}): name a folder with adapter_config.json and "
            "adapter_model.safetensors"
        ) from exc
    identity = [weights, *(str(given.get(name, "")) for name in _ADAPTER_ARGUMENTS)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    request = LoRARequest(
        lora_name=module.name,
        lora_int_id=number,
        lora_path=str(folder.resolve()),
        is_3d_lora_weight=module.is_3d_lora_weight,
    )
    return LoadedAdapter(Adapter(module.name, digest), request, rank)


def lora_arguments(
    adapters: Sequence[LoadedAdapter], given: Mapping[str, Any], *, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's arguments for these adapters, where the user has not given them: all fit at once.

    vLLM reads an adapter again that it has dropped. Its files may have changed, so it must keep all. On processors, it
    computes tokens without an adapter with those of its last slot, unless the whole batch has none
    (lora/ops/torch_ops/lora_ops.py:74). An empty slot adds nothing, so the last one must stay empty.
    Raises ConfigError.
    """
    if not adapters:
        return {}
    count = len(adapters)
    slots = count + 1 if on_cpu else count
    if on_cpu and given.get("max_loras", slots) < slots:
        raise _wrong(
            f"--max-loras is {given['max_loras']}: make it {slots}, one more than adapters, or leave it out. On "
            "processors, vLLM gives requests without an adapter the last one"
        )
    kept = given.get("max_cpu_loras", max(count, given.get("max_loras", slots)))
    if kept < count:
        raise _wrong(f"--max-cpu-loras is {kept}: make it {count}, so that vLLM keeps all adapters")
    return {
        "max_loras": slots,
        "max_lora_rank": _rank_for(max(adapter.rank for adapter in adapters)),
        "max_cpu_loras": kept,
    }


def _rank_for(rank: int) -> int:
    """The lowest rank that vLLM can be configured for, and that these adapters need."""
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    ranks: tuple[int, ...] = get_args(MaxLoRARanks)
    fit = [one for one in ranks if one >= rank]
    if not fit:
        raise _wrong(
            f"--lora-modules: an adapter has rank {rank}, and vLLM has at most {max(ranks)}: leave it out"
        )
    return min(fit)


async def load_adapters(llm: AsyncLLM, adapters: Sequence[LoadedAdapter]) -> None:
    """Loads all adapters in all ranks. Raises ConfigError for one that vLLM rejects."""
    for adapter in adapters:
        try:
            await llm.add_lora(adapter.request)
        except Exception as exc:
            message = " ".join(str(exc).split())[:300]
            raise _wrong(
                f"--lora-modules: vLLM rejects adapter {adapter.identity.name}: {message}"
            ) from exc


def _wrong(detail: str) -> ConfigError:
    return ConfigError(f"engine_args: {detail}", metadata={"field": "engine_args"})
