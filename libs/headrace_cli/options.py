"""Options that several commands share: the deployment that they call, and what shells offer for arguments."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from headrace_cli.output import failures_as_exit, option
from headrace_common import ports
from headrace_common.errors import ConfigError
from headrace_common.ports import split_host_port

FILE_VARIABLE: Final = "HEADRACE_CONFIG"
_ADDRESSES: Final = ("router", "registry", "internal")
ROUTER_VARIABLE = "HEADRACE_ENDPOINT"
REGISTRY_VARIABLE = "HEADRACE_REGISTRY"
_VARIABLES: Final = {"router": ROUTER_VARIABLE, "registry": REGISTRY_VARIABLE}
_GIVEN: Final = ("COMMANDLINE", "ENVIRONMENT")
_TLS: Final = ("tls_authority_file", "tls_certificate_file", "tls_key_file")
# Variables of a group replace the file's whole group.
_CREDENTIALS: Final = (
    (_TLS, tuple(f"HEADRACE_{name.upper()}" for name in _TLS)),
    (("token_file",), ("HEADRACE_TOKEN_FILE",)),
    (("api_key_file",), ("HEADRACE_API_KEY_FILE", "HEADRACE_API_KEY")),
)
_KEYS: Final = frozenset((*_ADDRESSES, *_TLS, "token_file", "api_key_file"))


class AddressedCommand(TyperCommand):
    """A command that calls a deployment."""

    def invoke(self, ctx: Any) -> Any:
        with failures_as_exit():
            apply_file(ctx)
        return super().invoke(ctx)


def check_address(what: str, text: str) -> str:
    """Returns the address of a server, "host:port". `what` names its source. Raises ConfigError with the remedy."""
    try:
        if split_host_port(text)[1] == 0:
            raise ValueError("no server has port 0: name its port, such as 127.0.0.1:7050")
    except ValueError as error:
        raise ConfigError(f"{what} is {text!r}: {error}") from error
    return text


def apply_file(ctx: typer.Context) -> None:
    """Checks the addresses of a command and completes them. Sets the variables of the file's credentials.

    A command that names another address than the file's gets nothing of the file: its credentials go to its own
    deployment only. Raises ConfigError.
    """
    given = dict(_given_addresses(ctx))
    file = read_file()
    if not file or any(text != file.get(option) for option, text in given.items()):
        return
    missing = [option for option in _ADDRESSES if option in ctx.params and option not in given]
    ctx.params.update({option: file.get(option, "") for option in missing})
    for settings, variables in _CREDENTIALS:
        if not any(os.environ.get(variable) for variable in variables):
            named = zip(settings, variables, strict=False)
            os.environ.update({variable: file[name] for name, variable in named if name in file})


def read_file() -> Mapping[str, str]:
    """The settings of the user's file; paths are absolute. Empty without a file. Raises ConfigError."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = (Path(base) if base else Path.home() / ".config") / "headrace"
    named = os.environ.get(FILE_VARIABLE)
    if named == "":
        return {}
    path = Path(named) if named else folder / "config.toml"
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.getuid()) or stat.S_IMODE(status.st_mode) & 0o022:
                raise ConfigError(
                    f"other users can change {path}: run `chown $USER {path}; chmod 600 {path}`"
                )
            values = tomllib.load(file)
    except FileNotFoundError:
        if named:
            raise ConfigError(f"{FILE_VARIABLE} names {path}, which does not exist") from None
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return _checked(path, values)


def _checked(path: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """The settings with absolute paths. Raises ConfigError for one that is wrong."""
    unknown = sorted(values.keys() - _KEYS)
    if unknown or not all(isinstance(value, str) and value for value in values.values()):
        where = f" at {unknown[0]}" if unknown else ""
        names = ", ".join(sorted(_KEYS))
        raise ConfigError(f"{path} is wrong{where}: it has texts only, named {names}")
    if "router" not in values:
        raise ConfigError(f"{path} names no router: write router = 'HOST:PORT'")
    for name in _ADDRESSES:
        if name in values:
            check_address(f"{name} of {path}", values[name])
    absolute = path.absolute().parent
    return {
        name: value if name in _ADDRESSES else str(absolute / Path(value).expanduser())
        for name, value in values.items()
    }


def _given_addresses(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    for name in _ADDRESSES:
        source = ctx.get_parameter_source(name)
        text = ctx.params.get(name)
        if source is not None and source.name in _GIVEN and text:
            what = f"--{name}" if source.name == _GIVEN[0] else _VARIABLES[name]
            yield name, check_address(what, text)


DEFAULT_ROUTER = f"127.0.0.1:{ports.ROUTER}"
DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct")


Router = Annotated[
    str,
    option(
        "Router to call, by its address for clients.",
        "--router",
        metavar="HOST:PORT",
        envvar=ROUTER_VARIABLE,
    ),
]
Registry = Annotated[
    str,
    option(
        "Registry to call; empty means that of `headrace up`.",
        metavar="HOST:PORT",
        envvar=REGISTRY_VARIABLE,
    ),
]
RouterInternal = Annotated[
    str,
    option(
        "Internal address of the router; empty means as the registry has it.",
        "--internal",
        metavar="HOST:PORT",
    ),
]
Engine = Annotated[
    str, option("vllm for real models, sim for the simulated one.", metavar="ENGINE")
]
Model = Annotated[
    str,
    option(
        "Folder in the Hugging Face layout, or OWNER/NAME or hf:OWNER/NAME, which is downloaded; "
        f"for vllm the default is {DEFAULT_MODEL}",
        metavar="MODEL",
    ),
]
_BOTH = "Workers of both roles: each computes prompts for the others, and generates."
WorkerCount = Annotated[int, option(_BOTH, "--workers", metavar="N", min=0)]
_ONE = "workers. The default is 1 without --workers."
PrefillCount = Annotated[int | None, option(f"Prefill {_ONE}", "--prefill", metavar="N", min=0)]
DecodeCount = Annotated[int | None, option(f"Decode {_ONE}", "--decode", metavar="N", min=0)]
Port = Annotated[int, option("Port of the router; 0 takes any.", metavar="PORT", min=0)]
_HTTP = "Port of the OpenAI HTTP API; 0 takes any. The default is 6 above --port."
HttpPort = Annotated[int | None, option(_HTTP, metavar="PORT", min=0)]
Store = Annotated[
    str,
    option("Where the registry stores its records: memory, or etcd://HOST:PORT.", metavar="STORE"),
]
_POOL = "Memory of a store on this machine where all workers share KV blocks; 0 starts none."
StorePool = Annotated[float, option(_POOL, metavar="GIB", min=0.0)]
_RANKS = "Ranks of each worker; N:M gives prefill N and decode M."
TensorParallel = Annotated[str, option(_RANKS, "--tensor-parallel-size", metavar="N or N:M")]
Devices = Annotated[
    str,
    option(
        "GPUs by number or UUID, for the ranks of prefill workers, then of decode workers, then of those of both "
        "roles.",
        "--devices",
        metavar="GPU,GPU",
    ),
]
CpuThreads = Annotated[int, option("Compute threads of each worker on CPUs.", metavar="N", min=1)]
_flag = partial(option, rich_help_panel="Flags of vLLM, for all workers")
ServedModelName = Annotated[str, _flag("Name that clients call the model by.", metavar="NAME")]
_LEN = "Most tokens of prompt and answer together; 0 means the model's own, as far as the memory for KV goes."
MaxModelLen = Annotated[int, _flag(_LEN, metavar="N", min=0)]
MaxNumSeqs = Annotated[
    int, _flag("Most requests that a worker computes at once.", metavar="N", min=0)
]
MaxNumBatchedTokens = Annotated[
    int, _flag("Most tokens of one step of a worker's engine.", metavar="N", min=0)
]
Dtype = Annotated[
    str, _flag("Type of weights and KV cache: auto, float32, bfloat16 or float16.", metavar="TYPE")
]
GpuMemoryUtilization = Annotated[
    float, _flag("Share of a GPU's memory for each rank.", metavar="SHARE", min=0, max=1)
]
Quantization = Annotated[str, _flag("How weights are quantized.", metavar="METHOD")]
EnableLora = Annotated[bool, _flag("Serve LoRA adapters.", "--enable-lora")]
LoraModules = Annotated[
    list[str] | None, _flag("A LoRA adapter to load; may be repeated.", metavar="NAME=FOLDER")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", hidden=True)]
_SET = "Any other setting, as SERVICE.FIELD=VALUE; may be repeated. `headrace-decode --help` lists those of decode."
Settings = Annotated[list[str] | None, option(_SET, "--set", metavar="SETTING")]
_LOGS = "Folder of logs; the default is in ~/.local/state/headrace."
Logs = Annotated[Path | None, option(_LOGS, metavar="FOLDER")]
_MODEL = "Model to call; empty means the only one served."
RequestModel = Annotated[str, option(_MODEL, "--model")]
SystemMessage = Annotated[
    str, option("System message at the start of the conversation.", "--system")
]
_TOKENS = "Most tokens to generate. Without it, as many as the context leaves."
MaxTokens = Annotated[int | None, option(_TOKENS, metavar="N", min=1)]
