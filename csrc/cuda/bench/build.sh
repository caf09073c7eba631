#!/bin/sh
# Builds the bench program into build/cuda_bench; with `fp8`, that of the linears of E4M3 weights into build/fp8_bench;
# with `wide`, that of the linear for many rows into build/wide_bench.
# ARCH: the compute capability, 90 by default. JOBS: compilers at the same time if above 1, then without a limit.
set -eu
cd "$(dirname "$0")/../../.."
arch=${ARCH:-90}
program=build/${1:-cuda}_bench
case ${1:-} in
    fp8) sources="csrc/cuda/bench/fp8/*.cu csrc/cuda/common/*.cu csrc/cuda/linear/*.cu" ;;
    wide) sources="csrc/cuda/bench/wide/*.cu csrc/cuda/common/*.cu csrc/cuda/linear/linear.cu csrc/cuda/linear/*16*.cu" ;;
    *) sources="csrc/cuda/*/*.cu" ;;
esac
mkdir -p build && rm -f "$program"_*.o
objects=
for source in $sources; do
    object=${program}_$(printf %s "${source%.cu}" | tr / _).o
    flags="-gencode arch=compute_$arch,code=sm_$arch"
    case $arch:$source in
        90:*/without_sm90a.cu) continue ;;
        90:*sm90a*) flags="-gencode arch=compute_90a,code=sm_90a" ;;
        *:*/without_sm90a.cu) ;;
        *:*sm90a*) continue ;;
    esac
    # shellcheck disable=SC2086  # several words
    nvcc -O3 -std=c++17 -Icsrc $flags -c "$source" -o "$object" &
    objects="$objects $object"
    [ "${JOBS:-1}" -gt 1 ] || wait
done
wait
# shellcheck disable=SC2086  # several words
nvcc -cudart static $objects -o "$program"
