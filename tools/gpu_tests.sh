#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with its own torch and transformers and no network.
#
#   tools/gpu_tests.sh [DEPS]
#
# DEPS is a folder of pure-Python packages that the machine lacks, made beforehand with
#   pip install --target DEPS --no-deps pytest pluggy iniconfig packaging pygments pytest-timeout pytest-asyncio \
#     "hypothesis<6.150" sortedcontainers attrs pybind11 gguf
# Builds the native module for the machine's CPU and the CUDA module for its GPU, runs the GPU tests, those of the CUDA
# ops marked `sanitizer` once more under compute-sanitizer where it is installed, then the CPU tests of families, kernels
# and engine, so that the older library versions there are proven too.
set -uo pipefail
cd "$(dirname "$0")/.."
DEPS=${1:-}
PYTHON=${PYTHON:-python3}
SANITIZER_LIMIT=${SANITIZER_LIMIT:-240}  # seconds for each tool
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${DEPS:+:$(realpath "$DEPS")}"
status=0

"$PYTHON" -c 'import platform, torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device", platform.machine())'

echo "== native modules"
capability=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
cuda=AUTO
command -v nvcc >/dev/null && cuda=ON
cmake -S csrc -B build/gpu-machine -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
  -Dpybind11_DIR="$("$PYTHON" -m pybind11 --cmakedir)" -DTIDE_CUDA=$cuda -DTIDE_CUDA_ARCHS="$capability" | grep "CUDA module"
cmake --build build/gpu-machine && cmake --install build/gpu-machine --prefix . || status=1

echo "== GPU tests"
"$PYTHON" -m pytest -q -m gpu tests/gpu || status=1

if command -v compute-sanitizer >/dev/null; then
  # The option that limits a tool to our own kernels has had two names.
  only_ours=()
  for option in --kernel-name --kernel-regex; do
    compute-sanitizer --help 2>&1 | grep -q -- "$option " && only_ours=("$option" kns=tide) && break
  done
  for tool in memcheck racecheck initcheck; do
    echo "== compute-sanitizer: $tool"
    # Without Torch's cache every tensor is an allocation of its own, so that a step outside one is seen.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "$SANITIZER_LIMIT" compute-sanitizer --tool "$tool" "${only_ours[@]}" \
      --target-processes all --error-exitcode 1 "$PYTHON" -m pytest -q -x -p no:cacheprovider -m sanitizer \
      --timeout "$SANITIZER_LIMIT" tests/gpu/test_cuda_ops.py tests/gpu/test_cuda_attention.py || status=1
  done
else
  echo "== compute-sanitizer is not installed"
fi

echo "== CPU tests on these versions"
"$PYTHON" -m pytest -q -m "not demo and not serve and not gpu" tests/models/test_families.py tests/kernels tests/engine \
  tests/unit/test_scheduler.py tests/unit/test_sampler.py tests/unit/test_tokenizer.py tests/unit/test_text_stream.py || status=1
exit $status
