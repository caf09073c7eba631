// The gate of an MLP: y = silu(gate) * up, float32 inside; silu is rounded to the storage type first, as Torch does.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vector_math.h"

namespace tide::TIDE_ISA {
namespace {

TIDE_INLINE Vec silu(Vec x) {
    return x / (1.0f + vector_exp(-x));
}

}  // namespace

template <typename T>
void silu_mul(const SiluMulParams& params, int64_t first, int64_t last) {
    const T* gate = static_cast<const T*>(params.gate);
    const T* up = static_cast<const T*>(params.up);
    T* y = static_cast<T*>(params.y);
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) store(y + i, round_to<T>(silu(load(gate + i))) * load(up + i));
    if (i < last) {
        const int64_t rest = last - i;
        const Vec gated = round_to<T>(silu(load_partial(gate + i, rest)));
        store_partial(y + i, gated * load_partial(up + i, rest), rest);
    }
}

#define TIDE_INSTANTIATE(T) template void silu_mul<T>(const SiluMulParams&, int64_t, int64_t);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
