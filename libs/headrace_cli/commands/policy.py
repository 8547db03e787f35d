"""`headrace policy`: reads and changes the deployment's run-time policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from google.protobuf import json_format
from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.table import Table

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import (
    CALL_TIMEOUT_S,
    WAIT_S,
    Wait,
    policy_by,
    read_policy,
    registry_of,
    rpc_errors,
    started_channel,
)
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    message_object,
    print_json,
)
from headrace_common.errors import ConfigError

_FIELDS = registry_pb2.Policy.DESCRIPTOR.fields_by_name


@command("policy get", "headrace policy get", cls=AddressedCommand)
async def get_policy(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows the policy in force."""

    _show(await read_policy(await registry_of(router, registry)), as_json=as_json)


@command(
    "policy set",
    "headrace policy set local_prefill_max_tokens=256 temperature=0.2   |   "
    "headrace policy set max_queue_wait=2s   |   headrace policy set tenant_weights.batch=0.5   |   "
    "headrace policy set tenant_priorities.chat=high   |   headrace policy set worker_roles.w0=prefill   |   "
    "headrace policy set temperature=",
    cls=AddressedCommand,
)
async def change_policy(
    changes: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE...", help="Nothing after = restores the default."),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Changes the named fields; every router follows within a second."""

    _show(await set_policy(await registry_of(router, registry), changes), as_json=as_json)


async def set_policy(registry: str, changes: Sequence[str]) -> registry_pb2.GetPolicyResponse:
    """Changes the named fields, keeps the others, and returns the new policy.

    Raises ConfigError for an unknown field or a value that cannot be parsed. Raises InvalidRequest for a value that
    the registry rejects, Conflict when another change comes in between.
    """
    async with started_channel(registry) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        current = await policy_by(stub, registry)
        policy = current.policy
        for change in changes:
            apply_change(policy, change)
        request = registry_pb2.SetPolicyRequest(policy=policy, expected_revision=current.revision)
        with rpc_errors(f"the registry on {registry}"):
            await stub.SetPolicy(request, timeout=CALL_TIMEOUT_S)
        return await policy_by(stub, registry)


def _show(response: registry_pb2.GetPolicyResponse, *, as_json: bool) -> None:
    if as_json:
        print_json(message_object(response))
    else:
        console = answer_console()
        console.print(policy_table(response.policy, console))


def apply_change(policy: registry_pb2.Policy, change: str) -> None:
    """Applies "field=value". "field=" restores the default, "field.key=value" sets an entry of a map.

    Raises ConfigError.
    """
    path, equals, text = change.partition("=")
    name, _, key = path.strip().partition(".")
    field = _FIELDS.get(name)
    if field is None or not equals:
        known = ", ".join(_FIELDS)
        raise ConfigError(f"{change!r} changes nothing: write FIELD=VALUE with one of {known}")
    keyed = field.message_type is not None and field.message_type.GetOptions().map_entry
    if keyed != bool(key):
        raise ConfigError(f"{change!r} is wrong: write {name}{'.NAME' if keyed else ''}=VALUE")
    if not keyed:
        policy.ClearField(name)  # type: ignore[arg-type]  # the stubs list the names one by one
    if not (text := text.strip()):
        if keyed:
            getattr(policy, name).pop(key, None)
        return
    value, remedy = _json_value(_value_of(field) if keyed else field, text)
    try:
        document = {name: {key: value} if keyed else value}
        policy.MergeFrom(json_format.ParseDict(document, registry_pb2.Policy()))
    except json_format.ParseError:
        raise ConfigError(f"{change!r} is wrong: give {remedy}") from None


def _json_value(field: FieldDescriptor, text: str) -> tuple[str, str]:
    """A value as protobuf's JSON has it, and what may be given."""
    if field.enum_type is not None:
        names = [_short_name(field.enum_type, one.name) for one in field.enum_type.values[1:]]
        return f"{_prefix(field.enum_type)}{text.upper()}", " or ".join(names)
    if field.message_type is Duration.DESCRIPTOR:
        return f"{text.removesuffix('s')}s", "seconds, such as 2s"
    whole = field.type == FieldDescriptor.TYPE_UINT32
    return text, "a whole number from 0" if whole else "a number"


def policy_table(policy: registry_pb2.Policy, console: Console) -> Table:
    """A row for each field, with "-" for one that is not set."""
    rows = []
    values = json_format.MessageToDict(
        policy, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for name in _FIELDS:
        value = values.get(name)
        kind = _FIELDS[name].enum_type
        if isinstance(value, dict):
            value = ", ".join(
                f"{key}={_shown(name, entry)}" for key, entry in sorted(value.items())
            )
        elif kind is not None:
            value = _short_name(kind, str(value)).removeprefix("unspecified")
        rows.append((name, "-" if value in (None, "") else str(value)))
    return fitted_table(console, (Column("field"), Column("value")), rows)[0]


def _value_of(field: FieldDescriptor) -> FieldDescriptor:
    """The field of a map's values."""
    assert field.message_type is not None, "a map has entries"
    return field.message_type.fields_by_name["value"]


def _shown(name: str, entry: float | str) -> str:
    """An entry of a map."""
    kind = _value_of(_FIELDS[name]).enum_type
    return f"{entry:g}" if kind is None else _short_name(kind, str(entry))


def _short_name(kind: EnumDescriptor, name: str) -> str:
    return name.removeprefix(_prefix(kind)).lower()


def _prefix(kind: EnumDescriptor) -> str:
    return kind.values[0].name.removesuffix("UNSPECIFIED")
