"""Make this checkout importable in the environment that runs this, with its console scripts.

The packages are in five folders, so an editable install by pip would add an import hook, which slows the start of every
process. A path file has no such cost, needs no build and works offline.
"""

from __future__ import annotations

import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """#!{python}
import sys

from {module} import {function}

if __name__ == "__main__":
    sys.exit({function}())
"""


def write(path: Path, content: str, *, mode: int = 0o644) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def main() -> int:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = configuration["project"]
    sources = configuration["tool"]["hatch"]["build"]["dev-mode-dirs"]
    packages = Path(sysconfig.get_path("purelib"))
    scripts = Path(sysconfig.get_path("scripts"))
    metadata = packages / f"{project['name']}-{project['version']}.dist-info"
    for stale in packages.glob(f"{project['name']}-*.dist-info"):
        for file in stale.iterdir():
            file.unlink()
        stale.rmdir()

    written = [
        write(packages / "headrace.pth", "".join(f"{ROOT / source}\n" for source in sources)),
        write(
            metadata / "METADATA",
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n",
        ),
        write(
            metadata / "entry_points.txt",
            "[console_scripts]\n"
            + "".join(f"{name} = {target}\n" for name, target in project["scripts"].items()),
        ),
        write(metadata / "INSTALLER", "headrace\n"),
    ]
    for name, target in project["scripts"].items():
        module, function = target.split(":")
        content = SCRIPT.format(python=sys.executable, module=module, function=function)
        written.append(write(scripts / name, content, mode=0o755))
    write(metadata / "RECORD", "".join(f"{path},,\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
