// How the chunks of a lane become its result: in order, eight at a time, whoever does it.
#pragma once

#include "cuda/attention_work.cuh"
#include "cuda/convert.cuh"

namespace tide::cuda {

// Four dims of a lane whose partial results are row `row` of the workspace. What other CTAs of the same kernel wrote is
// read past the first-level cache.
__device__ inline float4 combine_chunks(const PagedAttentionParams& p, const Partials& from, int64_t row, int first,
                                        int last, int dim) {
    constexpr int kChunksAtOnce = 8;  // loads in flight
    const float2* stats = from.stats + row * from.chunks;
    const float* sums = from.sums + row * from.chunks * p.head_dim + dim;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float peak = kNothing, total = 0.0f;
    for (int begin = first; begin <= last; begin += kChunksAtOnce) {
        float2 stat[kChunksAtOnce];
        float4 v[kChunksAtOnce];
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) {
            stat[i] = make_float2(kNothing, 0.0f);
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (begin + i <= last) {
                stat[i] = __ldcg(stats + begin + i);
                v[i] = __ldcg(reinterpret_cast<const float4*>(sums + (begin + i) * p.head_dim));
            }
        }
        float highest = peak;
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) highest = fmaxf(highest, stat[i].x);
        const float base = base_of(highest), shrink = exp2_fast(peak - base);
        peak = highest;
        total *= shrink;
        sum = make_float4(sum.x * shrink, sum.y * shrink, sum.z * shrink, sum.w * shrink);
#pragma unroll
        for (int i = 0; i < kChunksAtOnce; ++i) {
            const float factor = exp2_fast(stat[i].x - base);
            total = fmaf(stat[i].y, factor, total);
            sum.x = fmaf(v[i].x, factor, sum.x);
            sum.y = fmaf(v[i].y, factor, sum.y);
            sum.z = fmaf(v[i].z, factor, sum.z);
            sum.w = fmaf(v[i].w, factor, sum.w);
        }
    }
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    return make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
}

template <typename T>
__device__ inline void store_four(T* to, const float4& v) {
    struct alignas(4 * sizeof(T)) Vector {
        T v[4];
    };
    *reinterpret_cast<Vector*>(to) = {from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z), from_float<T>(v.w)};
}

}  // namespace tide::cuda
