"""The router's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace_common.config import (
    NonNegativeSeconds,
    PositiveCount,
    PositiveSeconds,
    ServiceConfig,
    require_order,
)
from headrace_common.identity import is_worker_id


def _split_list(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _name_and_folder(entry: str) -> tuple[str, str]:
    name, equals, folder = entry.partition("=")
    return (name.strip(), folder.strip()) if equals else (Path(entry).name, entry)


def _check_models(entries: tuple[str, ...]) -> tuple[str, ...]:
    if not entries:
        raise ValueError("name at least one model, as NAME=FOLDER")
    pairs = [_name_and_folder(entry) for entry in entries]
    for entry, (name, folder) in zip(entries, pairs, strict=True):
        if not name or not folder:
            raise ValueError(f"write {entry!r} as NAME=FOLDER")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"give each model its own name: {', '.join(twice)} comes twice")
    return entries


def _check_router_id(text: str) -> str:
    if text and not is_worker_id(text):
        raise ValueError("use 1 to 63 characters of a-z, 0-9, '.', '_' and '-'")
    return text


ModelList = Annotated[tuple[str, ...], BeforeValidator(_split_list), AfterValidator(_check_models)]


class RouterConfig(ServiceConfig):
    """Headrace's router: takes prompts, places them on workers and streams the answers."""

    model: ModelList = Field(
        description="Models served: NAME=FOLDER, FOLDER named after itself, or sim; commas between them."
    )
    router_id: Annotated[str, AfterValidator(_check_router_id)] = Field(
        "",
        description="Name that stays the same over restarts; empty means one made from the address.",
    )
    max_concurrent_requests: PositiveCount = Field(
        1_024, description="Requests in flight before new ones are refused."
    )
    max_queued_tokens: PositiveCount = Field(
        4_194_304,
        description="Prompt tokens of requests without a first token yet, before more are refused.",
    )
    admission_wait_s: PositiveSeconds = Field(
        2.0,
        description="Seconds that a tenant below its share may wait for one above it to make room.",
    )
    api_keys_file: str = Field(
        "",
        description="File of API keys and their tenants, a line KEY TENANT each, or TOML; empty means "
        "that nobody needs a key.",
    )
    max_queued_tasks: PositiveCount = Field(
        1_024, description="Prompts that may wait for a prefill worker."
    )
    prefix_wait_s: NonNegativeSeconds = Field(
        0.05,
        description="Seconds that a prompt may wait for the prefill worker that holds its prefix.",
    )
    default_deadline_s: PositiveSeconds = Field(
        600.0, description="Seconds that a request may take when its client sets no deadline."
    )
    retry_budget: Annotated[int, Field(ge=0, le=10)] = Field(
        2,
        description="Attempts after the first that a request may make, where the policy says nothing.",
    )
    migration_wait_s: NonNegativeSeconds = Field(
        10.0,
        description="Seconds that an answer which has begun waits for a decode worker that can go on with it, when "
        "its own is gone.",
    )
    worker_wait_s: NonNegativeSeconds = Field(
        5.0,
        description="Seconds from the router's start, or from when the last decode worker of a model is lost, in which "
        "requests for it wait for one rather than fail.",
    )
    look_aside: bool = Field(
        False,
        description="Whether clients that ask may stream from decode workers directly, which then must reach them.",
    )
    ticket_ttl_s: PositiveSeconds = Field(
        10.0,
        description="Seconds that a decode worker takes a request with this router's ticket; clocks of the "
        "deployment must agree far better than that.",
    )
    trace_count: PositiveCount = Field(256, description="Requests whose traces are kept.")

    @model_validator(mode="after")
    def _check_waits(self) -> RouterConfig:
        require_order(
            self,
            ("prefix_wait_s", "default_deadline_s"),
            ("admission_wait_s", "default_deadline_s"),
            ("worker_wait_s", "default_deadline_s"),
        )
        return self

    @property
    def models(self) -> dict[str, str]:
        """Folder of each model, by the name that it is served under; "sim" is no folder."""
        return dict(_name_and_folder(entry) for entry in self.model)
