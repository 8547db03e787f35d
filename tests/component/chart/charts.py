"""Renders the Helm chart with helm."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube_tools import HELM, KUBERNETES_VERSIONS
from tests.component.chart.custom import DEFINITIONS
from tests.unit.test_architecture import ROOT

CHART = ROOT / "docker" / "helm" / "headrace"
EXAMPLES = sorted((ROOT / "docker" / "helm" / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "headrace", "models"
COMPONENTS = ("registry", "router", "prefill", "decode", "worker", "planner")
LIMIT_S = 60.0
CUSTOM = {definition.resource for definition in DEFINITIONS}

Manifest = dict[str, Any]


def require_helm() -> None:
    if not HELM.is_file():
        pytest.skip(f"needs {HELM}: python scripts/kube_tools.py")


def run_helm(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs helm without any settings of the user."""
    require_helm()
    return subprocess.run(
        [str(HELM), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )


def template(
    *words: str, version: str = KUBERNETES_VERSIONS[-1]
) -> subprocess.CompletedProcess[str]:
    """The manifests of a release, for a version of Kubernetes."""
    command = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE]
    return run_helm(*command, "--kube-version", f"{version}.0", *words)


@lru_cache(maxsize=64)
def manifests(*words: str) -> tuple[Manifest, ...]:
    """The manifests of a release. `words` are helm's flags of values."""
    done = template(*words)
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def example(name: str) -> tuple[Manifest, ...]:
    """The manifests with one of docker/helm/examples."""
    return manifests("--values", str(ROOT / "docker" / "helm" / "examples" / f"{name}.yaml"))


def of_kind(found: Sequence[Manifest], *kinds: str) -> dict[str, Manifest]:
    """The manifests of these kinds by their names without the release's."""
    return {
        item["metadata"]["name"].removeprefix(f"{RELEASE}-"): item
        for item in found
        if item["kind"] in kinds
    }


def workloads(found: Sequence[Manifest]) -> dict[str, Manifest]:
    """The Deployments and StatefulSets by component."""
    return of_kind(found, "Deployment", "StatefulSet")


def container_of(workload: Manifest) -> Mapping[str, Any]:
    """The only container of a workload's pods."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def values_file(folder: Path, values: Mapping[str, Any]) -> str:
    """Writes values to a file, and returns its path."""
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return str(path)
