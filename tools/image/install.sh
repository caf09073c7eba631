#!/usr/bin/env bash
# Second stage of the image: everything that runs, into a prefix that nobody writes to afterwards.
#
#   tools/image/install.sh WHEELS LOCKS PREFIX [TORCH]
#
# Packages come from requirements.lock in LOCKS, by hash; the file of the demo model from demo.lock, unless DEMO is 0.
# TORCH is a wheel of another build of Torch than the index has, such as one for
# CPUs alone: it takes the place of the locked one and of the CUDA libraries that come with that.
set -euo pipefail
WHEELS=$1 LOCKS=$2 PREFIX=$3 TORCH=${4:-} PYTHON=${PYTHON:-python3}
"$PYTHON" -m venv "$PREFIX"
pip() { "$PREFIX/bin/python" -m pip --disable-pip-version-check "$@"; }
lock=$(mktemp) && trap 'rm -f "$lock"' EXIT
if [[ -n $TORCH ]]; then
  # A requirement is a line and those indented below it.
  awk '/^[a-zA-Z0-9]/ { drop = /^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ } !drop' "$LOCKS/requirements.lock" >"$lock"
else
  cp "$LOCKS/requirements.lock" "$lock"
fi
pip install -qq --no-deps --require-hashes --only-binary :all: --no-compile -r "$lock"
[[ -z $TORCH ]] || pip install -qq --no-deps --no-index --no-compile "$TORCH"
pip install -qq --no-deps --no-index --no-compile "$WHEELS"/tide_serve-*.whl
pip check
# Its file alone is wanted, and its own dependencies are not: after the check.
[[ ${DEMO:-1} == 0 ]] || pip install -qq --no-deps --require-hashes --only-binary :all: --no-compile -r "$LOCKS/demo.lock"
# Bytecode is made now: the prefix is read-only when it runs. Nothing can be installed there later either.
"$PREFIX/bin/python" -m compileall -q -j 0 "$PREFIX/lib" >/dev/null || true
"$PREFIX/bin/python" -m pip uninstall -qq -y pip
