#!/usr/bin/env bash
# Generates libs/headrace from protos/ with the given python (default: the virtual environment's).
# Does nothing when the protos and the compiler are those of the last run.
#   scripts/generate_stubs.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
target=libs/headrace
stamp=$target/.inputs

tools='from importlib.metadata import version; print(version("grpcio-tools"), version("mypy-protobuf"))'
hash=$({
    "$python" -c "$tools"
    find protos scripts/compile_protos.py -name '*.p*' -type f -print0 | sort -z | xargs -0 sha256sum
} | sha256sum)
[[ -f $stamp && $(<"$stamp") == "$hash" ]] && exit 0

# Built aside and moved in one step: a reader never meets half a package.
building=$(mktemp -d libs/.headrace.XXXXXX)
trap 'rm -rf "$building"' EXIT
count=$("$python" scripts/compile_protos.py "$building")
printf '%s\n' "$hash" >"$building/headrace/.inputs"
rm -rf "$target"
mv "$building/headrace" "$target"
echo "[stubs] $count protos compiled into $target"
