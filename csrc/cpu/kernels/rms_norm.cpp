// Hugging Face LlamaRMSNorm: float32 inside, rounded to the storage type, then times the weight.
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/simd.h"

namespace tide::TIDE_ISA {
namespace {

template <typename T>
float sum_of_squares(const T* x, int64_t width) {
    Vec sums[4] = {};  // four chains, so that additions do not wait for one another
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
        for (int chain = 0; chain < 4; ++chain) {
            const Vec v = load(x + i + chain * kLanes);
            sums[chain] = multiply_add(v, v, sums[chain]);
        }
    }
    for (; i < width; i += kLanes) {
        const Vec v = i + kLanes <= width ? load(x + i) : load_partial(x + i, width - i);
        sums[0] = multiply_add(v, v, sums[0]);
    }
    return lane_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void norm_row(const T* x, const T* weight, T* y, int64_t width, float eps) {
    const float mean = sum_of_squares(x, width) / static_cast<float>(width);
    const Vec scale = splat(1.0f / __builtin_sqrtf(mean + eps));
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(y + i, round_to<T>(load(x + i) * scale) * load(weight + i));
    if (i < width) {
        const int64_t rest = width - i;
        const Vec normed = round_to<T>(load_partial(x + i, rest) * scale);
        store_partial(y + i, normed * load_partial(weight + i, rest), rest);
    }
}

}  // namespace

template <typename T>
void rms_norm(const RmsNormParams& params, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t offset = row * params.width;
        norm_row(static_cast<const T*>(params.x) + offset, static_cast<const T*>(params.weight),
                 static_cast<T*>(params.y) + offset, params.width, params.eps);
    }
}

#define TIDE_INSTANTIATE(T) template void rms_norm<T>(const RmsNormParams&, int64_t, int64_t);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
