"""The chart for the API server of the tests, which is older than the chart supports.

Debian's source is Kubernetes 1.20. It lacks four things that the chart uses. They are replaced in a copy of the chart.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.component.chart.charts import CHART

REPLACED: Final[Mapping[str, Sequence[tuple[str, str]]]] = {
    "Chart.yaml": [('kubeVersion: ">=1.27.0-0"', "")],
    "templates/disruption.yaml": [("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n")],
    "templates/router.yaml": [
        ("apiVersion: autoscaling/v2\n", "apiVersion: autoscaling/v2beta2\n")
    ],
    "templates/networkpolicies.yaml": [(", endPort: {{ .last }}", "")],
    "templates/_pod.tpl": [
        ("grpc: { port: {{ $port }}, service: live }", "tcpSocket: { port: {{ $port }} }"),
        ("grpc: { port: {{ $port }} }", "tcpSocket: { port: {{ $port }} }"),
    ],
}


def older_chart(folder: Path) -> Path:
    """A copy of the chart that Kubernetes 1.20 accepts."""
    path = folder / "chart"
    # The contents of links, as in a packed chart.
    shutil.copytree(CHART, path)
    for name, changes in REPLACED.items():
        file = path / name
        text = file.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
    return path
