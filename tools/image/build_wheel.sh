#!/usr/bin/env bash
# First stage of the image: a wheel of this tree with its native modules.
#
#   tools/image/build_wheel.sh SOURCE WHEELS     TIDE_CUDA and TIDE_CUDA_ARCHS as in docs/building.md
#
# Build tools come from deploy/build.lock, by hash, in an environment that exists in this stage only.
set -euo pipefail
SOURCE=$(realpath "$1") WHEELS=$(realpath -m "$2") PYTHON=${PYTHON:-python3}
tools=$(mktemp -d) && trap 'rm -rf "$tools"' EXIT
"$PYTHON" -m venv "$tools"
"$tools/bin/pip" install -qq --disable-pip-version-check --require-hashes --only-binary :all: -r "$SOURCE/deploy/build.lock"
mkdir -p "$WHEELS"
PATH="$tools/bin:$PATH" "$tools/bin/pip" wheel -qq --disable-pip-version-check --no-deps --no-build-isolation \
  --config-settings build-dir="$tools/build" -w "$WHEELS" "$SOURCE"
ls "$WHEELS"
