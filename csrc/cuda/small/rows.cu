// Copies of whole rows by index. Bytes are moved as they are, in the widest units that the rows allow. A pass begins
// with a gather of its tokens' embeddings, which publishes what was written before if nothing else has.
#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/small/ops.h"

namespace tide::cuda {
namespace {

constexpr int kRowsThreads = 256;

template <typename Unit>
__device__ Unit not_a_number() {
    return static_cast<Unit>(~Unit{0});  // all bits set is a NaN in every storage type
}

template <>
__device__ uint4 not_a_number<uint4>() {
    return {~0u, ~0u, ~0u, ~0u};
}

// Width and strides in units; a CTA takes up to `kRowsThreads` units of a row at a time.
template <typename Unit, bool kScatter>
__global__ void __launch_bounds__(kRowsThreads) rows_kernel(RowsParams p, int64_t tiles_per_row, bool publishes) {
    if (!publishes) let_next_start();
    wait_for_previous();
    if (publishes) let_next_start();
    const int64_t tiles = p.rows * tiles_per_row;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int64_t row = tile / tiles_per_row, at = (tile - row * tiles_per_row) * kRowsThreads + threadIdx.x;
        const int64_t other = p.index[row];
        const bool known = other >= 0 && other < p.limit;
        if (at >= p.width || (kScatter && !known)) continue;
        const int64_t from = kScatter ? row : other, to = kScatter ? other : row;
        const Unit* x = static_cast<const Unit*>(p.x) + from * p.x_stride + at;
        static_cast<Unit*>(p.y)[to * p.y_stride + at] = known ? *x : not_a_number<Unit>();
    }
}

template <typename Unit, bool kScatter>
void launch_rows(RowsParams p, int64_t row_bytes, int64_t x_bytes, int64_t y_bytes, cudaStream_t stream) {
    constexpr int64_t kUnit = sizeof(Unit);
    p.width = row_bytes / kUnit;
    p.x_stride = x_bytes / kUnit;
    p.y_stride = y_bytes / kUnit;
    const int64_t tiles_per_row = (p.width + kRowsThreads - 1) / kRowsThreads;
    const bool publishes = !kScatter && !StreamHistory::is_published(stream);
    const Effect effect = kScatter ? Effect::kWrites : publishes ? Effect::kPublishes : Effect::kNone;
    launch(kScatter ? "scatter_rows" : "embed", rows_kernel<Unit, kScatter>,
           LaunchShape{grid_of(p.rows * tiles_per_row), kRowsThreads, 0, 1, effect}, stream, p, tiles_per_row,
           publishes);
}

template <bool kScatter>
void copy_rows(DType dtype, const RowsParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    const int64_t size = element_size(dtype), row = p.width * size, x = p.x_stride * size, y = p.y_stride * size;
    const uint64_t common = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.y) | row | x | y;
    if (common % 16 == 0) {
        launch_rows<uint4, kScatter>(p, row, x, y, stream);
    } else if (common % 4 == 0) {
        launch_rows<uint32_t, kScatter>(p, row, x, y, stream);
    } else {
        launch_rows<uint16_t, kScatter>(p, row, x, y, stream);
    }
}

}  // namespace

void embed(DType dtype, const RowsParams& params, cudaStream_t stream) {
    copy_rows<false>(dtype, params, stream);
}

void scatter_rows(DType dtype, const RowsParams& params, cudaStream_t stream) {
    copy_rows<true>(dtype, params, stream);
}

}  // namespace tide::cuda
