#!/usr/bin/env bash
# Runs the tests and the bench of a GPU, and prints their record for docs/cuda.md. Arguments are for pytest.
# GPU_PYTHON: an interpreter that has all packages. Without it, a machine with a CUDA driver gets .venv-cuda.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
record=build/test-gpu

python=${GPU_PYTHON:-}
if [[ -z $python ]]; then
    if ldconfig -p | grep -q libcuda.so.1; then
        scripts/setup.sh cuda
        python=.venv-cuda/bin/python
    else
        scripts/setup.sh dev
        python=.venv/bin/python
    fi
fi
[[ -f models/tiny-llama/config.json ]] || "$python" scripts/make_tiny_model.py
[[ -f models/tiny-llama-deep/config.json ]] ||
    "$python" scripts/make_tiny_model.py --layers 12 --target models/tiny-llama-deep
[[ -f models/tiny-llama-adapters/poet/adapter_config.json ]] || "$python" scripts/make_tiny_adapter.py
[[ -f models/tiny-qwen3-next/config.json ]] || "$python" scripts/make_tiny_hybrids.py
# Without a package index, the test that needs this model is skipped.
[[ -f models/SmolLM2-135M-Instruct/config.json ]] || "$python" scripts/prepare_model.py || true

rm -rf "$record"
status=0
"$python" -m pytest -m gpu --record "$record/tests.md" "$@" || status=$?
if [[ -f $record/tests.md ]]; then
    # shellcheck disable=SC2086
    "$python" -m bench.gpu_step --output "$record" ${BENCH:-} >"$record/bench.log" 2>&1 || {
        tail -n 15 "$record/bench.log" >&2
        status=1
    }
    printf '\n%s\n\n' "--- record, for docs/cuda.md ---"
    cat "$record"/*.md
fi
exit "$status"
