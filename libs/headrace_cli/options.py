"""Options that several commands share, and what shells offer for arguments."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members, registry_of
from headrace_common import ports
from headrace_common.errors import HeadraceError

ROUTER_VARIABLE = "HEADRACE_ENDPOINT"
REGISTRY_VARIABLE = "HEADRACE_REGISTRY"
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
    int,
    typer.Option(
        metavar="N", min=0, help="Most tokens to generate; 0 means what the context leaves."
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
