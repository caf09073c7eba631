#!/bin/sh
# Builds the bench program into build/cuda_bench. ARCH: the compute capability, 90 by default.
set -eu
cd "$(dirname "$0")/../../.."
arch=${ARCH:-90}
mkdir -p build && rm -f build/bench_*.o
objects=
for source in csrc/cuda/*/*.cu; do
    object=build/bench_$(printf %s "${source%.cu}" | tr / _).o
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
nvcc -cudart static $objects -o build/cuda_bench
