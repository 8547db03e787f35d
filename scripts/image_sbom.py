"""Writes a bill of materials in CycloneDX's form to stdout: image_sbom.py IMAGE

It lists the Python packages of the environment that runs it, and Debian's packages of the machine or image in which it
runs. The build of an image runs it last, so the list has what the image has. It needs the standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

_DPKG_STATUS: Final = Path("/var/lib/dpkg/status")
_OS_RELEASE: Final = Path("/etc/os-release")
_OWN: Final = "headrace"
_LICENSE_CHARACTERS_MAX: Final = 100


def python_components(found: Iterable[Distribution]) -> list[dict[str, Any]]:
    """A component for each Python package, by name."""
    components = {}
    for distribution in found:
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        version = distribution.version
        purl = f"pkg:pypi/{name}@{quote(version)}"
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        }
        if licenses := _licenses(distribution):
            component["licenses"] = licenses
        components[name] = component
    return [components[name] for name in sorted(components)]


def _licenses(distribution: Distribution) -> list[dict[str, Any]]:
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return [{"expression": metadata["License-Expression"]}]
    (name, *_) = metadata.get_all("License") or [""]
    # Some packages have the whole text of the license there.
    return [{"license": {"name": name}}] if 0 < len(name) <= _LICENSE_CHARACTERS_MAX else []


def debian_components(status: str, distribution: str) -> list[dict[str, Any]]:
    """A component for each installed package of dpkg's status file. `distribution` is such as debian-12."""
    components = []
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in paragraph.splitlines()
            if ": " in line and not line.startswith(" ")
        )
        if fields.get("Status") != "install ok installed":
            continue
        name, version = fields["Package"], fields["Version"]
        query = f"arch={fields['Architecture']}&distro={distribution}"
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?{query}"
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "version": version,
                "purl": purl,
            }
        )
    return sorted(components, key=lambda component: str(component["bom-ref"]))


def distribution_of(os_release: str) -> str:
    """The distribution, such as debian-12, from the content of /etc/os-release."""
    fields = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    return f"{fields['ID']}-{fields['VERSION_ID']}".replace('"', "")


def bill(image: str, components: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The document. It has no date and no random number, so equal images have equal documents."""
    listed = list(components)
    versions = [each["version"] for each in listed if each["purl"].startswith(f"pkg:pypi/{_OWN}@")]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": image, "version": versions[0]},
        },
        "components": listed,
    }


def main() -> None:
    distribution = distribution_of(_OS_RELEASE.read_text(encoding="utf-8"))
    components = [
        *python_components(distributions()),
        *debian_components(_DPKG_STATUS.read_text(encoding="utf-8"), distribution),
    ]
    json.dump(bill(sys.argv[1], components), sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
