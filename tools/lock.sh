#!/usr/bin/env bash
# Write the lock files of the image: every runtime and build package with its version and hashes, for all platforms,
# within the pins of constraints.txt.
#
#   tools/lock.sh [--check]      --check: write nothing, fail if they are outdated
#
# Needs `uv` (pip install uv) and the package index. One index only, so that no package can come from elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
UV=${UV:-uv}
command -v "$UV" >/dev/null || { echo "lock: uv not found; pip install uv, or set UV" >&2; exit 2; }

compile() { # INPUT OUTPUT
  "$UV" pip compile "$1" -c constraints.txt --universal --python-version 3.11 --generate-hashes --quiet \
    --no-annotate --no-emit-index-url --custom-compile-command "tools/lock.sh" "${@:3}" -o "$2"
}

write() { # FOLDER
  compile pyproject.toml "$1/requirements.lock"
  compile "$inputs/build.in" "$1/build.lock"
  compile "$inputs/demo.in" "$1/demo.lock" --no-deps # its file is used, never its code
}

inputs=$(mktemp -d) && trap 'rm -rf "$inputs"' EXIT
printf '%s\n' 'scikit-build-core>=0.11' 'pybind11>=3.0' 'cmake>=3.25' 'ninja>=1.11' >"$inputs/build.in"
sed -n 's/^DEMO_PACKAGE := //p' Makefile >"$inputs/demo.in"
if [[ ${1:-} == --check ]]; then
  write "$inputs"
  for lock in requirements build demo; do
    cmp -s "$inputs/$lock.lock" "deploy/$lock.lock" ||
      { echo "lock: deploy/$lock.lock is not current; run tools/lock.sh" >&2; exit 1; }
  done
else
  write deploy
fi
