"""The checks of packages and versions."""

from __future__ import annotations

from importlib import metadata

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_cli import checks
from headrace_cli.checks import Finding, Verdict, check_software, check_versions
from headrace_cli.members import UNKNOWN_VERSION


def found(subject: str, verdict: Verdict | None = None) -> Finding:
    findings = [one for one in check_software() if one.subject == subject]
    return next(one for one in findings if verdict is None or one.verdict is verdict)


def test_two_builds_of_mooncake_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = dict.fromkeys(checks._MOONCAKE_BUILDS[:1], "1.0")

    def version_of(name: str) -> str:
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version_of)
    assert f"{checks._MOONCAKE_BUILDS[0]} 1.0" in found("packages").detail
    assert all(one.verdict is Verdict.OK for one in check_software() if one.subject == "packages")
    installed[checks._MOONCAKE_BUILDS[1]] = "1.0"
    assert "over each other" in found("packages", Verdict.ERROR).detail


def test_members_of_several_versions_are_named() -> None:
    members = [
        registry_pb2.Member(worker_id="decode-0", version="0.2.0"),
        registry_pb2.Member(worker_id="decode-1"),
        registry_pb2.Member(worker_id="router-0", version="0.2.0"),
    ]
    (finding,) = check_versions(members)
    assert finding.verdict is Verdict.WARNING
    assert finding.detail.endswith(f"{UNKNOWN_VERSION}: decode-1; 0.2.0: decode-0, router-0")
    (finding,) = check_versions(members[:1])
    assert finding.verdict is Verdict.OK
    assert check_versions([]) == []
