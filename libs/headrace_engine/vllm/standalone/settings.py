"""Settings of a stock vLLM server, from its kv_connector_extra_config."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from headrace_common import ports
from headrace_common.config import (
    HostPort,
    OptionalHostPort,
    PositiveSeconds,
    ServiceConfig,
    checked,
    wildcard_problems,
)
from headrace_common.errors import ConfigError
from headrace_common.limits import WRITE_LEASE_S, WRITE_QUARANTINE_S
from headrace_common.ports import split_host_port
from headrace_engine.vllm.compat import (
    engine_id,
    extra_config,
    kv_role,
    model_of,
    replica_count,
)
from headrace_engine.vllm.drafts import draft_model
from headrace_engine.vllm.model_folder import digest_of, read_model_folder
from headrace_engine.vllm.parallel import stage_count
from headrace_engine.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Role = Literal["prefill", "decode", "both"]
ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
PREFILL_LISTEN = f"127.0.0.1:{ports.PAIRS}"
DECODE_LISTEN = "127.0.0.1:0"
INCARNATION_HEX_LENGTH = 16
FOLDER_MODE = 0o700


class StandaloneSettings(BaseModel):
    """The fields of kv_connector_extra_config, see docs/stock-vllm.md.

    `listen` and `advertise`: the pair address, and the one under which others reach it.
    `transfer_timeout_s`: deadline of requests that have none. `kv_hold_timeout_s`: how long a computed prompt waits for
    its Fetch. `lease_ttl_s`, `quarantine_s`: see Receiver.
    `gpu_direct`: whether RDMA adapters may read and write the memory of a GPU.
    `fingerprint`: the model's identity, for servers that load one model from different places.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    listen: HostPort
    advertise: OptionalHostPort = ""
    transport: Literal["mooncake"] = "mooncake"
    transfer_timeout_s: PositiveSeconds = 60.0
    kv_hold_timeout_s: PositiveSeconds = 60.0
    lease_ttl_s: PositiveSeconds = WRITE_LEASE_S
    quarantine_s: PositiveSeconds = WRITE_QUARANTINE_S
    fingerprint: str = ""
    gpu_direct: bool = True

    @classmethod
    def read(cls, values: Mapping[str, Any], role: Role) -> StandaloneSettings:
        """Raises ConfigError naming every setting that is wrong."""
        listen = DECODE_LISTEN if role == "decode" else PREFILL_LISTEN
        try:
            return cls.model_validate({"listen": listen, **values})
        except ValidationError as error:
            problems = {
                str((one["loc"] or ("listen",))[0]): one["msg"].removeprefix("Value error, ")
                for one in error.errors()
            }
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ConfigError(f"kv_connector_extra_config: {listed}", metadata=problems)

    @model_validator(mode="after")
    def _check_listen(self) -> Self:
        return checked(self, wildcard_problems(self, "listen", "advertise"))

    @property
    def server(self) -> ServiceConfig:
        """For the server on the pair address. Stock vLLM servers have no roles: docs/stock-vllm.md."""
        return ServiceConfig(
            internal_listen=self.listen, internal_advertise=self.advertise, insecure=True
        )

    @property
    def host(self) -> str:
        """The host under which others reach this one."""
        return split_host_port(self.advertise or self.listen)[0]


def standalone_settings(vllm_config: VllmConfig) -> tuple[ConnectorSettings, StandaloneSettings]:
    """All settings of a stock server: the same in each of its processes. Raises ConfigError."""
    _require_supported(vllm_config)
    role = ROLES[kv_role(vllm_config)]
    standalone = StandaloneSettings.read(extra_config(vllm_config), role)
    identity = f"{engine_id(vllm_config)}/{standalone.listen}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:INCARNATION_HEX_LENGTH]
    connector = ConnectorSettings(
        role=role,
        worker_id=f"vllm-{name[:8]}",
        incarnation=name,
        host=standalone.host,
        transport=standalone.transport,
        fingerprint=standalone.fingerprint or _fingerprint(vllm_config),
        link_path=str(_private_folder(f"headrace-{os.getuid()}-{name}") / "link"),
        gpu_direct=standalone.gpu_direct,
    )
    return connector, standalone


def _require_supported(vllm_config: VllmConfig) -> None:
    problems: dict[str, str] = {}
    if replica_count(vllm_config) > 1:
        problems["data_parallel_size"] = (
            "must be 1: start a server for each replica, because only one of them holds a prompt"
        )
    if stage_count(vllm_config) > 1:
        problems["pipeline_parallel_size"] = (
            "must be 1: use tensor_parallel_size here, or a worker of Headrace, which has stages"
        )
    if draft_model(vllm_config) is not None:
        problems["speculative_config"] = (
            "must not draft with a model: use a worker of Headrace, which hands over the draft's KV"
        )
    if problems:
        listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ConfigError(listed, metadata=problems)


def _fingerprint(vllm_config: VllmConfig) -> str:
    """The identity of a model in a folder, or in the hub's cache."""
    model, fields_of_config = model_of(vllm_config)
    if Path(model).is_dir():
        return read_model_folder(model, 0).fingerprint
    return f"{model.rpartition('/')[2]}:{digest_of(fields_of_config)}"


def _private_folder(name: str) -> Path:
    """A folder that only this user can write to. Raises ConfigError when it belongs to another user."""
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    found = folder.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.getuid()
        or stat.S_IMODE(found.st_mode) & ~FOLDER_MODE
    ):
        raise ConfigError(
            f"{folder} belongs to another user: remove it, or set TMPDIR to a folder of your own",
            metadata={"field": "TMPDIR"},
        )
    return folder
