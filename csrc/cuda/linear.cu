// Which kernel and which tile a linear gets. The kernel depends on dtype, width and alignment, never on the rows.
#include "cuda/linear_plain.cuh"
#include "cuda/linear_tiles.h"
#include "cuda/ops.h"
#include "cuda/tensor_core.cuh"

namespace tide::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Can x, weight and norm be read `vector` elements at a time?
bool can_read(const LinearParams& p, int64_t vector, int64_t element_bytes) {
    return p.in_features % vector == 0 && p.x_stride % vector == 0 && is_aligned(p.x, vector * element_bytes) &&
           is_aligned(p.weight, vector * element_bytes) && is_aligned(p.norm, vector * element_bytes);
}

// One CTA of the deep tiles fits a multiprocessor, or two of any other, and there are clusters: sm_90 and its like.
bool is_roomy(const DeviceInfo& device) {
    constexpr int kSharedBytes = 227 * 1024;
    int most_shared = 0;
    check("linear", cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.id));
    return device.major >= 9 && most_shared >= kSharedBytes;
}

// Little work is a matter of latency: the smallest tile with which no multiprocessor has more than two CTAs. The weight
// is then read once for every token tile, which the second-level cache bears.
LinearTile little_tile(int64_t row_tiles, int64_t rows, int64_t num_sms) {
    if (row_tiles > num_sms && rows > 8 && rows <= 16) return {2, 2};
    constexpr LinearTile kBySize[] = {{1, 1}, {2, 1}, {2, 2}};
    for (const LinearTile& tile : kBySize) {
        const int64_t row_blocks = (row_tiles + tile.row_tiles - 1) / tile.row_tiles;
        const int64_t tokens = int64_t{tile.token_tiles} * 8;
        if (row_blocks * ((rows + tokens - 1) / tokens) <= 2 * num_sms) return tile;
    }
    return {2, 4};
}

}  // namespace

// As measured on the H200, by how often the row tiles go round the multiprocessors.
LinearTile choose_tile(const LinearParams& p, const DeviceInfo& device) {
    const int64_t tile_columns = p.gated ? 8 : 16, num_sms = device.num_sms;
    const int64_t row_tiles = (p.out_features + tile_columns - 1) / tile_columns;
    const auto ctas = [&](int per_cta) { return (row_tiles + per_cta - 1) / per_cta; };
    constexpr int64_t kLittleBytesPerSm = 64 * 1024;
    if (row_tiles * 16 * p.in_features * 2 < num_sms * kLittleBytesPerSm)
        return little_tile(row_tiles, p.rows, num_sms);
    int tokens = 1;
    while (tokens < kMaxTokenTiles && tokens * 8 < p.rows) tokens *= 2;
    constexpr int64_t kLongRow = 8192;
    const bool roomy = is_roomy(device), many = row_tiles > 4 * num_sms;
    const bool pairs_fit = roomy && 2 * ctas(4) <= num_sms;  // clusters of two, all at the same time
    switch (tokens) {
        case 1:
            // x through shared memory pays when it is read often.
            if (roomy && many && p.rows > 4 && p.in_features >= 2048) return {4, 1, 1, true};
            return {2, 1};
        case 2:
            if (pairs_fit && p.in_features >= kLongRow) return {4, 2, 2, true, true};
            return {row_tiles <= 2 * num_sms ? 1 : many ? 4 : 2, 2};
        case 4:
            if (pairs_fit) return {4, 4, 2, true, true};
            if (roomy && ctas(3) <= num_sms) return {3, 4, 1, true, true};
            return {many && !p.norm ? 4 : 2, 4};  // a norm wants registers, here and below
        default:
            if (roomy && row_tiles <= 2 * num_sms) return {4, 8, 2};
            if (roomy && ctas(3) <= num_sms) return {3, 8, 1, true, true};
            return {2, 8};
    }
}

void linear(DType dtype, const LinearParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    if (params.norm && dtype == DType::kFloat16) throw std::runtime_error("linear: float16 has no norm");
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
    if (dtype == DType::kFloat16) return launch_linear_tiles<__half, false>(params, tile, stream);
    if (params.norm) return launch_linear_tiles<__nv_bfloat16, true>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16, false>(params, tile, stream);
}

}  // namespace tide::cuda
