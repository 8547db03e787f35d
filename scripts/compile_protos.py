"""Compile protos/ to Python modules with types: scripts/compile_protos.py TARGET

Needs grpcio-tools and mypy-protobuf in the environment that runs this. TARGET receives the package `headrace`.
scripts/generate_stubs.sh runs it for a checkout, scripts/hatch_build.py for wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PROTOS = Path(__file__).resolve().parent.parent / "protos"
_TIMEOUT_S = 300.0


def compile_protos(target: Path) -> int:
    """Writes the package `headrace` into `target`, and returns the number of protos. Raises CalledProcessError."""
    protos = sorted(
        path.relative_to(PROTOS).as_posix() for path in PROTOS.glob("headrace/**/*.proto")
    )
    # protoc searches its plugins in PATH. In a virtual environment that is not active they are beside its Python.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    outputs = [f"--{kind}={target}" for kind in ("python_out", "grpc_python_out")]
    outputs += [f"--{kind}=quiet:{target}" for kind in ("mypy_out", "mypy_grpc_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *protos],
        env={**os.environ, "PATH": path},
        timeout=_TIMEOUT_S,
        check=True,
    )
    (target / "headrace" / "py.typed").touch()
    return len(protos)


def main() -> int:
    """Entry point."""
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} TARGET", file=sys.stderr)
        return 2
    print(compile_protos(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
