"""Commands and options of earlier releases, and what replaces each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from typer.core import TyperGroup

from headrace_cli.exit_status import failures_as_exit
from headrace_common.errors import ConfigError

# By the first words of a command line, the last of which may be an option anywhere in it.
REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("bench", ""): "use `vllm bench serve`, GuideLLM or AIPerf: docs/load-testing.md",
    ("context", ""): "write ~/.config/headrace/config.toml: docs/commands.md",
    ("doctor", "--firewall"): "docs/security.md has the rules of a firewall",
    ("doctor", "--pool"): "a worker's log names a remote pool that does not answer",
    ("doctor pair", ""): "routers and `headrace workers` name what differs when workers join",
    ("", "--context"): "name another file by HEADRACE_CONFIG: docs/commands.md",
}


class Group(TyperGroup):
    """Refuses what was removed, and names the replacement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with failures_as_exit():
            check_words(args)
        return super().parse_args(ctx, args)


def check_words(words: list[str]) -> None:
    """Raises ConfigError for a removed command or option."""
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    for (command, option), remedy in REMOVED.items():
        if command in ("", *words[:1], " ".join(words[:2])) and (not option or option in given):
            name = " ".join(filter(None, (command, option)))
            raise ConfigError(f"`headrace {name}` was removed: {remedy}")
