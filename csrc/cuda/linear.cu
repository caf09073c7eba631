// Which kernel and which tile a linear gets. The kernel depends on dtype, width and alignment, never on the rows.
#include <algorithm>

#include "cuda/linear_plain.cuh"
#include "cuda/linear_tiles.h"
#include "cuda/ops.h"
#include "cuda/tensor_core.cuh"

namespace tide::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Can x and weight be read `vector` elements at a time?
bool can_read(const LinearParams& p, int64_t vector, int64_t element_bytes) {
    return p.in_features % vector == 0 && p.x_stride % vector == 0 && is_aligned(p.x, vector * element_bytes) &&
           is_aligned(p.weight, vector * element_bytes);
}

// Microseconds that a tile should take, from what it asks of memory, of the second-level cache (x comes from there once
// per CTA) and of the busiest multiprocessor. Bytes per microsecond as measured on the H200.
double tile_cost(const LinearTile& tile, int64_t row_tiles, int64_t rows, int64_t in_features, int num_sms) {
    constexpr double kMemoryRate = 4.1e6, kCacheRate = 6.0e6, kSmRate = 52e3;
    const int64_t ctas = (row_tiles + tile.row_tiles - 1) / tile.row_tiles * tile.cluster;
    const double column_bytes = 2.0 * static_cast<double>(in_features);
    const double cta_bytes = (16.0 * tile.row_tiles + static_cast<double>(rows)) * column_bytes / tile.cluster;
    const double memory = 16.0 * static_cast<double>(row_tiles) * column_bytes / kMemoryRate;
    const double cache = static_cast<double>(ctas) * cta_bytes / kCacheRate;
    const double sm = static_cast<double>((ctas + num_sms - 1) / num_sms) * cta_bytes / kSmRate;
    return std::max({memory, cache, sm});
}

}  // namespace

LinearTile choose_tile(const LinearParams& p, const DeviceInfo& device) {
    const int num_sms = device.num_sms;
    LinearTile best = {1, 1};
    while (best.token_tiles < kMaxTokenTiles && best.token_tiles * 8 < p.rows) best.token_tiles *= 2;
    const int64_t tile_columns = p.gated ? 8 : 16;
    const int64_t row_tiles = (p.out_features + tile_columns - 1) / tile_columns;
    // Little work is a matter of latency: as many CTAs as there can be.
    constexpr int64_t kLittleBytesPerSm = 64 * 1024;
    if (row_tiles * 16 * p.in_features * 2 < num_sms * kLittleBytesPerSm) return best;
    const int64_t rows = std::min<int64_t>(p.rows, best.token_tiles * 8);
    const auto cost = [&](const LinearTile& tile) { return tile_cost(tile, row_tiles, rows, p.in_features, num_sms); };
    constexpr double kClearlyBetter = 0.97;
    const int most = best.token_tiles == 1 ? 2 : best.token_tiles == kMaxTokenTiles ? 3 : 4;
    best.row_tiles = 2;
    for (const int row_tiles_here : {1, 3, 4}) {
        const LinearTile tile = {row_tiles_here, best.token_tiles};
        if (row_tiles_here <= most && cost(tile) < kClearlyBetter * cost(best)) best = tile;
    }
    return best;
}

void linear(DType dtype, const LinearParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    const int64_t bytes = element_size(dtype);
    const DeviceInfo device = current_device("linear");
    const bool tiles = dtype != DType::kFloat32 && device.major >= kTensorCoreMajor && can_read(params, kVector, bytes);
    if (!tiles) {
        const bool aligned = can_read(params, kPlainVector, bytes);
        return with_storage("linear", dtype, [&](auto storage) {
            launch_linear_plain<typename decltype(storage)::Type>(params, aligned, stream);
        });
    }
    const LinearTile tile = choose_tile(params, device);
    if (dtype == DType::kFloat16) return launch_linear_tiles<__half>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16>(params, tile, stream);
}

}  // namespace tide::cuda
