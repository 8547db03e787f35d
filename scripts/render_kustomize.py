"""Write docker/kustomize from the Helm chart, for clusters without helm.

    python scripts/render_kustomize.py            rewrites the folder
    python scripts/render_kustomize.py --check    only says whether it is current

docker/kustomize/values.yaml has the values. Everything else in the folder is written here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from kube_tools import HELM, KUBERNETES_VERSIONS, ROOT

FOLDER: Final = ROOT / "docker" / "kustomize"
VALUES: Final = FOLDER / "values.yaml"
CHART: Final = ROOT / "docker" / "helm" / "headrace"
RELEASE: Final = "headrace"
NAMESPACE: Final = "headrace"
_HEADER: Final = (
    "# Written by scripts/render_kustomize.py from docker/helm/headrace and values.yaml.\n"
)
_COMPONENT: Final = "app.kubernetes.io/component"
# They name a release of helm's, and this is none.
_LEFT_OUT: Final = ("helm.sh/chart", "app.kubernetes.io/managed-by")
_LIMIT_S: Final = 60.0


def render() -> dict[str, str]:
    """The text of each file of the folder but the values."""
    command = [str(HELM), "template", RELEASE, str(CHART), "--values", str(VALUES)]
    command += ["--namespace", NAMESPACE, "--kube-version", f"{KUBERNETES_VERSIONS[0]}.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"render_kustomize: {done.stderr}")
    groups: dict[str, list[dict[str, Any]]] = {}
    for item in yaml.safe_load_all(done.stdout):
        if item:
            component = item["metadata"]["labels"].get(_COMPONENT, "shared")
            groups.setdefault(f"{component}.yaml", []).append(_cleaned(item))
    files = {
        name: _HEADER + yaml.safe_dump_all(items, sort_keys=False, width=120)
        for name, items in sorted(groups.items())
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(files),
    }
    files["kustomization.yaml"] = _HEADER + yaml.safe_dump(kustomization, sort_keys=False)
    return files


def _cleaned(item: dict[str, Any]) -> dict[str, Any]:
    """A manifest without labels of helm's."""
    cleaned = {**item, "metadata": _unlabelled(item["metadata"])}
    template = cleaned.get("spec", {}).get("template")
    if template:
        spec = {
            **cleaned["spec"],
            "template": {**template, "metadata": _unlabelled(template["metadata"])},
        }
        cleaned["spec"] = spec
    return cleaned


def _unlabelled(metadata: dict[str, Any]) -> dict[str, Any]:
    labels = {name: value for name, value in metadata["labels"].items() if name not in _LEFT_OUT}
    return {**metadata, "labels": labels}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    options = parser.parse_args()
    wanted = render()
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.yaml")}
    found.pop(VALUES.name)
    changed = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if options.check:
        for name in changed:
            print(f"docker/kustomize/{name} is not current", file=sys.stderr)
        return 1 if changed else 0
    for name in changed:
        path = FOLDER / name
        if name in wanted:
            path.write_text(wanted[name], encoding="utf-8")
        else:
            Path.unlink(path)
        print(f"wrote docker/kustomize/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
