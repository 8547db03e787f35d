"""Settings of the processes that serve clients' requests: the router, and decode workers behind a gateway."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from headrace_common.client_config import ClientAccessConfig
from headrace_common.config import (
    NonNegativeCount,
    NonNegativeSeconds,
    OptionalHostPort,
    PositiveSeconds,
    TextList,
    checked,
    checked_by,
)
from headrace_common.ports import is_loopback
from headrace_frontend.tenants import PrefixCacheScope
from headrace_text.parsing.registry import NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS


def _check_parsers(entries: tuple[str, ...], known: Collection[str]) -> None:
    for entry in entries:
        name = entry.rpartition("=")[2].strip()
        if name not in known and name != NO_PARSER:
            raise ValueError(
                f"{name!r} is no parser; use {NO_PARSER}, or one of: {', '.join(sorted(known))}"
            )


def _check_image_hosts(hosts: tuple[str, ...]) -> None:
    for host in hosts:
        parts = urlsplit(f"//{host}")
        try:
            is_host = (
                parts.netloc == host and parts.hostname and parts.port != 0 and "*" not in host
            )
        except ValueError:
            is_host = False
        if not is_host or parts.username is not None:
            raise ValueError(f"{host!r} is no host; write HOST or HOST:PORT")


def _check_origins(origins: tuple[str, ...]) -> None:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is no origin; write https://HOST or https://HOST:PORT in lower case, or *"
            )


_ORIGIN: Final = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:.]+\](:[0-9]{1,5})?"
)

ToolCallParserList = Annotated[
    TextList, checked_by(lambda entries: _check_parsers(entries, TOOL_CALL_PARSERS))
]
ReasoningParserList = Annotated[
    TextList, checked_by(lambda entries: _check_parsers(entries, REASONING_PARSERS))
]
ImageHostList = Annotated[TextList, checked_by(_check_image_hosts)]
OriginList = Annotated[TextList, checked_by(_check_origins)]


# More where max_concurrent_requests asks for it.
QUEUED_TOKENS: Final = 4_194_304
QUEUED_TOKENS_PER_REQUEST: Final = 4_096


class FrontendConfig(ClientAccessConfig):
    """The settings of the OpenAI HTTP API, and the bounds on clients' requests."""

    http_listen: OptionalHostPort = Field(
        default="",
        description="host:port of the OpenAI HTTP API; port 0 takes any free port. Empty: no HTTP. Its connections "
        "have the same bounds as those to listen.",
    )
    http_origins: OriginList = Field(
        default=(),
        description="Origins of web pages that may call the HTTP API from a browser, such as "
        "https://chat.example.org, separated by commas; * for every page. Empty: none.",
    )
    tool_call_parser: ToolCallParserList = Field(
        default=(),
        description="How the models write tool calls: a parser's name, or MODEL=NAME for each model, separated by "
        "commas. Empty: the one that the model's chat template shows. none: none. Names: docs/openai.md.",
    )
    reasoning_parser: ReasoningParserList = Field(
        default=(),
        description="How the models write reasoning: a parser's name, or MODEL=NAME for each model, separated by "
        "commas. Empty: the one that the model's chat template shows. none: reasoning stays in the content. Names: "
        "docs/openai.md.",
    )
    api_keys_file: str = Field(
        default="",
        description="File of API keys: one line KEY TENANT for each, or TOML; read again when it changes. "
        "Empty: requests need no key.",
    )

    prefix_cache_scope: PrefixCacheScope = Field(
        default="auto",
        description="Which requests share cached prefixes: all (shared), or those of one tenant (tenant), so that no "
        "tenant can find out what others have asked. auto: tenant with api_keys_file, shared without.",
    )
    default_deadline_s: PositiveSeconds = Field(
        default=600.0,
        description="Deadline in seconds of a request if its client sets none. Raise it for answers that take longer.",
    )
    admission_wait_s: NonNegativeSeconds = Field(
        default=0.0,
        description="Seconds that a request beyond its tenant's share waits for a slot of a decode worker. 0: until "
        "its deadline, as a request within the share. Set it for clients that send again elsewhere.",
    )

    reject_unknown_fields: bool = Field(
        default=False,
        description="Whether the HTTP API rejects requests with a field that it does not have, or with more max_tokens "
        "than the context leaves. Otherwise it ignores the field, and names it in the response's header "
        "x-headrace-ignored-fields, and lowers max_tokens, with the header x-headrace-max-tokens.",
    )

    stream_ping_s: NonNegativeSeconds = Field(
        default=10.0,
        description="Seconds without an event after which an event stream gets a comment, or that of Messages a ping, "
        "so that proxies keep it open. The first sends the status too. 0: never.",
    )

    image_hosts: ImageHostList = Field(
        default=(),
        description="Hosts from which images in requests may be fetched: HOST or HOST:PORT, separated by commas. "
        "A name must have a public address; list others as an address. Empty: none, and clients send data: URLs.",
    )

    conversations_mib: NonNegativeCount = Field(
        default=256,
        description="MiB of main memory for responses and conversations that clients name by an id "
        "(previous_response_id, conversation, resume), for an hour after the last use. Without room, the tenant with "
        "the most loses its oldest. 0: none is kept, and clients send whole conversations.",
    )

    @property
    def queued_tokens_max(self) -> int:
        """Prompt tokens of requests without a first token, before more are rejected."""
        return max(QUEUED_TOKENS, QUEUED_TOKENS_PER_REQUEST * self.max_concurrent_requests)

    @property
    def clients_prove_themselves(self) -> bool:
        return bool(self.api_keys_file)

    @property
    def client_listeners(self) -> int:
        return super().client_listeners + bool(self.http_listen)

    @property
    def serves_metrics(self) -> bool:
        is_read = bool(self.metrics_keys_file) or is_loopback(self.http_listen)
        return super().serves_metrics or (bool(self.http_listen) and is_read)

    @property
    @abstractmethod
    def model_names(self) -> Collection[str]:
        """The names of the served models."""

    @property
    def parsers(self) -> dict[str, tuple[str, str]]:
        """The parsers of tool calls and of reasoning for each served model. Empty: as its chat template shows."""
        calls, reasoning = self._by_model("tool_call_parser"), self._by_model("reasoning_parser")
        return {name: (calls.get(name, ""), reasoning.get(name, "")) for name in self.model_names}

    @model_validator(mode="after")
    def _check_http(self) -> FrontendConfig:
        problems = self.unguarded_problems("http_listen")
        return checked(self, problems)

    @model_validator(mode="after")
    def _check_parsed_models(self) -> FrontendConfig:
        for setting in ("tool_call_parser", "reasoning_parser"):
            self._by_model(setting)
        return self

    @model_validator(mode="after")
    def _check_scope(self) -> FrontendConfig:
        if self.prefix_cache_scope == "tenant" and not self.api_keys_file:
            raise ValueError(
                "prefix_cache_scope is tenant, and without API keys all callers are one tenant: set api_keys_file, or "
                "leave prefix_cache_scope at auto"
            )
        return self

    @property
    def separates_tenants(self) -> bool:
        """Whether each tenant has a prefix cache of its own."""
        if self.prefix_cache_scope == "auto":
            return bool(self.api_keys_file)
        return self.prefix_cache_scope == "tenant"

    def _by_model(self, setting: str) -> dict[str, str]:
        """The setting's value for each served model. Raises ValueError."""
        values: dict[str, str] = {}
        for entry in getattr(self, setting):
            model, equals, value = entry.rpartition("=")
            for name in [model.strip()] if equals else list(self.model_names):
                if name not in self.model_names:
                    raise ValueError(f"{setting} has the model {name!r}, which model does not name")
                if name in values:
                    raise ValueError(f"{setting} has two parsers for the model {name!r}; leave one")
                values[name] = value.strip()
        return values
