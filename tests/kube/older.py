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
CUSTOM: Final = (
    ("monitoring.coreos.com", "v1", "ServiceMonitor"),
    ("monitoring.coreos.com", "v1", "PrometheusRule"),
    ("keda.sh", "v1alpha1", "ScaledObject"),
    ("inference.networking.k8s.io", "v1", "InferencePool"),
    ("cert-manager.io", "v1", "Certificate"),
)


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


def custom_definitions() -> list[dict[str, object]]:
    """Definitions of the custom resources, with any fields."""
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{kind.lower()}s.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": f"{kind.lower()}s"},
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "schema": {
                            "openAPIV3Schema": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            }
                        },
                    }
                ],
            },
        }
        for group, version, kind in CUSTOM
    ]
