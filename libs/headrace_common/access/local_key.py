"""The key of deployments on loopback: a file that only this user can read.

Services and commands of one user on one host sign their own tokens with it. Other users cannot read it, so they cannot
call internal RPCs. It needs no setting.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from headrace_common.access.tokens import new_private_key
from headrace_common.errors import ConfigError

FOLDER_VARIABLE: Final = "HEADRACE_CREDENTIALS_DIR"
_KEY_FILE: Final = "local_key.pem"


def local_folder() -> Path:
    """The folder of the key: HEADRACE_CREDENTIALS_DIR, else headrace/credentials in the user's state folder."""
    given = os.environ.get(FOLDER_VARIABLE, "")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME", "")
    root = Path(base) if base else Path.home() / ".local" / "state"
    return root / "headrace" / "credentials"


def load_local_key() -> bytes:
    """The private key in PEM. Creates it if there is none.

    Raises ConfigError when the file cannot be created, or when other users can read or replace it.
    """
    folder = local_folder()
    path = folder / _KEY_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        if not path.exists():
            _create(path)
        _check_private(path)
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot use the local key {path}: {error.strerror}; set {FOLDER_VARIABLE} to a folder of this user, or "
            "configure TLS or tokens"
        ) from error


def _create(path: Path) -> None:
    """Creates the key file. If another process is first, its file stays."""
    draft = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(new_private_key())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()


def _check_private(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{path} must belong to this user and be closed to all others: run `chmod go-rwx {path}`, or set "
            f"{FOLDER_VARIABLE} to another folder"
        )
