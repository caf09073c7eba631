#!/usr/bin/env bash
# The tests that need a GPU, and CPU tests with that machine's library versions: `gpu_all.sh` without the benchmarks.
#
#   tools/gpu_tests.sh [DEPS]
LIMIT=${LIMIT:-1200} exec "$(dirname "$0")/gpu_all.sh" --skip-benchmarks --cpu-tests "${OUT:-build/gpu-results}" "$@"
