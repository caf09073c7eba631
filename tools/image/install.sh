#!/usr/bin/env bash
# Second stage of the image: install the runtime into a prefix that is read-only afterwards.
#
#   tools/image/install.sh WHEELS LOCKS PREFIX [TORCH]
#
# Packages come from requirements.lock in LOCKS, by hash; the file of the demo model from demo.lock, unless DEMO is 0.
# TORCH is a wheel of another build of Torch, such as one for CPUs only: it replaces the locked one and its CUDA
# libraries. BYTECODE names packages, such as "tide_core ray": bytecode is compiled for these alone instead of all, for a
# rehearsal.
set -euo pipefail
WHEELS=$1 LOCKS=$2 PREFIX=$3 TORCH=${4:-} PYTHON=${PYTHON:-python3}
"$PYTHON" -m venv "$PREFIX"
pip() { "$PREFIX/bin/python" -m pip --disable-pip-version-check "$@"; }
lock=$(mktemp) && trap 'rm -f "$lock"' EXIT
if [[ -n $TORCH ]]; then
  # A requirement is a line and the indented lines below it.
  awk '/^[a-zA-Z0-9]/ { drop = /^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ } !drop' "$LOCKS/requirements.lock" >"$lock"
else
  cp "$LOCKS/requirements.lock" "$lock"
fi
pip install -qq --no-deps --require-hashes --only-binary :all: --no-compile -r "$lock"
[[ -z $TORCH ]] || pip install -qq --no-deps --no-index --no-compile "$TORCH"
pip install -qq --no-deps --no-index --no-compile "$WHEELS"/tide_serve-*.whl
pip check
# Only its file is needed, not its dependencies: install it after the check.
[[ ${DEMO:-1} == 0 ]] || pip install -qq --no-deps --require-hashes --only-binary :all: --no-compile -r "$LOCKS/demo.lock"
# Compile bytecode now: the prefix is read-only at run time, and nothing can be installed there later. The tests of
# packages are never imported there.
compiled=()
for package in ${BYTECODE:-}; do compiled+=("$PREFIX"/lib/python*/site-packages/"$package"); done
[[ -n ${BYTECODE:-} ]] || compiled=("$PREFIX/lib")
"$PREFIX/bin/python" -m compileall -q -j 0 -x 'site-packages/.*/tests?/' "${compiled[@]}" >/dev/null || true
"$PREFIX/bin/python" -m pip uninstall -qq -y pip
