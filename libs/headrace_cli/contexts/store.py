"""The file of contexts. It names files with secrets, and holds no secret."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import ConfigError, NotFound

LOCAL: Final = "local"
"""The name of no context: the deployment of `headrace up` on this machine."""
CONTEXTS_MAX: Final = 256
_FILE_BYTES_MAX: Final = 1024 * 1024
_FILE: Final = "contexts.json"
_LOCK: Final = "contexts.lock"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Context:
    """Addresses of a deployment and the files with credentials for it. Empty values are unknown, or not needed."""

    router: str
    registry: str = ""
    internal: str = ""
    api_key_file: str = ""
    token_file: str = ""
    tls_authority_file: str = ""
    tls_certificate_file: str = ""
    tls_key_file: str = ""


@dataclass(slots=True)
class Contexts:
    """All contexts by name, and the name of the one in use; empty for none. `changed_contexts` owns it."""

    current: str = ""
    by_name: dict[str, Context] = field(default_factory=dict)

    def find(self, name: str) -> Context:
        """Raises NotFound that lists the names."""
        if name not in self.by_name:
            known = ", ".join([LOCAL, *sorted(self.by_name)])
            raise NotFound(f"there is no context {name}; there are: {known}")
        return self.by_name[name]

    def add(self, name: str, context: Context) -> None:
        """Adds or replaces a context. Raises ConfigError."""
        if name not in self.by_name and len(self.by_name) >= CONTEXTS_MAX:
            raise ConfigError(f"there are {CONTEXTS_MAX} contexts, and no more may be: remove one")
        self.by_name[name] = context

    def remove(self, name: str) -> None:
        """Removes a context. Raises NotFound."""
        self.find(name)
        del self.by_name[name]
        if self.current == name:
            self.current = ""

    def use(self, name: str) -> None:
        """Makes a context the current one; LOCAL for none. Raises NotFound."""
        if name != LOCAL:
            self.find(name)
        self.current = "" if name == LOCAL else name


def check_name(name: str) -> str:
    """Returns a name for a new context. Raises ConfigError."""
    if not _NAME.fullmatch(name) or name == LOCAL:
        raise ConfigError(
            f"{name!r} cannot name a context: use 1 to 63 characters of a-z, 0-9, '.', '_' and '-', and not {LOCAL!r}"
        )
    return name


def contexts_path() -> Path:
    """The file: headrace/contexts.json in XDG_CONFIG_HOME, or in ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path.home() / ".config") / "headrace" / _FILE


def load_contexts() -> Contexts:
    """The contexts; none without a file. Raises ConfigError when the file is not private or not valid."""
    path = contexts_path()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"other users can read or replace {path}: run `chown $USER {path}; chmod 600 {path}`"
                )
            content = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _parsed(content)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a file of contexts ({error}): repair it, or remove it and add the contexts again"
        ) from error


@contextmanager
def changed_contexts() -> Iterator[Contexts]:
    """The contexts, to be changed. They are written at the end, unless there was an error. Raises ConfigError."""
    path = contexts_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path.with_name(_LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write in {path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        contexts = load_contexts()
        yield contexts
        _write(path, contexts)
    finally:
        os.close(lock)


def _write(path: Path, contexts: Contexts) -> None:
    names = {name: _without_empty(one) for name, one in sorted(contexts.by_name.items())}
    text = json.dumps({"current": contexts.current, "contexts": names}, indent=2)
    draft = path.with_name(f"{_FILE}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _without_empty(context: Context) -> dict[str, str]:
    return {name: value for name, value in asdict(context).items() if value}


def _parsed(content: bytes) -> Contexts:
    if len(content) > _FILE_BYTES_MAX:
        raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
    table = json.loads(content)
    names: Mapping[str, Any] = table["contexts"]
    if len(names) > CONTEXTS_MAX:
        raise ValueError(f"it has more than {CONTEXTS_MAX} contexts")
    contexts = Contexts(str(table["current"]))
    known = {one.name for one in fields(Context)}
    for name, values in names.items():
        if not _NAME.fullmatch(name) or not values.keys() <= known:
            raise ValueError(f"context {name[:63]!r} is wrong")
        if not all(isinstance(value, str) for value in values.values()):
            raise ValueError(f"context {name!r} has a value that is no text")
        contexts.add(name, Context(**values))
    if contexts.current and contexts.current not in contexts.by_name:
        raise ValueError(f"the current context {contexts.current[:63]!r} is missing")
    return contexts
