#!/usr/bin/env bash
# Everything that needs a GPU, in one call, on a machine with its own torch and transformers and no network.
#
#   tools/gpu_tests.sh [DEPS]
#
# DEPS is a folder of pure-Python packages that the machine lacks, made beforehand with
#   pip install --target DEPS --no-deps pytest pluggy iniconfig packaging pygments pytest-timeout pytest-asyncio \
#     "hypothesis<6.150" sortedcontainers attrs pybind11 gguf
# Builds the native module for the machine's CPU, runs the GPU tests, then the CPU tests of families, kernels and engine,
# so that the older library versions there are proven too.
set -uo pipefail
cd "$(dirname "$0")/.."
DEPS=${1:-}
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${DEPS:+:$(realpath "$DEPS")}"
status=0

"$PYTHON" -c 'import platform, torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device", platform.machine())'

echo "== native module"
cmake -S csrc -B build/gpu-machine -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
  -Dpybind11_DIR="$("$PYTHON" -m pybind11 --cmakedir)" >/dev/null &&
  cmake --build build/gpu-machine && cmake --install build/gpu-machine --prefix . || status=1

echo "== GPU tests"
"$PYTHON" -m pytest -q -m gpu tests/gpu || status=1

echo "== CPU tests on these versions"
"$PYTHON" -m pytest -q -m "not demo and not serve and not gpu" tests/models/test_families.py tests/kernels tests/engine \
  tests/unit/test_scheduler.py tests/unit/test_sampler.py tests/unit/test_tokenizer.py tests/unit/test_text_stream.py || status=1
exit $status
