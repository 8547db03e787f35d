"""Settings of a service: read once, validated together, then frozen.

A service derives a class from ServiceConfig with one field for each setting, and calls `load_config`:

    class RouterConfig(ServiceConfig):
        queue_tasks_max: PositiveCount = Field(default=256, description="Prompts that may wait.")
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from headrace_common import ports
from headrace_common.access.addresses import is_loopback
from headrace_common.access.roles import Role
from headrace_common.errors import ConfigError
from headrace_common.identity import is_worker_id
from headrace_common.version import version

WILDCARD_HOSTS = ("0.0.0.0", "[::]", "::")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_PORT_MAX = 65_535
_MISSING = "\0missing"
# Kubernetes sets these in every container of a namespace with a Service of our name.
_KUBERNETES_LINK = re.compile(
    r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?"
)
# Variables of OpenTelemetry's standard, which the variables with our prefix override.
_STANDARD_VARIABLES = {
    "traces_sampler": "OTEL_TRACES_SAMPLER",
    "traces_sampler_arg": "OTEL_TRACES_SAMPLER_ARG",
}
_URL_USER = re.compile(r"(?<=://)[^/@]+@")


def split_host_port(text: str) -> tuple[str, int]:
    """Splits "host:port". Raises ValueError with the expected form."""
    if "://" in text:
        raise ValueError("write it as host:port, such as 127.0.0.1:7000, and not as a URL")
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError("write it as host:port, such as 127.0.0.1:7000, with a port of 0 to 65535")
    port = int(match["port"])
    if port > _PORT_MAX:
        raise ValueError(f"there is no port {port}: write host:port with one of 0 to {_PORT_MAX}")
    return match["host"], port


def split_list(value: Any) -> Any:
    """Splits a text with commas into a tuple. Returns other values unchanged, for pydantic to check."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _check_host_port(text: str) -> str:
    split_host_port(text)
    return text


def _check_endpoint(text: str) -> str:
    if split_host_port(text)[1] == 0:
        raise ValueError("name the port, such as 127.0.0.1:7000: no server has port 0")
    return text


def _check_optional_host_port(text: str) -> str:
    return _check_host_port(text) if text else text


def _check_otlp_endpoint(text: str) -> str:
    if text:
        _check_endpoint(_URL_USER.sub("", text).removeprefix("http://").removeprefix("https://"))
    return text


def _check_worker_id(text: str) -> str:
    if not is_worker_id(text):
        raise ValueError("use 1 to 63 characters of a-z, 0-9, '.', '_' and '-'")
    return text


def _check_optional_worker_id(text: str) -> str:
    return _check_worker_id(text) if text else text


HostPort = Annotated[str, AfterValidator(_check_host_port)]
"""An address to listen on. Port 0 means any free port."""
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
"""An address to call."""
OptionalHostPort = Annotated[str, AfterValidator(_check_optional_host_port)]
OtlpEndpoint = Annotated[str, AfterValidator(_check_otlp_endpoint)]
WorkerId = Annotated[str, AfterValidator(_check_worker_id)]
OptionalWorkerId = Annotated[str, AfterValidator(_check_optional_worker_id)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveCount = Annotated[int, Field(gt=0)]
NonNegativeCount = Annotated[int, Field(ge=0)]
TracesSampler = Literal[
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
]
"""The values of OTEL_TRACES_SAMPLER. The others of the standard ask another server."""
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ServiceConfig(BaseModel):
    """The settings that every service has."""

    role: ClassVar[Role | None] = None
    """The role in which the service calls others."""

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
        default="parentbased_always_on",
        description="Traces that are recorded, by the names of OpenTelemetry's standard. The variable "
        "OTEL_TRACES_SAMPLER sets it too.",
    )
    traces_sampler_arg: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = Field(
        default=1.0,
        description="Share of traces that the samplers with traceidratio record. The variable OTEL_TRACES_SAMPLER_ARG "
        "sets it too.",
    )
    metrics_listen: OptionalHostPort = Field(
        default="",
        description="host:port that serves /metrics for Prometheus to holders of a key of metrics_keys_file, with "
        "tls_certificate_file if that is set; port 0 takes any free port. Empty: none.",
    )
    metrics_keys_file: str = Field(
        default="",
        description="File of keys that permit reading /metrics of metrics_listen and of http_listen, and nothing else: "
        "one line KEY NAME for each; read again when it changes. Empty: /metrics is closed.",
    )
    drain_grace_s: NonNegativeSeconds = Field(
        default=20.0, description="Seconds that requests in flight may take after SIGTERM."
    )
    credential_check_s: PositiveSeconds = Field(
        default=60.0,
        description="Seconds between two checks of the API key or token of an open call. A call of which the key was "
        "removed, or the token has expired, ends by then.",
    )
    internal_connection_age_s: PositiveSeconds = Field(
        default=3_600.0,
        description="Seconds before a connection to internal_listen takes no new RPC. Those in flight go on, and the "
        "caller opens another connection.",
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

    @model_validator(mode="after")
    def _check_together(self) -> ServiceConfig:
        problems: list[str] = []
        tls = (self.tls_certificate_file, self.tls_key_file, self.tls_authority_file)
        if any(tls) and not all(tls):
            problems.append(
                "set tls_certificate_file, tls_key_file and tls_authority_file together, or none"
            )
        if self.metrics_listen and not self.metrics_keys_file:
            problems.append(
                "metrics_listen needs metrics_keys_file: name a file with a line KEY NAME for each reader"
            )
        problems += wildcard_problems(self, "internal_listen", "internal_advertise")
        if not (self.insecure or any(tls) or self.token_keys_file):
            problems += [
                f"{name} is {address}, which other hosts may reach, and no credentials are configured: set the tls_ "
                "files or token_keys_file, or set insecure, which lets every caller make every RPC"
                for name, address in reachable_addresses(
                    self, "internal_listen", "internal_advertise"
                )
            ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def wildcard_problems(config: ServiceConfig, listen: str, advertise: str) -> list[str]:
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


Config = TypeVar("Config", bound=ServiceConfig)


def require_order(config: ServiceConfig, *pairs: tuple[str, str]) -> None:
    """Checks that the first setting of each pair is below the second. Raises ValueError naming all that are not."""
    problems = [
        f"{inner} is {getattr(config, inner):g} and must be below {outer}, which is {getattr(config, outer):g}"
        for inner, outer in pairs
        if getattr(config, inner) >= getattr(config, outer)
    ]
    if problems:
        raise ValueError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class _Setting:
    """A value as given, and its source."""

    value: object
    source: str


def load_config(
    cls: type[Config], argv: Sequence[str] | None, *, prog: str, env_prefix: str
) -> Config:
    """Reads the settings. Flags override the environment, which overrides the file (--config FILE.toml).

    `argv` excludes the program's name; None means the arguments of this process. `env_prefix` is such
    as "HEADRACE_ROUTER_". Flags with secrets are wrong, because `ps` shows them. Raises ConfigError that lists every
    wrong setting with its source and remedy.
    `--help` prints the help and exits.
    """
    prefix = env_prefix.rstrip("_") + "_"
    problems: dict[str, str] = {}
    flags, config_flag = _read_flags(
        cls, sys.argv[1:] if argv is None else argv, prog, prefix, problems
    )
    environment = _read_environment(cls, os.environ, prefix, problems)
    path = config_flag or os.environ.get(f"{prefix}CONFIG", "")
    settings = {**_read_file(cls, path, problems), **environment, **flags}
    config: Config | None = None
    try:
        config = cls.model_validate({name: setting.value for name, setting in settings.items()})
    except ValidationError as error:
        problems.update(_explain(cls, error, settings, prefix))
    if problems or config is None:
        detail = "; ".join(f"{name}{problem}" for name, problem in problems.items())
        raise ConfigError(
            detail.replace("\n", " "), metadata={n: p.lstrip(": ") for n, p in problems.items()}
        )
    return config


def redacted(config: ServiceConfig) -> dict[str, Any]:
    """The settings as plain values for logs, without secrets and without the users in URLs."""
    plain: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, SecretStr):
            plain[name] = "***" if value.get_secret_value() else ""
        else:
            plain[name] = _URL_USER.sub("***@", value) if isinstance(value, str) else value
    return plain


def is_secret(field: FieldInfo) -> bool:
    """Whether the value must not be shown."""
    return field.annotation is SecretStr or SecretStr in get_args(field.annotation)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str, env_prefix: str) -> str:
    """The environment variable of a setting. `env_prefix` is as for load_config."""
    return f"{env_prefix}{name.upper()}"


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "remove it, or see --help for the names"


def _read_flags(
    cls: type[ServiceConfig], argv: Sequence[str], prog: str, prefix: str, problems: dict[str, str]
) -> tuple[dict[str, _Setting], str]:
    parser = _parser(cls, prog, prefix)
    given, unknown = parser.parse_known_args(_join_dashed_values(cls, argv))
    flags: dict[str, _Setting] = {}
    for name, value in vars(given).items():
        if value == _MISSING:
            problems[flag_of(name)] = ": needs a value, as in " + f"{flag_of(name)} VALUE"
        elif name in cls.model_fields and _shows_secret(cls.model_fields[name], value):
            problems[flag_of(name)] = f": {_secret_remedy(cls, name, prefix)}"
        elif value is not None:
            flags[name] = _Setting(value, f"flag {flag_of(name)}")
    known = [flag_of(name) for name in (*cls.model_fields, "config")]
    for flag in (text.partition("=")[0] for text in unknown):
        kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
        problems[flag] = f": {kind}: {_suggestion(flag, known)}"
    config_file = flags.pop("config", None)
    return flags, str(config_file.value) if config_file else ""


def _join_dashed_values(cls: type[ServiceConfig], argv: Sequence[str]) -> list[str]:
    """Writes `--flag -value` as `--flag=-value`, because argparse takes `-value` for a flag."""
    flags = {flag_of(name) for name in cls.dashed_values}
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] in flags and argument.startswith("-"):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _shows_secret(field: FieldInfo, value: str | None) -> bool:
    return value is not None and (is_secret(field) or _URL_USER.search(value) is not None)


def _secret_remedy(cls: type[ServiceConfig], name: str, prefix: str) -> str:
    file = f"{name}_file"
    other = flag_of(file) if file in cls.model_fields else variable_of(name, prefix)
    return f"contains a secret, and every user of the host can read flags: set {other} instead"


def default_of(field: FieldInfo) -> str:
    """The default as help texts state it: "required", "default: none" for a secret, or "default: VALUE"."""
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, SecretStr):
        return "default: none"
    return f"default: {default!r}" if default in ("", None) else f"default: {default}"


def _parser(cls: type[ServiceConfig], prog: str, prefix: str) -> argparse.ArgumentParser:
    secrets = [variable_of(n, prefix) for n, field in cls.model_fields.items() if is_secret(field)]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=textwrap.dedent(cls.__doc__ or "").strip().split("\n\n")[0],
        epilog=f"Flags override environment variables ({prefix}*), which override the file. "
        f'A file holds lines such as internal_listen = "127.0.0.1:7000".'
        + (f" Secrets have no flag, but variables: {', '.join(secrets)}." if secrets else ""),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        nargs="?",
        const=_MISSING,
        help=f"TOML file of settings with the names below. [env: {prefix}CONFIG]",
    )
    parser.add_argument(
        "--version", action="version", version=f"{prog} {version()}", help="Show the version."
    )
    for name, field in cls.model_fields.items():
        if is_secret(field):
            # It is parsed, so that the error can name the remedy.
            parser.add_argument(
                flag_of(name), dest=name, nargs="?", const="", help=argparse.SUPPRESS
            )
            continue
        notes = f"[env: {variable_of(name, prefix)}; {default_of(field)}]"
        parser.add_argument(
            flag_of(name),
            dest=name,
            nargs="?",
            const="true" if field.annotation is bool else _MISSING,
            metavar=name.upper(),
            help=f"{field.description or ''} {notes}".strip().replace("%", "%%"),
        )
    return parser


def _read_environment(
    cls: type[ServiceConfig], environ: Mapping[str, str], prefix: str, problems: dict[str, str]
) -> dict[str, _Setting]:
    known = {variable_of(name, prefix): name for name in cls.model_fields}
    settings = {
        name: _Setting(environ[variable], f"environment {variable}")
        for name, variable in _STANDARD_VARIABLES.items()
        if environ.get(variable) and name in cls.model_fields
    }
    for variable, value in environ.items():
        if not variable.startswith(prefix) or variable == f"{prefix}CONFIG":
            continue
        if variable in known:
            settings[known[variable]] = _Setting(value, f"environment {variable}")
        elif not _KUBERNETES_LINK.fullmatch(variable.removeprefix(prefix)):
            problems[variable] = (
                f": unknown environment variable: {_suggestion(variable, list(known))}"
            )
    return settings


def _read_file(
    cls: type[ServiceConfig], path: str, problems: dict[str, str]
) -> dict[str, _Setting]:
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems["--config"] = f": cannot read {path}: {error.strerror}: name a file that exists"
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems["--config"] = f": {path} is not TOML: {error}"
        return {}
    settings: dict[str, _Setting] = {}
    for name, value in table.items():
        if name in cls.model_fields:
            settings[name] = _Setting(value, f"file {path}")
        else:
            problems[name] = (
                f" (file {path}): unknown key: {_suggestion(name, list(cls.model_fields))}"
            )
    return settings


def _explain(
    cls: type[ServiceConfig], error: ValidationError, settings: Mapping[str, _Setting], prefix: str
) -> dict[str, str]:
    problems: dict[str, str] = {}
    for item in error.errors(include_url=False):
        remedy = item["msg"].removeprefix("Value error, ")
        name = str(item["loc"][0]) if item["loc"] else ""
        setting = settings.get(name)
        if setting is not None:
            secret = is_secret(cls.model_fields[name])
            shown = "***" if secret else repr(setting.value)
            problems[name] = f" = {shown} ({setting.source}): {remedy}"
        elif item["type"] == "missing":
            variable = variable_of(name, prefix)
            problems[name] = f": is required: set {flag_of(name)}, {variable} or {name} in the file"
        else:
            problems[name or "settings"] = f": {remedy}"
    return problems
