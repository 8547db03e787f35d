"""TLS of listeners that are not gRPC's."""

from __future__ import annotations

import ssl
from dataclasses import astuple

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles


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
