"""The LoRA adapters of an engine: which ones it loads, and how requests select them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_common.registry.adapters import (
    ADAPTER_NAME_REMEDY,
    ADAPTERS_MAX,
    Adapter,
    is_adapter_name,
)
from headrace_engine.vllm.model_folder import (
    adapter_config,
    digest_of_adapter,
    require_modules,
)

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
    """The adapters of `--lora-modules`. `given`: all arguments of vLLM, with the model's folder. Raises ConfigError."""
    if modules and not given.get("enable_lora"):
        raise _wrong("--lora-modules needs --enable-lora: add it")
    if len(modules) > ADAPTERS_MAX:
        raise _wrong(f"--lora-modules names {len(modules)} adapters: give at most {ADAPTERS_MAX}")
    names = [module.name for module in modules]
    for name in names:
        if not is_adapter_name(name):
            raise _wrong(f"--lora-modules: the name {name!r}: {ADAPTER_NAME_REMEDY}")
        if names.count(name) > 1:
            raise _wrong(f"--lora-modules names adapter {name} twice: give each name once")
    try:
        return tuple(
            _read(number, one.name, Path(one.path), one.is_3d_lora_weight, given)
            for number, one in enumerate(modules, 1)
        )
    except ValueError as error:
        raise _wrong(f"--lora-modules: {error}") from error


def _read(
    number: int, name: str, folder: Path, is_3d_lora_weight: bool, given: Mapping[str, Any]
) -> LoadedAdapter:
    """The adapter in a folder. Raises ValueError with the remedy."""
    from vllm.lora.request import LoRARequest

    try:
        weights = digest_of_adapter(folder)
        rank = operator.index(adapter_config(folder)["r"])
        if not is_3d_lora_weight:
            require_modules(folder, given["model"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ValueError(
            f"{folder} is no adapter ({exc}): name a folder with adapter_config.json and adapter_model.safetensors"
        ) from exc
    identity = [weights, *(str(given.get(argument, "")) for argument in _ADAPTER_ARGUMENTS)]
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    request = LoRARequest(
        lora_name=name,
        lora_int_id=number,
        lora_path=str(folder.resolve()),
        is_3d_lora_weight=is_3d_lora_weight,
    )
    return LoadedAdapter(Adapter(name, digest), request, rank)


def lora_arguments(
    adapters: Sequence[LoadedAdapter], given: Mapping[str, Any], *, on_cpu: bool
) -> dict[str, Any]:
    """vLLM's arguments for these adapters, where the user has not given them: all fit at once.

    vLLM must keep all: see EngineAdapters. On processors, it computes tokens without an adapter with those of its last
    slot, unless the whole batch has none (lora/ops/torch_ops/lora_ops.py:74). An empty slot adds nothing, so the last
    one must stay empty. Raises ConfigError.
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


class EngineAdapters:
    """The adapters that an engine has loaded. Those that are unloaded stay until another one needs their room.

    vLLM reads an adapter again that it has dropped. Its files may have changed, so vLLM must never drop one by itself.
    """

    def __init__(
        self, adapters: Sequence[LoadedAdapter], given: Mapping[str, Any], *, on_cpu: bool
    ) -> None:
        """`adapters` are to be loaded first. `given`: as in read_adapters."""
        self._loaded = {adapter.identity: adapter for adapter in adapters}
        self._given = dict(given)
        self._on_cpu = on_cpu
        self._numbers = itertools.count(len(adapters) + 1)
        self._unloaded: list[Adapter] = []
        """The first was unloaded first."""
        self._uses: Counter[Adapter] = Counter()
        self._loading = asyncio.Lock()

    @property
    def identities(self) -> tuple[Adapter, ...]:
        """All adapters that requests may name."""
        return tuple(self._loaded)

    async def start(self, llm: AsyncLLM) -> None:
        """Loads the first adapters in all ranks. Raises ConfigError for one that vLLM rejects."""
        for adapter in self._loaded.values():
            try:
                await _add(llm, adapter)
            except ValueError as error:
                raise _wrong(f"--lora-modules: {error}") from error

    async def load(
        self, llm: AsyncLLM, name: str, folder: Path, *, is_3d_lora_weight: bool
    ) -> Adapter:
        """Loads one more in all ranks, unless it is loaded. Raises InvalidRequest for the fields of RuntimeAdapter."""
        loading = asyncio.create_task(self._load(llm, name, folder, is_3d_lora_weight))
        try:
            # vLLM cannot stop: what it has loaded must be known here.
            return (await asyncio.shield(loading))[0]
        except asyncio.CancelledError:
            loading.add_done_callback(self._unload_result)
            raise

    async def _load(
        self, llm: AsyncLLM, name: str, folder: Path, is_3d_lora_weight: bool
    ) -> tuple[Adapter, bool]:
        """The adapter, and whether it was not loaded before, or unloaded."""
        async with self._loading:
            number = next(self._numbers)
            try:
                adapter = await asyncio.to_thread(
                    _read, number, name, folder, is_3d_lora_weight, self._given
                )
                identity = adapter.identity
                new = identity not in self._loaded or identity in self._unloaded
                if identity not in self._loaded:
                    await self._make_room(llm)
                    await _add(llm, adapter)
                    self._loaded[identity] = adapter
            except ValueError as error:
                raise InvalidRequest({"path": str(error)}) from error
            if identity in self._unloaded:
                self._unloaded.remove(identity)
            return identity, new

    def _unload_result(self, loading: asyncio.Task[tuple[Adapter, bool]]) -> None:
        """The caller of a task has gone."""
        if not loading.cancelled() and loading.exception() is None:
            adapter, new = loading.result()
            if new:
                self.unload(adapter)

    def unload(self, adapter: Adapter) -> None:
        """Drops the adapter once another one needs its room, and no request uses it."""
        if adapter in self._loaded and adapter not in self._unloaded:
            self._unloaded.append(adapter)

    @contextmanager
    def used(self, adapter: Adapter | None) -> Iterator[LoRARequest | None]:
        """What selects an adapter in vLLM. The block keeps it. Raises InvalidRequest for an unknown one."""
        if adapter is None:
            yield None
            return
        if adapter not in self._loaded:
            raise InvalidRequest({"adapter": f"the engine has no adapter {adapter.name!r}"})
        self._uses[adapter] += 1
        try:
            yield self._loaded[adapter].request
        finally:
            self._uses[adapter] -= 1

    async def _make_room(self, llm: AsyncLLM) -> None:
        """Raises ValueError when no adapter can be dropped."""
        lora = llm.vllm_config.lora_config
        if lora is None:
            raise ValueError("this worker's engine_args lack --enable-lora")
        room = min(ADAPTERS_MAX, lora.max_cpu_loras or lora.max_loras)
        if self._on_cpu:
            # See lora_arguments.
            room = min(room, lora.max_loras - 1)
        while len(self._loaded) >= room:
            unused = next((one for one in self._unloaded if not self._uses[one]), None)
            if unused is None:
                raise ValueError(
                    f"this worker has {len(self._loaded)} adapters, and room for {room}: unload one, or raise "
                    "--max-loras and --max-cpu-loras in its engine_args. On processors, one of --max-loras stays empty"
                )
            self._unloaded.remove(unused)
            await llm.remove_lora(self._loaded.pop(unused).request.lora_int_id)


async def _add(llm: AsyncLLM, adapter: LoadedAdapter) -> None:
    """Raises ValueError for an adapter that vLLM rejects."""
    try:
        await llm.add_lora(adapter.request)
    except Exception as exc:
        message = " ".join(str(exc).split())[:300]
        raise ValueError(f"vLLM rejects adapter {adapter.identity.name}: {message}") from exc


def _wrong(detail: str) -> ConfigError:
    return ConfigError(f"engine_args: {detail}", metadata={"field": "engine_args"})
