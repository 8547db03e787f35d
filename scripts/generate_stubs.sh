#!/usr/bin/env bash
# Generates libs/headrace from protos/ with the given python (default: the virtual environment's).
# Does nothing when the protos and the compiler are those of the last run.
#   scripts/generate_stubs.sh [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
target=libs/headrace
stamp=$target/.inputs

hash=$({ cat requirements/build.txt; find protos -name '*.proto' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum)
[[ -f $stamp && $(<"$stamp") == "$hash" ]] && exit 0

# Built aside and moved in one step: a reader never meets half a package.
building=$(mktemp -d libs/.headrace.XXXXXX)
trap 'rm -rf "$building"' EXIT
mapfile -t protos < <(cd protos && find headrace -name '*.proto' | sort)
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -Iprotos \
    --python_out="$building" --grpc_python_out="$building" \
    --mypy_out="quiet:$building" --mypy_grpc_out="quiet:$building" "${protos[@]}"
printf '%s\n' "$hash" >"$building/headrace/.inputs"
touch "$building/headrace/py.typed"
rm -rf "$target"
mv "$building/headrace" "$target"
echo "[stubs] ${#protos[@]} protos compiled into $target"
