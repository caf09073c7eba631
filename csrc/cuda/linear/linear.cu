// Which kernel and which tile a linear gets. Plain or tensor cores: that depends on dtype, width and alignment, never
// on the rows. Of the kernels for tensor cores each gives the same bits.
#include "cuda/linear/plain.cuh"
#include "cuda/linear/tiles.h"
#include "cuda/linear/wide.h"
#include "cuda/linear/linear.h"
#include "cuda/common/ptx/tensor_core.cuh"

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

// Any tile that is not deep fits a multiprocessor: not so with the 99 KiB of compute capability 8.6, 8.9 and 12.0,
// where the smallest one takes all rows, eight at a time.
bool has_room(const DeviceInfo& device) {
    constexpr int kSharedBytes = 227 * 1024 / 2;
    return device.shared_bytes >= kSharedBytes;
}

// One CTA of the deep tiles fits a multiprocessor, or two of any other, and there are clusters: sm_90 and its like.
bool is_roomy(const DeviceInfo& device) {
    constexpr int kSharedBytes = 227 * 1024;
    return device.arch >= kClusterArch && device.shared_bytes >= kSharedBytes;
}

// The kernels for many rows are in the build, and run here.
bool has_wide(const DeviceInfo& device) {
    return device.sm90a && is_roomy(device);
}

int64_t count_row_tiles(const LinearParams& p) {
    const int64_t tile_columns = p.gated ? 8 : 16;
    return (p.out_features + tile_columns - 1) / tile_columns;
}

bool is_little(const LinearParams& p, const DeviceInfo& device) {
    constexpr int64_t kLittleBytesPerSm = 64 * 1024;
    return count_row_tiles(p) * 16 * p.in_features * 2 < device.num_sms * kLittleBytesPerSm;
}

// Little work is a matter of latency: the smallest tile with which no multiprocessor has more than two CTAs. The weight
// is then read once for every token tile, which the second-level cache bears. Where there are several token tiles, and
// a slice is long or outputs are few, two row tiles share an x.
LinearTile little_tile(int64_t row_tiles, int64_t rows, int64_t in_features, int64_t num_sms) {
    constexpr LinearTile kBySize[] = {{1, 1}, {2, 1}, {2, 2}};
    constexpr int64_t kLongForLittle = 1024, kFewRowTiles = 48;
    for (const LinearTile& tile : kBySize) {
        const int64_t row_blocks = (row_tiles + tile.row_tiles - 1) / tile.row_tiles;
        const int64_t tokens = int64_t{tile.token_tiles} * 8;
        const int64_t ctas = row_blocks * ((rows + tokens - 1) / tokens);
        const bool shares = in_features >= kLongForLittle || (row_tiles > 1 && row_tiles <= kFewRowTiles);
        const bool larger_is_better = tile.row_tiles == 1 && rows > 8 && shares;
        if (ctas <= 2 * num_sms && !larger_is_better) return tile;
    }
    return {2, 4};
}

// More tiles of the weight than multiprocessors, and an x that fits beside them: CTAs stay (linear_wide_stay.cuh).
bool stays(const LinearParams& p, int tokens, const DeviceInfo& device) {
    return !p.gated && p.out_features > device.num_sms * 128 && count_stages(p.in_features, tokens) >= kFewestStages;
}

}  // namespace

// As measured on the H200, by how often the row tiles go round the multiprocessors.
LinearTile choose_tile(const LinearParams& p, const DeviceInfo& device) {
    const int64_t row_tiles = count_row_tiles(p), num_sms = device.num_sms;
    if (!has_room(device)) return {1, 1};
    const auto ctas = [&](int per_cta) { return (row_tiles + per_cta - 1) / per_cta; };
    if (is_little(p, device)) return little_tile(row_tiles, p.rows, p.in_features, num_sms);
    int tokens = 1;
    while (tokens < kMaxTokenTiles && tokens * 8 < p.rows) tokens *= 2;
    constexpr int64_t kLongRow = 8192;
    const bool roomy = is_roomy(device), many = row_tiles > 4 * num_sms;
    const bool pairs_fit = roomy && 2 * ctas(4) <= num_sms;  // clusters of two, all at the same time
    switch (tokens) {
        case 1:
            // x through shared memory pays when it is read often.
            if (roomy && p.rows > 4 && p.in_features >= 2048) {
                if (many) return {4, 1, 1, true};
                if (row_tiles > 2 * num_sms && !p.norm) return {2, 1, 1, true};
            }
            return {2, 1};
        case 2:
            if (pairs_fit && p.in_features >= kLongRow) return {4, 2, 2, true, true};
            if (row_tiles <= 2 * num_sms) return {1, 2};
            if (roomy && ctas(3) <= num_sms && !p.norm) return {3, 2, 1, true, true};
            return {many ? 4 : 2, 2};
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

bool takes_wide(const LinearParams& p, const DeviceInfo& device) {
    return has_wide(device) && !p.norm && !(p.gated && p.out_features % 8);
}

bool fast_for_many_rows() {
    return has_wide(current_device("linear"));
}

// An LM head of 8 rows took longer than one of 32 in profiles of whole steps on the H200: from a few rows on it goes
// the way of many. Alone both ways take the same up to 8 rows; from 10 on this one is quicker (`cuda_bench head`).
bool is_wide(const LinearParams& p, const DeviceInfo& device) {
    constexpr int64_t kMostTileRows = 16, kMostLittleRows = 256, kMostRowsOfTall = 4, kTallPerSm = 512;
    constexpr int64_t kMostTileRowsOfStaying = 8;
    int64_t most = stays(p, 32, device) ? kMostTileRowsOfStaying : kMostTileRows;
    if (is_little(p, device)) most = kMostLittleRows;
    if (p.out_features >= device.num_sms * kTallPerSm) most = kMostRowsOfTall;
    return p.rows > most && takes_wide(p, device);
}

// As measured on the H200: few tokens a CTA, and the slices split, while each CTA has a multiprocessor.
WideTile choose_wide_tile(const LinearParams& p, const DeviceInfo& device) {
    const int64_t weight_rows = p.gated ? 2 * p.out_features : p.out_features;
    const auto fits = [&](const WideTile& tile) {
        const int64_t rows = tile.groups * 64, row_blocks = (weight_rows + rows - 1) / rows;
        const int64_t token_blocks = (p.rows + tile.tokens - 1) / tile.tokens;
        return row_blocks * token_blocks * tile.split <= device.num_sms;
    };
    const int few = p.rows <= 32 ? 32 : 64;
    if (p.rows <= 64 && fits({1, few, 2})) return {1, few, 2};
    if (fits({2, few, 2})) return {2, few, 2};
    const bool wasteful = p.rows > 128 && p.rows <= 192;  // 128 tokens a CTA: the second would have few
    if (p.rows <= 64 && stays(p, few, device)) return {2, few, 1, true};
    if (p.rows <= 64 || wasteful || fits({2, 64, 1})) return {2, few, 1};
    return {2, 128, 1};
}

void linear(DType dtype, const LinearParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    if (params.norm && dtype == DType::kFloat16) throw std::runtime_error("linear: float16 has no norm");
    const int64_t bytes = element_size(dtype);
    const DeviceInfo device = current_device("linear");
    const bool tiles = dtype != DType::kFloat32 && device.arch >= kTensorCoreArch && can_read(params, kVector, bytes);
    if (!tiles) {
        const bool aligned = can_read(params, kPlainVector, bytes);
        return with_storage("linear", dtype, [&](auto storage) {
            launch_linear_plain<typename decltype(storage)::Type>(params, aligned, stream);
        });
    }
    if (is_wide(params, device)) {
        const WideTile tile = choose_wide_tile(params, device);
        if (dtype == DType::kFloat16) return launch_linear_wide<__half>(params, tile, stream);
        return launch_linear_wide<__nv_bfloat16>(params, tile, stream);
    }
    const LinearTile tile = choose_tile(params, device);
    if (dtype == DType::kFloat16) return launch_linear_tiles<__half, false>(params, tile, stream);
    if (params.norm) return launch_linear_tiles<__nv_bfloat16, true>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16, false>(params, tile, stream);
}

}  // namespace tide::cuda
