// Norm and rotary positions of one head, by one warp: lane l holds elements 2l, 2l + 1, then those 64 further on, of
// both halves of the head. Every product and sum is rounded to the storage type, as the plain ops round theirs; so
// nothing may be fused.
#pragma once

#include "cuda/common/block.cuh"
#include "cuda/common/convert.cuh"
#include "cuda/common/divider.h"
#include "cuda/small/ops.h"

namespace tide::cuda {

constexpr int64_t kRotateStep = 2 * kWarp;

struct Two {
    float a, b;
};

template <typename T>
struct alignas(2 * sizeof(T)) RawTwo {
    T a, b;
};

template <typename T>
__device__ inline Two load_two(const T* from, int64_t count, bool aligned) {
    if (aligned && count >= 2) {
        const RawTwo<T> raw = *reinterpret_cast<const RawTwo<T>*>(from);
        return {to_float(raw.a), to_float(raw.b)};
    }
    return {to_float(from[0]), count >= 2 ? to_float(from[1]) : 0.0f};
}

template <typename T>
__device__ inline void store_two(T* to, Two value, int64_t count, bool aligned) {
    if (aligned && count >= 2) {
        *reinterpret_cast<RawTwo<T>*>(to) = {from_float<T>(value.a), from_float<T>(value.b)};
    } else {
        to[0] = from_float<T>(value.a);
        if (count >= 2) to[1] = from_float<T>(value.b);
    }
}

// a * b + c * d with every step rounded
template <typename T>
__device__ inline float rotated(float a, float b, float c, float d) {
    return round_to<T>(__fadd_rn(round_to<T>(__fmul_rn(a, b)), round_to<T>(__fmul_rn(c, d))));
}

// A thread's elements of a head, in both halves.
struct HeadPair {
    Two low, high;
};

template <typename T>
__device__ inline HeadPair load_pair(const T* x, int64_t half, int64_t at, bool aligned) {
    return {load_two(x + at, half - at, aligned), load_two(x + half + at, half - at, aligned)};
}

__device__ inline float add_squares(const HeadPair& x, float squares) {
    squares = fmaf(x.low.b, x.low.b, fmaf(x.low.a, x.low.a, squares));
    return fmaf(x.high.b, x.high.b, fmaf(x.high.a, x.high.a, squares));
}

// Of the squares of all threads of a warp, or of a team of neighbours in it: the same, where the others have none.
template <int kTeam = kWarp>
__device__ inline float norm_scale(float squares, int64_t dim, float eps) {
    return rsqrtf(warp_sum<kTeam>(squares) / static_cast<float>(dim) + eps);
}

template <typename T>
__device__ inline Two normed(Two x, float scale, Two weight) {
    return {round_to<T>(round_to<T>(x.a * scale) * weight.a), round_to<T>(round_to<T>(x.b * scale) * weight.b)};
}

template <typename T>
__device__ inline HeadPair normed(const HeadPair& x, float scale, const HeadPair& weight) {
    return {normed<T>(x.low, scale, weight.low), normed<T>(x.high, scale, weight.high)};
}

struct Angles {
    HeadPair cos, sin;
};

// A position outside the tables must not pass for a result: it has no numbers.
template <typename T>
__device__ inline Angles load_angles(const RotaryWriteParams& p, int64_t dim, int64_t position, int64_t at,
                                     bool aligned) {
    const HeadPair missing = {{NAN, NAN}, {NAN, NAN}};
    if (position < 0 || position >= p.num_positions) return {missing, missing};
    const int64_t half = dim / 2, row = position * dim;
    return {load_pair(static_cast<const T*>(p.cos) + row, half, at, aligned),
            load_pair(static_cast<const T*>(p.sin) + row, half, at, aligned)};
}

template <typename T>
__device__ inline HeadPair rotated(const HeadPair& x, const Angles& angles) {
    const auto& [cos, sin] = angles;
    return {
        {rotated<T>(x.low.a, cos.low.a, -x.high.a, sin.low.a), rotated<T>(x.low.b, cos.low.b, -x.high.b, sin.low.b)},
        {rotated<T>(x.high.a, cos.high.a, x.low.a, sin.high.a), rotated<T>(x.high.b, cos.high.b, x.low.b, sin.high.b)}};
}

template <typename T>
__device__ inline void copy_head(const T* x, T* y, int64_t dim, bool aligned) {
    for (int64_t at = 2 * (threadIdx.x % kWarp); at < dim; at += kRotateStep)
        store_two(y + at, load_two(x + at, dim - at, aligned), dim - at, aligned);
}

template <typename T>
__device__ inline void rotate_head(const RotaryWriteParams& p, const T* x, T* y, const T* norm, int64_t position,
                                   bool aligned) {
    if (p.cos == nullptr && norm == nullptr) return copy_head(x, y, p.key_dim, aligned);
    const int64_t half = p.key_dim / 2, first = 2 * (threadIdx.x % kWarp);
    float scale = 1.0f;
    if (norm != nullptr) {
        float squares = 0.0f;
        for (int64_t at = first; at < half; at += kRotateStep)
            squares = add_squares(load_pair(x, half, at, aligned), squares);
        scale = norm_scale(squares, p.key_dim, p.eps);
    }
    for (int64_t at = first; at < half; at += kRotateStep) {
        HeadPair pair = load_pair(x, half, at, aligned);
        if (norm != nullptr) pair = normed<T>(pair, scale, load_pair(norm, half, at, aligned));
        if (p.cos != nullptr) pair = rotated<T>(pair, load_angles<T>(p, p.key_dim, position, at, aligned));
        store_two(y + at, pair.low, half - at, aligned);
        store_two(y + half + at, pair.high, half - at, aligned);
    }
}

template <typename T>
__device__ inline const T* head_of(const Heads& heads, int64_t token, int64_t head) {
    return static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

// Where a head of the token at `slot` lies in a pool; none where the slot is outside it. `by_block` divides by the
// block size.
template <typename T>
__device__ inline T* place_of(const RotaryWriteParams& p, const Divider& by_block, void* pool, int64_t heads,
                              int64_t slot, int64_t head, int64_t dim) {
    if (slot < 0 || slot >= p.num_blocks * p.block_size) return nullptr;
    const int64_t block = slot <= INT32_MAX ? by_block(static_cast<int>(slot)) : slot / p.block_size;
    const int64_t offset = slot - block * p.block_size;
    return static_cast<T*>(pool) + ((block * heads + head) * p.block_size + offset) * dim;
}

// Whether two elements may be moved at a time.
template <typename T>
bool in_twos(const RotaryWriteParams& p) {
    bool even =
        p.key_dim % 4 == 0 && p.value_dim % 2 == 0 && p.q_out_token_stride % 2 == 0 && p.q_out_head_stride % 2 == 0;
    for (const Heads* heads : {&p.q, &p.k, &p.v})
        even = even && heads->token_stride % 2 == 0 && heads->head_stride % 2 == 0;
    for (const void* data :
         {p.q.data, p.k.data, p.v.data, p.q_norm, p.k_norm, p.cos, p.sin, static_cast<const void*>(p.q_out),
          static_cast<const void*>(p.k_pool), static_cast<const void*>(p.v_pool)}) {
        even = even && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
    }
    return even;
}

}  // namespace tide::cuda
