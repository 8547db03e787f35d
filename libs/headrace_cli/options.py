"""Options that several commands share: the deployment that they call, and what shells offer for arguments."""

from __future__ import annotations

import asyncio
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members, registry_of
from headrace_cli.output import failures_as_exit
from headrace_common import ports
from headrace_common.config import split_host_port
from headrace_common.errors import ConfigError, HeadraceError

FILE_VARIABLE: Final = "HEADRACE_CONFIG"
_OLD_FILE: Final = "contexts.json"
_OLD_VARIABLE: Final = "HEADRACE_CONTEXT"
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
    if os.environ.get(_OLD_VARIABLE):
        raise ConfigError(
            f"{_OLD_VARIABLE} is no longer read: name a file by {FILE_VARIABLE} (docs/commands.md)"
        )
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
        if (folder / _OLD_FILE).exists():
            raise ConfigError(
                f"{folder / _OLD_FILE} is no longer read: write its addresses and files to {path} "
                "(docs/commands.md), and remove it"
            ) from None
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
    for option in _ADDRESSES:
        if option in values:
            check_address(f"{option} of {path}", values[option])
    absolute = path.absolute().parent
    return {
        name: value if name in _ADDRESSES else str(absolute / Path(value).expanduser())
        for name, value in values.items()
    }


def _given_addresses(ctx: typer.Context) -> Iterator[tuple[str, str]]:
    for option in _ADDRESSES:
        source = ctx.get_parameter_source(option)
        text = ctx.params.get(option)
        if source is not None and source.name in _GIVEN and text:
            what = f"--{option}" if source.name == _GIVEN[0] else _VARIABLES[option]
            yield option, check_address(what, text)


DEFAULT_ROUTER = f"127.0.0.1:{ports.ROUTER}"
DEFAULT_MODEL = Path("models/SmolLM2-135M-Instruct")

Router = Annotated[
    str,
    typer.Option(
        "--router",
        metavar="HOST:PORT",
        envvar=ROUTER_VARIABLE,
        help="Router to call, by its address for clients.",
    ),
]
Registry = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        envvar=REGISTRY_VARIABLE,
        help="Registry to call; empty means that of `headrace up`.",
    ),
]
RouterInternal = Annotated[
    str,
    typer.Option(
        "--internal",
        metavar="HOST:PORT",
        help="Internal address of the router; empty means as the registry has it.",
    ),
]
Engine = Annotated[
    str, typer.Option(metavar="ENGINE", help="vllm for real models, sim for the simulated one.")
]
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Folder in the Hugging Face layout, or OWNER/NAME or hf:OWNER/NAME, which is downloaded; "
        f"for vllm the default is {DEFAULT_MODEL}",
    ),
]
WorkerCount = Annotated[
    int,
    typer.Option(
        "--workers",
        metavar="N",
        min=0,
        help="Workers of both roles: each computes prompts for the others, and generates.",
    ),
]
PrefillCount = Annotated[
    int | None,
    typer.Option(
        "--prefill", metavar="N", min=0, help="Prefill workers. The default is 1 without --workers."
    ),
]
DecodeCount = Annotated[
    int | None,
    typer.Option(
        "--decode", metavar="N", min=0, help="Decode workers. The default is 1 without --workers."
    ),
]
Port = Annotated[
    int,
    typer.Option(metavar="PORT", min=0, help="Port of the router; 0 takes any."),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        min=0,
        help="Port of the OpenAI HTTP API; 0 takes any. The default is 6 above --port.",
    ),
]
Store = Annotated[
    str,
    typer.Option(
        metavar="STORE",
        help="Where the registry stores its records: memory, or etcd://HOST:PORT.",
    ),
]
StorePool = Annotated[
    float,
    typer.Option(
        metavar="GIB",
        min=0.0,
        help="Memory of a store on this machine where all workers share KV blocks; 0 starts none.",
    ),
]
TensorParallel = Annotated[
    str,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N or N:M",
        help="Ranks of each worker; N:M gives prefill N and decode M.",
    ),
]
Devices = Annotated[
    str,
    typer.Option(
        "--devices",
        metavar="GPU,GPU",
        help="GPUs by number or UUID, for the ranks of prefill workers, then of decode workers, then of those of both "
        "roles.",
    ),
]
CpuThreads = Annotated[
    int, typer.Option(metavar="N", min=1, help="Compute threads of each worker on CPUs.")
]


def _flag(metavar: str | None, text: str, *words: str, **bounds: Any) -> Any:
    """A flag of vLLM, by its name there."""
    panel = "Flags of vLLM, for all workers"
    return typer.Option(*words, metavar=metavar, rich_help_panel=panel, help=text, **bounds)


ServedModelName = Annotated[str, _flag("NAME", "Name that clients call the model by.")]
_LEN = "Most tokens of prompt and answer together; 0 means the model's own, as far as the memory for KV goes."
MaxModelLen = Annotated[int, _flag("N", _LEN, min=0)]
MaxNumSeqs = Annotated[int, _flag("N", "Most requests that a worker computes at once.", min=0)]
MaxNumBatchedTokens = Annotated[
    int, _flag("N", "Most tokens of one step of a worker's engine.", min=0)
]
Dtype = Annotated[
    str, _flag("TYPE", "Type of weights and KV cache: auto, float32, bfloat16 or float16.")
]
GpuMemoryUtilization = Annotated[
    float, _flag("SHARE", "Share of a GPU's memory for each rank.", min=0, max=1)
]
Quantization = Annotated[str, _flag("METHOD", "How weights are quantized.")]
EnableLora = Annotated[bool, _flag(None, "Serve LoRA adapters.", "--enable-lora")]
LoraModules = Annotated[
    list[str] | None, _flag("NAME=FOLDER", "A LoRA adapter to load; may be repeated.")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", hidden=True)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SETTING",
        help="Any other setting, as SERVICE.FIELD=VALUE; may be repeated. `headrace-decode --help` lists those of "
        "decode.",
    ),
]
Logs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder of logs; the default is in ~/.local/state/headrace."
    ),
]
RequestModel = Annotated[
    str, typer.Option("--model", help="Model to call; empty means the only one served.")
]
SystemMessage = Annotated[
    str, typer.Option("--system", help="System message at the start of the conversation.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Most tokens to generate. Without it, as many as the context leaves.",
    ),
]


_TIMEOUT_S = 1.0


def complete_workers(incomplete: str) -> list[str]:
    """The ids of the workers of the deployment that the environment names, or of that on this machine."""
    try:
        router = os.environ.get(ROUTER_VARIABLE, "") or DEFAULT_ROUTER
        registry = os.environ.get(REGISTRY_VARIABLE, "")
        members = asyncio.run(asyncio.wait_for(_members(router, registry), _TIMEOUT_S))
    except (HeadraceError, TimeoutError):
        return []
    return [
        member.worker_id
        for member in members
        if member.role != registry_pb2.Member.ROLE_ROUTER
        and member.worker_id.startswith(incomplete)
    ]


async def _members(router: str, registry: str) -> list[registry_pb2.Member]:
    return await list_members(await registry_of(router, registry))
