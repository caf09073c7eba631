// Loading, storing and rounding of vectors for every storage type.
#pragma once

#include "cpu/kernels/narrow.h"
#include "cpu/kernels/vec.h"
#include "dtype.h"

namespace tide::TIDE_ISA {

TIDE_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

TIDE_INLINE Vec load(const BFloat16* p) {
    ShortVec s;
    __builtin_memcpy(&s, p, sizeof(s));
    return bfloat16_to_float(s);
}

TIDE_INLINE Vec load(const Half* p) {
    ShortVec s;
    __builtin_memcpy(&s, p, sizeof(s));
    return half_to_float(s);
}

TIDE_INLINE void store(float* p, Vec v) {
    __builtin_memcpy(p, &v, sizeof(v));
}

TIDE_INLINE void store(BFloat16* p, Vec v) {
    ShortVec s = float_to_bfloat16(v);
    __builtin_memcpy(p, &s, sizeof(s));
}

TIDE_INLINE void store(Half* p, Vec v) {
    ShortVec s = float_to_half(v);
    __builtin_memcpy(p, &s, sizeof(s));
}

// The first `count` (< kLanes) elements; the other lanes are zero and the memory after them is not read.
template <typename T>
TIDE_INLINE Vec load_partial(const T* p, int64_t count) {
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    return load(lanes);
}

template <typename T>
TIDE_INLINE void store_partial(T* p, Vec v, int64_t count) {
    T lanes[kLanes];
    store(lanes, v);
    for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// What `v` becomes when it is stored as T and read again.
template <typename T>
TIDE_INLINE Vec round_to(Vec v) {
    T lanes[kLanes];
    store(lanes, v);
    return load(lanes);
}

template <>
TIDE_INLINE Vec round_to<float>(Vec v) {
    return v;
}

template <typename T>
TIDE_INLINE float load_scalar(const T* p) {
    return load_partial(p, 1)[0];
}

// One number, rounded as the vector store rounds it.
template <typename T>
TIDE_INLINE void store_scalar(T* p, float value) {
    store_partial(p, splat(value), 1);
}

template <>
TIDE_INLINE void store_scalar<float>(float* p, float value) {
    *p = value;
}

}  // namespace tide::TIDE_ISA
