// The input of an exit head: the normed state next to the normed deep state, plus what the distance between them
// adds. A narrow head's deep state has fewer columns than its state. A CTA for each part of a row.
#include "cuda/common/launch.h"
#include "cuda/small/norm_row.cuh"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

constexpr int64_t kNone = -1;

// The row of `deep` that token `row` is fed with, kNone for zeros; past the end there is no number.
__device__ int64_t deep_row(const ExitInputParams& p, int64_t row, int64_t distance) {
    const int64_t slot = distance > 0 ? p.deep_slots[row] : kNone;
    return slot < 0 ? kNone : slot;
}

template <typename T>
__global__ void __launch_bounds__(kMaxNormThreads, 1) exit_input_kernel(ExitInputParams p, bool aligned) {
    __shared__ float sums[kMaxNormThreads / kWarp];
    let_next_start();
    wait_for_previous();
    const int64_t parts = 2 * p.rows, joined = p.width + p.deep_width;
    for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
        const int64_t row = part / 2;
        const bool deep = part % 2 != 0;
        const int64_t start = deep ? p.width : 0, width = deep ? p.deep_width : p.width;
        const int64_t distance = p.distances[row];
        const int64_t from = deep ? deep_row(p, row, distance) : row;
        const bool known = !deep || from < p.num_deep;
        const T* x = deep ? static_cast<const T*>(p.deep) + from * p.deep_stride
                          : static_cast<const T*>(p.states) + from * p.states_stride;
        const T* weight = static_cast<const T*>(deep ? p.deep_norm : p.state_norm);
        const int64_t table_row = distance < 0 ? 0 : distance < p.max_distance ? distance : p.max_distance;
        const T* added = static_cast<const T*>(p.table) + table_row * joined + start;
        T* y = static_cast<T*>(p.y) + row * p.y_stride + start;
        const bool read = from >= 0 && known;
        const float missing = known ? 0.0f : NAN;
        const float factor = read ? row_norm_factor(x, width, aligned, p.eps, sums) : 1.0f;
        for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack) {
            const int64_t left = width - at;
            Pack pack = load_pack(x + at, read ? left : 0, aligned, missing);
            const Pack weights = load_pack(weight + at, left, aligned), terms = load_pack(added + at, left, aligned);
#pragma unroll
            for (int i = 0; i < kPack; ++i) {
                const float normed = round_to<T>(round_to<T>(pack.at[i] * factor) * weights.at[i]);
                pack.at[i] = __fadd_rn(normed, terms.at[i]);  // not joined with the product, also in float32
            }
            store_pack(y + at, pack, left, aligned);
        }
        __syncthreads();  // before the next row's sums
    }
}

}  // namespace

void exit_input(DType dtype, const ExitInputParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    with_storage("exit_input", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        constexpr int64_t kSize = sizeof(T);
        // The second part of a row begins `width` further on, the next row of the table `deep_width` after that.
        const bool aligned = is_aligned(p.states, p.states_stride, kSize) && is_aligned(p.deep, p.deep_stride, kSize) &&
                             is_aligned(p.state_norm, 0, kSize) && is_aligned(p.deep_norm, 0, kSize) &&
                             is_aligned(p.table, p.width, kSize) && is_aligned(p.table, p.deep_width, kSize) &&
                             is_aligned(p.y, p.y_stride, kSize);
        launch("exit_input", exit_input_kernel<T>,
               LaunchShape{grid_of(2 * p.rows), norm_threads(p.width), 0, 1, Effect::kNone}, stream, p, aligned);
    });
}

}  // namespace tide::cuda
