"""Settings of a service, validated together and then frozen.

A service derives a class from ServiceConfig with one field for each setting, and gives it to
`headrace_common.process.settings.load_config`:

    class RouterConfig(ServiceConfig):
        queue_tasks_max: PositiveCount = Field(default=256, description="Prompts that may wait.")
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import ErrorDetails

from headrace_common import ports
from headrace_common.identity import is_worker_id
from headrace_common.ports import is_loopback, split_host_port

WILDCARD_HOSTS = ("0.0.0.0", "[::]", "::")
URL_USER = re.compile(r"(?<=://)[^/@]+@")
"""The user in a URL, with its password."""


def split_list(value: Any) -> Any:
    """Splits a text with commas into a tuple. Returns other values unchanged, for pydantic to check."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def checked_by(check: Callable[[Any], object], *, or_empty: bool = False) -> AfterValidator:
    """Makes a type of settings refuse what `check` raises ValueError for, with `or_empty` unless it is empty."""

    def validate(value: Any) -> Any:
        if value or not or_empty:
            check(value)
        return value

    return AfterValidator(validate)


def _check_endpoint(text: str) -> None:
    if split_host_port(text)[1] == 0:
        raise ValueError("name the port, such as 127.0.0.1:7000: no server has port 0")


def _check_otlp_endpoint(text: str) -> None:
    _check_endpoint(URL_USER.sub("", text).removeprefix("http://").removeprefix("https://"))


def _check_worker_id(text: str) -> None:
    if not is_worker_id(text):
        raise ValueError("use 1 to 63 characters of a-z, 0-9, '.', '_' and '-'")


def parse_sampler(text: str) -> tuple[str, float]:
    """Splits "SAMPLER" or "SAMPLER=SHARE" into the sampler and its share of all traces. Raises ValueError."""
    name, equals, share = text.partition("=")
    kind = name.removeprefix("parentbased_")
    if kind not in _SAMPLERS:
        raise ValueError(f"use one of {', '.join(_SAMPLERS)}, also with parentbased_ before it")
    if kind != "traceidratio":
        # The standard ignores the share of others, too.
        return name, float(kind == "always_on")
    try:
        number = float(share) if equals else _SAMPLED_SHARE
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError(f"write a share of 0 to 1, such as {name}=0.05")
    return name, number


TextList = Annotated[tuple[str, ...], BeforeValidator(split_list)]
"""Texts, as a list or separated by commas."""
TracesSampler = Annotated[str, checked_by(parse_sampler)]
"""A sampler of OTEL_TRACES_SAMPLER. The others of the standard ask another server."""
HostPort = Annotated[str, checked_by(split_host_port)]
"""An address to listen on. Port 0 means any free port."""
Endpoint = Annotated[str, checked_by(_check_endpoint)]
"""An address to call."""
OptionalHostPort = Annotated[str, checked_by(split_host_port, or_empty=True)]
OtlpEndpoint = Annotated[str, checked_by(_check_otlp_endpoint, or_empty=True)]
WorkerId = Annotated[str, checked_by(_check_worker_id)]
OptionalWorkerId = Annotated[str, checked_by(_check_worker_id, or_empty=True)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PrefixFetchGain = Annotated[
    float,
    Field(
        ge=0.0,
        le=1.0,
        description="Least share of the time to compute a prompt's first tokens that fetching their KV from another "
        "worker saves, by the learned times, else by a cautious estimate. 0 fetches whatever the times say, 1 nothing. "
        "The router's is for decode workers that compute prompts. Models with states fetch nothing.",
    ),
]
PositiveCount = Annotated[int, Field(gt=0)]
NonNegativeCount = Annotated[int, Field(ge=0)]
_SAMPLERS = ("always_on", "always_off", "traceidratio")
_SAMPLED_SHARE = 0.05
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ServiceConfig(BaseModel):
    """The settings that every service has."""

    role: ClassVar[str] = ""
    """The role in which the service calls others, a value of headrace_common.access.roles.Role. Empty: none."""
    audiences: ClassVar[tuple[str, ...]] = ()
    """Names of this receiver in proofs, beside its address."""

    internal_addresses: ClassVar[tuple[str, ...]] = ("internal_listen", "internal_advertise")
    """Settings with an address of which callers prove a role."""
    dashed_values: ClassVar[frozenset[str]] = frozenset()
    """Settings with values that may begin with a dash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    internal_listen: HostPort = Field(
        default="127.0.0.1:0",
        description="host:port to serve the other services and operators on; port 0 takes any free port.",
    )
    internal_advertise: OptionalHostPort = Field(
        default="",
        description="host:port at which the other services reach internal_listen. Port 0 means the port of "
        "internal_listen; empty means its address.",
    )
    registry: Endpoint = Field(
        default=f"127.0.0.1:{ports.REGISTRY}", description="host:port of the registry."
    )
    log_level: LogLevel = Field(default="info", description="Lowest level that is logged.")
    log_format: LogFormat = Field(
        default="text",
        description="Form of the lines of the log on stderr: text, or a JSON object each.",
    )
    otlp_endpoint: OtlpEndpoint = Field(
        default="",
        description="OTLP/gRPC collector of all spans and metrics, such as http://127.0.0.1:4317; "
        "empty means none.",
    )
    traces_sampler: TracesSampler = Field(
        default="parentbased_traceidratio",
        description="Requests that get spans besides the slow and the failed ones: a sampler of OpenTelemetry's "
        "standard, and with traceidratio the share of the traces, as parentbased_traceidratio=0.05, which is the share "
        "without one. The variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG set it too.",
    )
    metrics_listen: OptionalHostPort = Field(
        default="",
        description="host:port that serves /metrics for Prometheus, beyond loopback to holders of a key of "
        "metrics_keys_file only, with tls_certificate_file if that is set; port 0 takes any free port. Empty: none.",
    )
    metrics_keys_file: str = Field(
        default="",
        description="File of keys that permit reading /metrics of metrics_listen and of http_listen, and nothing else: "
        "one line KEY NAME for each; read again when it changes. Empty: /metrics is open on loopback only.",
    )
    health_listen: OptionalHostPort = Field(
        default="",
        description="host:port that answers gRPC health checks of every caller in plaintext, and nothing else, for "
        'probes without a credential. The name "" reports whether the service takes work, "live" whether it runs; '
        "port 0 takes any free port. Empty: none.",
    )
    drain_grace_s: NonNegativeSeconds = Field(
        default=20.0, description="Seconds that requests in flight may take after SIGTERM."
    )
    port_file: str = Field(
        default="",
        description="File to which the service writes the host:port of internal_listen, and after a space that of "
        "listen if it has one, when it serves; empty means none.",
    )
    tls_certificate_file: str = Field(
        default="",
        description="PEM certificate of this process, read again when it changes; empty means plaintext.",
    )
    tls_key_file: str = Field(
        default="",
        description="PEM private key of tls_certificate_file; read again when it changes.",
    )
    tls_authority_file: str = Field(
        default="",
        description="PEM certificates of the authorities that sign every peer's certificate; read again when it "
        "changes.",
    )

    tls_trust_domain: str = Field(
        default="",
        description="SPIFFE trust domain of the roles in certificates; empty accepts every domain that "
        "tls_authority_file signs.",
    )
    token_file: str = Field(
        default="",
        description="File of this process's role token, as `headrace token create` writes it; read again when it "
        "changes.",
    )
    token_keys_file: str = Field(
        default="",
        description="PEM public keys that verify the role tokens of callers; read again when it changes.",
    )
    insecure: bool = Field(
        default=False,
        description="Whether every caller may make every RPC without a credential. For networks that only the "
        "deployment reaches.",
    )

    @property
    def serves_metrics(self) -> bool:
        """Whether callers may read the metrics over HTTP."""
        return bool(self.metrics_listen)

    @model_validator(mode="after")
    def _check_together(self) -> ServiceConfig:
        problems: list[str] = []
        tls = (self.tls_certificate_file, self.tls_key_file, self.tls_authority_file)
        if any(tls) and not all(tls):
            problems.append(
                "set tls_certificate_file, tls_key_file and tls_authority_file together, or none"
            )
        if not self.metrics_keys_file:
            problems += [
                f"{name} is {address}, which other hosts may reach, and needs metrics_keys_file: name a file with a "
                "line KEY NAME for each reader"
                for name, address in reachable_addresses(self, "metrics_listen")
            ]
        problems += wildcard_problems(self, "internal_listen", "internal_advertise")
        if not (self.insecure or any(tls) or self.token_keys_file):
            problems += [
                f"{name} is {address}, which other hosts may reach, and no credentials are configured: set the tls_ "
                "files or token_keys_file, or set insecure, which lets every caller make every RPC"
                for name, address in reachable_addresses(self, *self.internal_addresses)
            ]
        return checked(self, problems)


_Config = TypeVar("_Config", bound=BaseModel)


def checked(config: _Config, problems: Sequence[str]) -> _Config:
    """The config. Raises ValueError with all problems if there are any."""
    if problems:
        raise ValueError("; ".join(problems))
    return config


def wildcard_problems(config: BaseModel, listen: str, advertise: str) -> list[str]:
    """What is wrong with an address to listen on that is no address to call. The arguments are settings' names."""
    host = split_host_port(getattr(config, listen))[0]
    if host not in WILDCARD_HOSTS or getattr(config, advertise):
        return []
    return [
        f"{listen} on {host} needs {advertise}: set it to the host:port at which others reach this process"
    ]


def reachable_addresses(config: ServiceConfig, *settings: str) -> list[tuple[str, str]]:
    """The settings, of these, with an address that is not on loopback, and their values."""
    addresses = [(name, getattr(config, name)) for name in settings]
    return [(name, address) for name, address in addresses if address and not is_loopback(address)]


def require_order(config: BaseModel, *pairs: tuple[str, str]) -> None:
    """Checks that the first setting of each pair is below the second. Raises ValueError naming all that are not."""
    problems = [
        f"{inner} is {getattr(config, inner):g} and must be below {outer}, which is {getattr(config, outer):g}"
        for inner, outer in pairs
        if getattr(config, inner) >= getattr(config, outer)
    ]
    checked(config, problems)


_PHRASES: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "string_type": "must be a text",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    "finite_number": "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be {le} or less",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "must have a type out of {expected_tags}",
    "json_invalid": "is no JSON: {error}",
}


def problem_text(problem: ErrorDetails) -> str:
    """A problem that pydantic found, in our words."""
    message = problem["msg"].removeprefix("Value error, ")
    phrase = _PHRASES.get(problem["type"])
    return message if phrase is None else phrase.format_map(problem.get("ctx", {}))
