"""The bill of materials of an image."""

from __future__ import annotations

from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

from image_sbom import bill, debian_components, distribution_of, python_components

STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: GNU C Library
 Version: not a field of the package

Package: removed
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0

Package: adduser
Status: install ok installed
Architecture: all
Version: 1:3.134
"""


def _installed(folder: Path, name: str, version: str, *lines: str) -> Distribution:
    path = folder / f"{name}-{version}.dist-info"
    path.mkdir()
    text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines, ""])
    (path / "METADATA").write_text(text)
    return PathDistribution(path)


def test_debian_packages_are_those_that_are_installed() -> None:
    components = debian_components(STATUS, "debian-12")
    assert [each["purl"] for each in components] == [
        "pkg:deb/debian/adduser@1%3A3.134?arch=all&distro=debian-12",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12",
    ]
    assert components[1]["version"] == "2.36-9+deb12u10"


def test_python_packages_have_normal_names_and_licenses(tmp_path: Path) -> None:
    found = [
        _installed(tmp_path, "Typing_Extensions", "4.16.0", "License-Expression: PSF-2.0"),
        _installed(tmp_path, "headrace", "0.1.0"),
        _installed(tmp_path, "old.style", "1.0", "License: MIT"),
        _installed(tmp_path, "whole-text", "1.0", f"License: {'words ' * 40}"),
    ]
    components = python_components(found)
    assert [each["purl"] for each in components] == [
        "pkg:pypi/headrace@0.1.0",
        "pkg:pypi/old-style@1.0",
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:pypi/whole-text@1.0",
    ]
    assert [each.get("licenses") for each in components] == [
        None,
        [{"license": {"name": "MIT"}}],
        [{"expression": "PSF-2.0"}],
        None,
    ]


def test_the_document_has_the_image_and_no_date(tmp_path: Path) -> None:
    components = python_components([_installed(tmp_path, "headrace", "0.1.0")])
    document = bill("headrace-router", components)
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"] == {
        "component": {"type": "container", "name": "headrace-router", "version": "0.1.0"}
    }
    assert document == bill("headrace-router", components)
    references = [each["bom-ref"] for each in document["components"]]
    assert references == ["pkg:pypi/headrace@0.1.0"]


def test_the_distribution_has_name_and_version() -> None:
    assert distribution_of('NAME="Debian"\nID=debian\nVERSION_ID="12"\n') == "debian-12"
