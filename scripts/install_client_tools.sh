#!/usr/bin/env bash
# Installs what tests/clients/test_works_with.py, test_frameworks.py, test_load_generators.py and test_agents.py run into folders of .cache, from
# their lists of versions. Does again only what changed. A tool without the program that it needs is left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

# Usage: install_python FOLDER LIST PYTHON. The list in the folder shows that it is complete.
install_python() {
    local folder=.cache/$1 list=tests/clients/python/$2 python=$3
    cmp -s "$list" "$folder/$2" && return
    echo "installing $list" >&2
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-deps --require-hashes --requirement "$list"
    cp "$list" "$folder/"
}

# A Python that inference-perf runs with, or nothing. A program of pyenv may stand for a version that is not chosen.
later_python() {
    local python
    for python in python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
        "$python" -c '' 2>/dev/null && { echo "$python"; return; }
    done
}

install_agents() {
    local folder=.cache/agents list=tests/clients/agents/package-lock.json
    cmp -s "$list" "$folder/package-lock.json" && return
    echo "installing $list" >&2
    rm -rf "$folder"
    mkdir -p "$folder"
    cp tests/clients/agents/package.json "$list" "$folder/"
    (cd "$folder" && npm install --no-save --ignore-scripts --no-audit --no-fund --silent) ||
        { rm -rf "$folder"; exit 1; }
}

install_python works-with requirements.txt .venv/bin/python
install_python frameworks frameworks.txt .venv/bin/python
install_python load-generators load_generators.txt .venv/bin/python
later=$(later_python)
if [[ -n $later ]]; then
    install_python inference-perf inference_perf.txt "$later"
else
    echo "inference-perf: SKIPPED, without Python 3.12 or 3.13"
fi
install_agents
