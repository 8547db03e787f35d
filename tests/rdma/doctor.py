"""`headrace doctor` beside RDMA verbs, and on a host: its findings are compared with what the kernel has."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rdma.cases import DOCTOR_DOWN, DOCTOR_FOUND
from tests.rdma.device import DEVICE
from tests.rdma.hosts import FIRST_HOST
from tests.rdma.report import run_case

# The interface of the soft-RoCE device, see init.sh.
INTERFACE = "dummy0"
ADAPTERS = Path("/sys/class/infiniband")
_STATE = ADAPTERS / DEVICE / "ports" / "1" / "state"
_STATE_TIMEOUT_S = 60.0
_POLL_S = 0.1

Finding = Mapping[str, Any]


def doctor_cases() -> None:
    """Both cases of a virtual machine. The interface is down afterwards."""
    run_case(DOCTOR_FOUND, lambda: check_found(examined(), FIRST_HOST))
    run_case(DOCTOR_DOWN, without_link)


def without_link() -> str:
    """The findings once the device's interface is down."""
    subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True, timeout=_STATE_TIMEOUT_S)
    give_up_s = time.monotonic() + _STATE_TIMEOUT_S
    while "ACTIVE" in _STATE.read_text():
        assert time.monotonic() < give_up_s, f"the port of {DEVICE} stays active"
        time.sleep(_POLL_S)
    return check_down(examined())


def examined() -> list[Finding]:
    """The findings of `headrace doctor --json`, without a deployment."""
    # The machines import the command before they fork this process.
    from typer.testing import CliRunner

    from headrace_cli.app import app

    ended = CliRunner().invoke(app, ["doctor", "--json"])
    # There is no registry, which is an error.
    assert ended.exit_code == 1, f"status {ended.exit_code}: {ended.output} {ended.exception}"
    found = json.loads(ended.stdout)["findings"]
    assert isinstance(found, list)
    return found


def check_found(findings: Sequence[Finding], address: str) -> str:
    """The device is found with its link, a GID for `address`, and all that RDMA needs. Raises AssertionError."""
    port = _finding(findings, f"RDMA {DEVICE}/1")
    assert port["verdict"] == "ok", port
    assert port["detail"].startswith("active, Ethernet, "), port
    assert port["detail"].endswith(f" is RoCE v2 for {address}"), port
    for subject in ("RDMA device files", "locked memory"):
        assert _finding(findings, subject)["verdict"] == "ok", _finding(findings, subject)
    return f"{port['subject']}: {port['detail']}"


def check_down(findings: Sequence[Finding]) -> str:
    """The device is found without a link, with a remedy. Raises AssertionError."""
    port = _finding(findings, f"RDMA {DEVICE}/1")
    assert port["verdict"] == "warning", port
    assert "DOWN" in port["detail"], port
    assert DEVICE in (port["remedy"] or ""), port
    return f"{port['subject']}: {port['detail']}"


def check_host(findings: Sequence[Finding], adapters: Sequence[str]) -> str:
    """A host's adapters are found, or their absence with a remedy. Raises AssertionError."""
    subjects = [str(one["subject"]) for one in findings]
    if adapters:
        missing = [name for name in adapters if not any(f"RDMA {name}/" in s for s in subjects)]
        assert not missing, f"{missing} are not in {subjects}"
        return f"found {', '.join(adapters)}"
    absent = _finding(findings, "RDMA")
    assert absent["verdict"] == "warning", absent
    assert "no RDMA adapter" in absent["detail"], absent
    assert "rdma_rxe" in (absent["remedy"] or ""), absent
    assert not [s for s in subjects if s.startswith("RDMA ")], subjects
    return str(absent["detail"])


def adapters_of_host() -> list[str]:
    """The names of the kernel's RDMA devices that have ports."""
    folders = sorted(ADAPTERS.iterdir()) if ADAPTERS.is_dir() else []
    return [folder.name for folder in folders if (folder / "ports").is_dir()]


def _finding(findings: Sequence[Finding], subject: str) -> Finding:
    found = [one for one in findings if one["subject"] == subject]
    assert len(found) == 1, f"{len(found)} findings of {subject}: {list(findings)}"
    return found[0]
