"""The router's settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.roles import Role
from headrace_common.client_config import ClientFacingConfig
from headrace_common.config import (
    NonNegativeCount,
    NonNegativeSeconds,
    OptionalHostPort,
    OptionalWorkerId,
    PrefixFetchGain,
    ServiceConfig,
    TextList,
    checked_by,
    require_order,
)
from headrace_frontend.config import FrontendConfig
from headrace_kv.prefix.fetch_rule import DEFAULT_GAIN
from headrace_text.model_hub import parse_hub_model


def _name_and_folder(entry: str) -> tuple[str, str]:
    name, equals, folder = entry.partition("=")
    if equals:
        return name.strip(), folder.strip()
    hub_model = parse_hub_model(entry)
    return (Path(entry).name if hub_model is None else hub_model.repository), entry


def _check_models(entries: tuple[str, ...]) -> None:
    if not entries:
        raise ValueError("name at least one model, as NAME=FOLDER")
    pairs = [_name_and_folder(entry) for entry in entries]
    for entry, (name, folder) in zip(entries, pairs, strict=True):
        if not name or not folder:
            raise ValueError(f"write {entry!r} as NAME=FOLDER")
        parse_hub_model(folder)
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"give each model its own name: {', '.join(twice)} is used twice")


ModelList = Annotated[TextList, checked_by(_check_models)]


class RouterConfig(FrontendConfig, ClientFacingConfig):
    """Headrace's router: places requests on workers and streams the responses."""

    role = Role.ROUTER
    internal_addresses = (
        *ServiceConfig.internal_addresses,
        "status_listen",
        "endpoint_picker_listen",
    )

    model: ModelList = Field(
        description="Served models, separated by commas: NAME=FOLDER, FOLDER (its last part is the name), "
        "NAME=hf:OWNER/NAME or hf:OWNER/NAME on a Hugging Face hub (its tokenizer is downloaded), or sim."
    )
    status_listen: OptionalHostPort = Field(
        "",
        description="host:port of the status page, for callers with the role operator; port 0 takes any free port. "
        "Empty: no page. Its connections have the same bounds as those to listen.",
    )
    endpoint_picker_listen: OptionalHostPort = Field(
        "",
        description="host:port of the Endpoint Picker, for gateways with the role gateway; port 0 takes any free port. "
        "Empty: no picker.",
    )
    router_id: OptionalWorkerId = Field(
        "",
        description="Name that stays the same after a restart. Set it where a restart changes the address. Empty: "
        "derived from the address.",
    )
    worker_wait_s: NonNegativeSeconds = Field(
        10.0,
        description="Seconds in which requests wait for a decode worker rather than fail, counted from the router's "
        "start or from the loss of the model's last worker. An answer that has begun waits as long for another worker "
        "after the loss of its own. Raise it where workers take longer to return.",
    )
    early_refusal: bool = Field(
        False,
        description="Whether a request is refused at once when its first token is predicted to come after its "
        "deadline. Set it where clients send again, or where overload lasts. Targets for the time to first token, of "
        "the policy or of a request, refuse in any case.",
    )
    batch_folder: str = Field(
        "",
        description="Folder of the files and batches of the OpenAI HTTP API, which no other router may use. Set it to "
        "a disk that outlasts the router. Empty: there are no files and no batches.",
    )
    batch_mib: NonNegativeCount = Field(
        4_096,
        description="MiB of batch_folder for all tenants. A tenant may have as many as are free still, so a single one "
        "has half of them at most. Raise it for larger batches.",
    )
    prefix_fetch_gain: PrefixFetchGain = DEFAULT_GAIN
    slow_trace_s: NonNegativeSeconds = Field(
        10.0,
        description="A time to the first token above this makes a request slow. Traces of slow and of failed requests "
        "are removed after all others, up to half of the 1,024 that are stored. Of one that was not sampled, the span "
        "of the request is stored, with the parts of its latency. Set it to the time that your clients accept. 0: no "
        "request is slow.",
    )

    @model_validator(mode="after")
    def _check_waits(self) -> RouterConfig:
        require_order(
            self,
            ("admission_wait_s", "default_deadline_s"),
            ("worker_wait_s", "default_deadline_s"),
        )
        return self

    @property
    def client_listeners(self) -> int:
        return (
            super().client_listeners + bool(self.status_listen) + bool(self.endpoint_picker_listen)
        )

    @property
    def status_tls(self) -> TlsFiles:
        """The files of status_listen. Browsers need no certificate where tokens are verified."""
        authority = "" if self.token_keys_file else self.tls_authority_file
        return replace(TlsFiles.from_config(self), tls_authority_file=authority)

    @property
    def model_names(self) -> Collection[str]:
        return self.models

    @property
    def models(self) -> dict[str, str]:
        """Folder of each model by served name, or "sim"."""
        return dict(_name_and_folder(entry) for entry in self.model)
