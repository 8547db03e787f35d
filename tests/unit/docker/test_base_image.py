"""Images are built from the digest of the base that was pulled, with an engine that a script stands for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.unit.test_architecture import ROOT

DIGEST = f"sha256:{'a1' * 32}"
DOCKER = f"""#!/bin/sh
echo "$@" >>"$CALLS"
case "$1 $2" in
  "image inspect") echo library/debian@{DIGEST} ;;
esac
"""


def test_the_build_takes_the_digest_of_the_pulled_base_and_records_it(tmp_path: Path) -> None:
    checkout, programs, calls = tmp_path / "checkout", tmp_path / "bin", tmp_path / "calls"
    shutil.copytree(ROOT / "docker", checkout / "docker")
    programs.mkdir()
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(
        ["docker/build.sh", "router"], cwd=checkout, env=environment, check=False, timeout=60
    )
    (build,) = (line for line in calls.read_text().splitlines() if line.startswith("build "))
    assert f"DEBIAN_IMAGE=docker.io/library/debian:bookworm-slim@{DIGEST} " in build
    assert f"--label org.opencontainers.image.base.digest={DIGEST} " in build
