"""The kustomization is the chart's output, and kubectl builds it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import render_kustomize
from kube_tools import KUBECTL
from tests.component.chart.charts import LIMIT_S, require_helm, workloads


@pytest.fixture(autouse=True)
def _helm() -> None:
    require_helm()


def built(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def test_the_files_are_what_the_chart_renders() -> None:
    wanted = render_kustomize.render()
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in render_kustomize.FOLDER.glob("*.yaml")
        if path != render_kustomize.VALUES
    }
    assert found == wanted, "run: python scripts/render_kustomize.py"


def test_kubectl_builds_it_and_an_overlay_changes_it(tmp_path: Path) -> None:
    found = built(render_kustomize.FOLDER)
    assert set(workloads(found)) == {"registry", "router", "prefill", "decode", "worker"}
    assert {item["metadata"]["namespace"] for item in found} == {render_kustomize.NAMESPACE}
    # As docs/kubernetes.md shows. Bases are named relative to an overlay.
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    depth = len(overlay.parts) - 1
    base = "../" * depth + str(render_kustomize.FOLDER).lstrip("/")
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "resources": [base],
                "replicas": [{"name": "headrace-decode", "count": 4}],
                "images": [{"name": "headrace/decode", "newTag": "cuda"}],
            }
        )
    )
    decode = workloads(built(overlay))["decode"]
    assert decode["spec"]["replicas"] == 4
    (container,) = decode["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "headrace/decode:cuda"
