// Norm, rotary positions and page writes of the projections of one attention layer. A warp for each head of a token:
// lane l holds elements 2l, 2l + 1, then those 64 further on, of both halves of the head. Every product and sum is
// rounded to the storage type, as the plain ops round theirs; so nothing may be fused.
#include "cuda/block.cuh"
#include "cuda/launch.h"
#include "cuda/pack.cuh"
#include "cuda/small_ops.h"

namespace tide::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int64_t kStep = 2 * kWarp;

struct Two {
    float a, b;
};

template <typename T>
struct alignas(2 * sizeof(T)) RawTwo {
    T a, b;
};

template <typename T>
__device__ Two load_two(const T* from, int64_t count, bool aligned) {
    if (aligned && count >= 2) {
        const RawTwo<T> raw = *reinterpret_cast<const RawTwo<T>*>(from);
        return {to_float(raw.a), to_float(raw.b)};
    }
    return {to_float(from[0]), count >= 2 ? to_float(from[1]) : 0.0f};
}

template <typename T>
__device__ void store_two(T* to, Two value, int64_t count, bool aligned) {
    if (aligned && count >= 2) {
        *reinterpret_cast<RawTwo<T>*>(to) = {from_float<T>(value.a), from_float<T>(value.b)};
    } else {
        to[0] = from_float<T>(value.a);
        if (count >= 2) to[1] = from_float<T>(value.b);
    }
}

// a * b + c * d with every step rounded
template <typename T>
__device__ float turned(float a, float b, float c, float d) {
    return round_to<T>(__fadd_rn(round_to<T>(__fmul_rn(a, b)), round_to<T>(__fmul_rn(c, d))));
}

template <typename T>
__device__ Two normed(Two x, float scale, Two weight) {
    return {round_to<T>(round_to<T>(x.a * scale) * weight.a), round_to<T>(round_to<T>(x.b * scale) * weight.b)};
}

template <typename T>
__device__ float norm_scale(const T* x, int64_t half, float eps, bool aligned) {
    float squares = 0.0f;
    for (int64_t at = 2 * (threadIdx.x % kWarp); at < half; at += kStep) {
        const Two low = load_two(x + at, half - at, aligned), high = load_two(x + half + at, half - at, aligned);
        squares = fmaf(low.b, low.b, fmaf(low.a, low.a, squares));
        squares = fmaf(high.b, high.b, fmaf(high.a, high.a, squares));
    }
    return rsqrtf(warp_sum(squares) / static_cast<float>(2 * half) + eps);
}

template <typename T>
__device__ void copy_head(const T* x, T* y, int64_t dim, bool aligned) {
    for (int64_t at = 2 * (threadIdx.x % kWarp); at < dim; at += kStep) {
        store_two(y + at, load_two(x + at, dim - at, aligned), dim - at, aligned);
    }
}

template <typename T>
__device__ void turn_head(const RotaryWriteParams& p, const T* x, T* y, const T* norm, int64_t position, bool aligned) {
    if (p.cos == nullptr && norm == nullptr) return copy_head(x, y, p.key_dim, aligned);
    const int64_t half = p.key_dim / 2;
    const bool turns = p.cos != nullptr, known = position >= 0 && position < p.num_positions;
    const T* cos = static_cast<const T*>(p.cos) + position * p.key_dim;
    const T* sin = static_cast<const T*>(p.sin) + position * p.key_dim;
    const float scale = norm == nullptr ? 1.0f : norm_scale(x, half, p.eps, aligned);
    for (int64_t at = 2 * (threadIdx.x % kWarp); at < half; at += kStep) {
        const int64_t count = half - at;
        Two low = load_two(x + at, count, aligned), high = load_two(x + half + at, count, aligned);
        if (norm != nullptr) {
            low = normed<T>(low, scale, load_two(norm + at, count, aligned));
            high = normed<T>(high, scale, load_two(norm + half + at, count, aligned));
        }
        if (turns) {
            const Two missing = {NAN, NAN};  // a position outside the tables must not pass for a result
            const Two cos_low = known ? load_two(cos + at, count, aligned) : missing;
            const Two sin_low = known ? load_two(sin + at, count, aligned) : missing;
            const Two cos_high = known ? load_two(cos + half + at, count, aligned) : missing;
            const Two sin_high = known ? load_two(sin + half + at, count, aligned) : missing;
            const Two before = low;
            low = {turned<T>(low.a, cos_low.a, -high.a, sin_low.a), turned<T>(low.b, cos_low.b, -high.b, sin_low.b)};
            high = {turned<T>(high.a, cos_high.a, before.a, sin_high.a),
                    turned<T>(high.b, cos_high.b, before.b, sin_high.b)};
        }
        store_two(y + at, low, count, aligned);
        store_two(y + half + at, high, count, aligned);
    }
}

template <typename T>
__device__ const T* head_of(const Heads& heads, int64_t token, int64_t head) {
    return static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
}

// Where a head of the token at `slot` lies in a pool.
template <typename T>
__device__ T* place(void* pool, int64_t slot, int64_t heads, int64_t head, int64_t block_size, int64_t dim) {
    const int64_t block = slot / block_size, offset = slot - block * block_size;
    return static_cast<T*>(pool) + ((block * heads + head) * block_size + offset) * dim;
}

template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp) rotary_write_kernel(RotaryWriteParams p, bool aligned) {
    let_next_start();
    wait_for_previous();
    const int64_t heads = p.q.heads + p.k.heads + p.v.heads;
    const int64_t tasks = count_rows(p.num_rows, p.rows) * heads;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    for (int64_t task = first; task < tasks; task += static_cast<int64_t>(gridDim.x) * kWarps) {
        const int64_t token = task / heads, head = task - token * heads;
        const int64_t position = p.positions == nullptr ? token : p.positions[token];
        if (head < p.q.heads) {
            T* y = static_cast<T*>(p.q_out) + token * p.q_out_token_stride + head * p.q_out_head_stride;
            turn_head(p, head_of<T>(p.q, token, head), y, static_cast<const T*>(p.q_norm), position, aligned);
            continue;
        }
        const int64_t slot = p.slots[token];
        if (slot < 0 || slot >= p.num_blocks * p.block_size) continue;
        const int64_t k_head = head - p.q.heads, v_head = k_head - p.k.heads;
        if (k_head < p.k.heads) {
            T* y = place<T>(p.k_pool, slot, p.k.heads, k_head, p.block_size, p.key_dim);
            turn_head(p, head_of<T>(p.k, token, k_head), y, static_cast<const T*>(p.k_norm), position, aligned);
        } else {
            T* y = place<T>(p.v_pool, slot, p.v.heads, v_head, p.block_size, p.value_dim);
            copy_head(head_of<T>(p.v, token, v_head), y, p.value_dim, aligned);
        }
    }
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

}  // namespace

void rotary_write(DType dtype, const RotaryWriteParams& p, cudaStream_t stream) {
    const int64_t tasks = p.rows * (p.q.heads + p.k.heads + p.v.heads);
    if (tasks == 0) return;
    with_storage("rotary_write", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("rotary_write", rotary_write_kernel<T>,
               LaunchShape{grid_of((tasks + kWarps - 1) / kWarps), kWarps * kWarp}, stream, p, in_twos<T>(p));
    });
}

}  // namespace tide::cuda
