#!/usr/bin/env bash
# Makes the command of the Node client: build.sh OUT. Node reads the protos itself.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -d $here/node_modules ]] || { echo "run make setup, which installs the packages of package-lock.json"; exit 1; }
printf '#!/bin/sh\nexec node "%s/chat.mjs" "$@"\n' "$here" >"$1/chat"
chmod +x "$1/chat"
