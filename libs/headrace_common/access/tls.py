"""Certificates of gRPC's and other listeners, read again when their files change."""

from __future__ import annotations

import ssl
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The contents of TlsFiles in PEM, empty where there is no file. The key belongs to the certificate."""

    certificate: bytes
    key: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "TlsIdentity(...)"


@lru_cache(maxsize=64)
def tls_identity(files: TlsFiles) -> ReloadedFiles[TlsIdentity]:
    """The identity in the files. The users of the same files in a process share it.

    A certificate and a key are two files. While only one of them is replaced, the old pair stays in force. Raises
    ConfigError that names every file that cannot be read.
    """
    paths = (files.tls_certificate_file, files.tls_key_file, files.tls_authority_file)
    return ReloadedFiles([path for path in paths if path], lambda: _read(files))


def _read(files: TlsFiles) -> TlsIdentity:
    contents: list[bytes] = []
    problems: dict[str, str] = {}
    for field in ("tls_certificate_file", "tls_key_file", "tls_authority_file"):
        path: str = getattr(files, field)
        try:
            contents.append(Path(path).read_bytes() if path else b"")
        except OSError as error:
            problems[field] = f"cannot read {path}: {error.strerror}"
    if problems:
        detail = "; ".join(f"{field}: {problem}" for field, problem in problems.items())
        raise ConfigError(f"{detail}; name files that this user can read", metadata=problems)
    check_files(files)
    return TlsIdentity(*contents)


def check_files(files: TlsFiles, prefix: str = "") -> None:
    """Raises ConfigError when gRPC could make no connection with the files. Their settings begin with `prefix`."""
    names = ["tls_authority_file"]
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if files.tls_authority_file:
            context.load_verify_locations(files.tls_authority_file)
        names = ["tls_certificate_file", "tls_key_file"]
        if files.tls_certificate_file:
            # A password, although keys have none: without one, OpenSSL would ask the terminal.
            context.load_cert_chain(files.tls_certificate_file, files.tls_key_file, password="")
    except (OSError, ValueError) as error:
        stated = " and ".join(f"{prefix}{name} {getattr(files, name)}" for name in names)
        raise ConfigError(
            f"{stated}: not valid ({error}); write PEM, a key without a password that belongs to its certificate"
        ) from error


def server_context(files: TlsFiles, setting: str) -> ssl.SSLContext | None:
    """Presents the certificate of a listener, and a replaced one in new handshakes. None without a certificate.

    `setting` is the listener's, for messages. Raises ConfigError.
    """
    if not files.tls_certificate_file:
        return None
    contexts = ReloadedFiles(
        [path for path in astuple(files) if path], lambda: _read_context(files, setting)
    )

    def use_current(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = contexts.current()

    context = _read_context(files, setting)
    context.sni_callback = use_current
    return context


def _read_context(files: TlsFiles, setting: str) -> ssl.SSLContext:
    """A context that requires certificates of clients, if `files` has an authority."""
    try:
        if not files.tls_authority_file:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        else:
            context = ssl.create_default_context(
                ssl.Purpose.CLIENT_AUTH, cafile=files.tls_authority_file
            )
            context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files.tls_certificate_file, files.tls_key_file)
    except OSError as error:
        raise ConfigError(
            f"the TLS files of {setting}, {files.tls_certificate_file} and {files.tls_key_file}, cannot be used: "
            f"{error.strerror}; they must be PEM, and the key must belong to the certificate"
        ) from error
    return context
