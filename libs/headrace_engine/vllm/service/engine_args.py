"""Arguments that a user passes through to vLLM: which ones are accepted, and their parsing by vLLM's own parser."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any, Final, NoReturn

from headrace_common.errors import ConfigError
from headrace_engine.vllm.drafts import METHODS
from headrace_engine.vllm.service.adapters import LORA_MODULES

LORA_PARSER_MODULES: Final = (
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
)
"""Where vLLM has LoRAParserAction: from 0.33 on, and before."""
SETTINGS: Final[Mapping[str, str]] = {
    "model": "model",
    "served_model_name": "served_model",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks_override",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_gib",
}
"""vLLM's arguments that are settings of the worker, which reads them for itself as well."""

_CONNECTOR = "Headrace's connector is the engine's only one"
_TOKENIZER = "the router tokenizes, with the tokenizer of the folder in its models"
_ONE_RANK = "a worker is one data-parallel rank: give data_parallel_size and data_parallel_rank"
_RANKS = "a KV transfer has tensor-parallel ranks and stages: set tensor_parallel_size or pipeline_parallel_size"
_DRAFT = "part of --speculative-config, which prefill and decode workers take"
_LORA = "routers select adapters by name: give --enable-lora and --lora-modules"
_HOOKS = "the connector's hooks depend on vLLM's own class"
_NETWORK = "the engine has no port of its own"
_REASONING = (
    "answers of constrained form begin without reasoning: set reasoning_parser of the router"
)
_SAMPLING = "routers fill in the sampling defaults, so that each attempt of a request has the same"

REFUSED: Final[Mapping[str, str]] = {
    "kv_offloading_backend": "vLLM's own offloading is the only one that is tested",
    "ec_transfer_config": _CONNECTOR,
    "enable_chunked_prefill": "prompts are computed in chunks: set max_num_batched_tokens",
    "skip_tokenizer_init": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "generation_config": _SAMPLING,
    "override_generation_config": _SAMPLING,
    "reasoning_parser": _REASONING,
    "reasoning_parser_plugin": _REASONING,
    "logits_processors": "the first token may be sampled outside the engine's steps, without them",
    "disable_log_stats": "the worker's own metrics replace vLLM's",
    "use_tqdm_on_load": "logs have no progress bars",
    "prefill_context_parallel_size": _RANKS,
    "decode_context_parallel_size": _RANKS,
    "distributed_executor_backend": "the engine's processes are forked, with the connector's link",
    "data_parallel_start_rank": _ONE_RANK,
    "data_parallel_size_local": _ONE_RANK,
    "data_parallel_backend": _ONE_RANK,
    "data_parallel_hybrid_lb": _ONE_RANK,
    "data_parallel_multi_port_external_lb": _ONE_RANK,
    "enable_elastic_ep": _ONE_RANK,
    "spec_method": _DRAFT,
    "spec_model": _DRAFT,
    "spec_tokens": _DRAFT,
    "default_mm_loras": _LORA,
    "worker_cls": _HOOKS,
    "worker_extension_cls": "hidden states are read and used by an extension of ours",
    "scheduler_cls": _HOOKS,
    "runner": "the contract generates text: no pooling",
    "otlp_traces_endpoint": "set otlp_endpoint, which sends the whole request's spans",
    "weight_transfer_config": "weights that change would make cached KV wrong",
    "enable_sleep_mode": "a sleeping engine cannot receive KV",
    "revision": "name the model as NAME@REVISION, so that routers and workers load the same",
    "trust_remote_code": "code of a model's folder would run beside the worker's keys: name a model that vLLM has",
    "hf_token": "no secret on a command line: set the variable HF_TOKEN",
}
"""Arguments of vLLM that contradict what Headrace needs of the engine, and why."""

KV_ARGUMENTS: Final = (
    "hf_overrides",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
)
"""Arguments that change the meaning of the KV bytes: workers with different values must not exchange KV."""

ARGUMENTS_MAX: Final = 256
MASTER_PORT: Final = 29501
"""vLLM's own, where none is given."""
_GIB: Final = 1 << 30
_MESSAGE_CHARACTERS_MAX: Final = 300
_UNSET: Final = object()


SPECULATION: Final = "speculative_config"
DRAFTS_WITHOUT_A_MODEL: Final = ("ngram",)
"""On decode workers only: they come from the request's own tokens, and the model and its KV are the same."""
OFFLOADING: Final = "OffloadingConnector"
"""The connector that may run beside Headrace's. The two arguments that select it follow."""
OFFLOADING_SIZE: Final = "kv_offloading_size"
TRANSFER_CONFIG: Final = "kv_transfer_config"
ASYNC_SCHEDULING: Final = "async_scheduling"
"""Unless it is given, vLLM decides by the platform."""


def split_engine_args(text: str) -> tuple[str, ...]:
    """Splits arguments as a shell does. Raises ConfigError for those that Headrace owns, without loading vLLM."""
    try:
        arguments = tuple(shlex.split(text))
    except ValueError as error:
        raise _wrong(f"engine_args has an open quote ({error}): close it") from error
    if len(arguments) > ARGUMENTS_MAX:
        raise _wrong(f"engine_args has more than {ARGUMENTS_MAX} parts: shorten it")
    if arguments and not arguments[0].startswith("-"):
        raise _wrong(
            f"engine_args begins with {arguments[0]!r}: begin with an argument, such as --quantization fp8; "
            "the model is the setting model"
        )
    _check_owned(_name(argument) for argument in arguments if argument.startswith("--"))
    return arguments


def parse_engine_args(arguments: Sequence[str], role: str = "") -> dict[str, Any]:
    """The fields of vLLM's AsyncEngineArgs that `arguments` set, and LORA_MODULES. vLLM must be imported.

    Raises ConfigError.
    """
    if not arguments:
        return {}
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = [*(field.name for field in fields(AsyncEngineArgs)), LORA_MODULES]
    # A parser fills in its defaults only where the namespace has no value.
    parsed = _vllm_parser(names).parse_args(
        list(arguments), argparse.Namespace(**dict.fromkeys(names, _UNSET))
    )
    given = {name: value for name in names if (value := getattr(parsed, name)) is not _UNSET}
    # The parser has resolved short names.
    structured = given.get("structured_outputs_config")
    _check_owned(
        (*given, *(["reasoning_parser"] if getattr(structured, "reasoning_parser", "") else []))
    )
    _check_speculation(given.get(SPECULATION), role)
    return given


def take_kv_events(given: dict[str, Any]) -> Any:
    """Removes what other readers of KV events want, a KVEventsConfig. None without any. Raises ConfigError.

    As for vLLM, each data-parallel rank has a port of its own.
    """
    config = given.pop("kv_events_config", None)
    if config is None or config.publisher != "zmq":
        return None
    if config.replay_endpoint:
        raise _wrong(
            "engine_args: kv_events_config has replay_endpoint, and events are sent once: leave it out"
        )
    if rank := given.get("data_parallel_rank"):
        from vllm.distributed.kv_events import ZmqEventPublisher

        config.endpoint = ZmqEventPublisher.offset_endpoint_port(config.endpoint, rank)
    return config


def take_offloading(given: dict[str, Any]) -> dict[str, Any] | None:
    """Removes what selects vLLM's OffloadingConnector. Returns that connector's extra configuration, None without one.

    Raises ConfigError for another connector.
    """
    gib, config = given.pop(OFFLOADING_SIZE, None), given.pop(TRANSFER_CONFIG, None)
    if config is None:
        return None if gib is None else {"cpu_bytes_to_use": int(gib * _GIB)}
    if config.kv_connector != OFFLOADING:
        raise _wrong(
            f"engine_args: kv_transfer_config has {config.kv_connector}, and {OFFLOADING} is the only connector that "
            "runs beside Headrace's: leave it out"
        )
    return {
        **config.kv_connector_extra_config,
        **({"cpu_bytes_to_use": int(gib * _GIB)} if gib else {}),
    }


def _check_speculation(config: Mapping[str, Any] | None, role: str) -> None:
    method = None if config is None else config.get("method")
    if config is None or method in METHODS:
        return
    if method not in DRAFTS_WITHOUT_A_MODEL:
        raise _wrong(
            f"engine_args: speculative_config has method {method!r}, and Headrace does not hand over its drafts: "
            f"choose {', '.join((*METHODS, *DRAFTS_WITHOUT_A_MODEL))}"
        )
    if role != "decode":
        raise _wrong(
            f"engine_args: speculative_config has method {method!r}, which drafts answers without a model: give it to "
            "decode workers only"
        )


def check_combinations(given: Mapping[str, Any], stages: int) -> None:
    """Raises ConfigError for parsed arguments that exclude each other, or pipeline stages."""
    if SPECULATION in given and stages > 1:
        raise _wrong(
            "engine_args: with speculative_config, vLLM asks for drafts while other stages compute, and this is not "
            "tested: leave it out, or set pipeline_parallel_size to 1"
        )
    _check_ranks(given)
    if not given.get(ASYNC_SCHEDULING):
        return
    if (given.get(SPECULATION) or {}).get("method") in DRAFTS_WITHOUT_A_MODEL:
        raise _wrong(
            "engine_args: vLLM does not plan steps ahead with drafts by n-grams: leave out async_scheduling, or "
            "speculative_config"
        )
    if stages > 1:
        raise _wrong(
            "engine_args: vLLM plans no further steps ahead with pipeline stages: leave out async_scheduling, or set "
            "pipeline_parallel_size to 1"
        )


def node_rank(text: str) -> int:
    """This host's number among those of the engine: 0 for the one that serves. Does not load vLLM, which checks it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-rank", "--node_rank", "-r", default="0")
    found: str = parser.parse_known_args(split_engine_args(text))[0].node_rank
    return int(found) if found.isdecimal() else 0


def link_address(given: Mapping[str, Any]) -> str:
    """Where the link serves the ranks of other hosts. Empty where the engine has one host."""
    if given.get("nnodes", 1) == 1:
        return ""
    host, port = given["master_addr"], given.get("master_port", MASTER_PORT) + 1
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_ranks(given: Mapping[str, Any]) -> None:
    """Each worker is one data-parallel rank: routers balance the load, and vLLM calls that external."""
    size, rank = given.get("data_parallel_size", 1), given.get("data_parallel_rank")
    nodes = given.get("nnodes", 1)
    if nodes > 1 and "master_addr" not in given:
        raise _wrong(
            f"engine_args: nnodes is {nodes} without master_addr: give the address of the host with node_rank 0"
        )
    if nodes > 1 and size > 1:
        raise _wrong(
            "engine_args: data-parallel ranks of several hosts each are not tested: leave out nnodes, or "
            "data_parallel_size"
        )
    if size > 1 and rank is None:
        raise _wrong(
            f"engine_args: data_parallel_size is {size} without data_parallel_rank: start {size} workers, with the "
            f"ranks 0 to {size - 1}"
        )
    if rank is not None and not 0 <= rank < size:
        raise _wrong(
            f"engine_args: data_parallel_rank is {rank} and data_parallel_size {size}: give a rank below the size"
        )
    if size == 1 and given.get("data_parallel_external_lb"):
        raise _wrong(
            "engine_args: data_parallel_external_lb is for data-parallel ranks: leave it out"
        )


def fingerprint_with(fingerprint: str, given: Mapping[str, Any], draft: str = "") -> str:
    """The model's identity, with its draft's and the arguments that change the meaning of the KV bytes."""
    changes = [f"{name}={given[name]}" for name in KV_ARGUMENTS if name in given]
    return ";".join((fingerprint, *changes, *([f"draft={draft}"] if draft else [])))


def _name(argument: str) -> str:
    """The field that an argument sets, such as enable_prefix_caching for --no-enable-prefix-caching=x."""
    flag = argument.partition("=")[0].partition(".")[0]
    return flag.removeprefix("--").replace("-", "_").removeprefix("no_")


def _check_owned(names: Iterable[str]) -> None:
    problems: list[str] = []
    for name in dict.fromkeys(names):
        if name in SETTINGS:
            problems.append(f"{name} is a setting of the worker: set {SETTINGS[name]} instead")
        elif name in REFUSED:
            problems.append(f"{name} belongs to Headrace ({REFUSED[name]}): leave it out")
        elif name in ("config", "help"):
            problems.append(f"{name} is no argument of the engine: leave it out")
    if problems:
        raise _wrong("engine_args: " + "; ".join(problems))


def _rejection(message: str, names: Sequence[str]) -> ConfigError:
    """The error for a message of vLLM's parser."""
    message = " ".join(message.split())[:_MESSAGE_CHARACTERS_MAX]
    _, unknown, rest = message.partition("unrecognized arguments: ")
    if not unknown or not rest.startswith("--"):
        return _wrong(f"engine_args: vLLM rejects them: {message}")
    near = difflib.get_close_matches(_name(rest.split()[0]), names, n=1)
    hint = (
        f"did you mean --{near[0].replace('_', '-')}?"
        if near
        else "`vllm serve --help=all` lists them"
    )
    return _wrong(f"engine_args: this vLLM has no argument {rest.split()[0]}: {hint}")


def _wrong(detail: str) -> ConfigError:
    return ConfigError(detail, metadata={"field": "engine_args"})


def _vllm_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """vLLM's parser, which raises ConfigError where it would end the process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _rejection(message, names)

    parser: argparse.ArgumentParser = AsyncEngineArgs.add_cli_args(
        Parser(add_help=False, allow_abbrev=False)
    )
    parser.add_argument("--lora-modules", nargs="+", action=_lora_parser_action())
    return parser


def _lora_parser_action() -> type[argparse.Action]:
    """vLLM's action of --lora-modules."""
    new, old = LORA_PARSER_MODULES
    try:
        module = import_module(new)
    except ModuleNotFoundError:
        module = import_module(old)
    found: type[argparse.Action] = module.LoRAParserAction
    return found
