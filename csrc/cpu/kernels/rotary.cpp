// Rotary positions in halves: out = x * cos + (-x's second half, x's first half) * sin, float32 inside.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd.h"

namespace tide::TIDE_ISA {
namespace {

template <typename T>
TIDE_INLINE void rotate_lanes(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
    const Vec low = load(x), high = load(x + half);
    store(out, multiply_add(-high, load(sin), low * load(cos)));
    store(out + half, multiply_add(low, load(sin + half), high * load(cos + half)));
}

template <typename T>
void rotate_head(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) rotate_lanes(x + i, cos + i, sin + i, out + i, half);
    for (; i < half; ++i) {
        const float low = load_scalar(x + i), high = load_scalar(x + i + half);
        store_scalar(out + i, low * load_scalar(cos + i) - high * load_scalar(sin + i));
        store_scalar(out + i + half, high * load_scalar(cos + i + half) + low * load_scalar(sin + i + half));
    }
}

}  // namespace

template <typename T>
void rotary(const RotaryParams& params, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token) {
        const T* cos = static_cast<const T*>(params.cos) + token * params.dim;
        const T* sin = static_cast<const T*>(params.sin) + token * params.dim;
        for (int64_t head = 0; head < params.num_heads; ++head) {
            const T* x = static_cast<const T*>(params.x) + token * params.token_stride + head * params.head_stride;
            T* out = static_cast<T*>(params.out) + (token * params.num_heads + head) * params.dim;
            rotate_head(x, cos, sin, out, params.dim / 2);
        }
    }
}

#define TIDE_INSTANTIATE(T) template void rotary<T>(const RotaryParams&, int64_t, int64_t);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
