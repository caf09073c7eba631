// What one warp of the tensor-core attention keeps: the 16 rows of a product are lanes (query, head of the group).
//
// scores = Q K^T: thread t of a quad holds dims 8t to 8t + 7 of each 32, of Q and of K alike, so one vector feeds two
// products. out = P V: column g of product j is dim 8g + j, so one vector of V feeds eight products; neighbouring
// positions are paired with a byte permutation.
#pragma once

#include "cuda/attention_layout.cuh"

namespace tide::cuda {

#if TIDE_HAS_TENSOR_CORE_PATH

// One warp's online softmax over its tiles. Index [2 * m + r]: lane 16 m + 8 r + g.
template <typename T, typename Layout>
struct WarpState {
    static constexpr int kDim = Layout::kDim, kLaneTiles = Layout::kLaneTiles;
    float sums[kLaneTiles][Layout::kValueBlocks][8][4] = {};
    float peaks[2 * kLaneTiles];
    float totals[2 * kLaneTiles] = {};  // of this thread's positions only

    __device__ WarpState() {
#pragma unroll
        for (float& peak : peaks) peak = kNothing;
    }

    // `queries` and `tile` are shared addresses. `masked`: some lane does not see all of the 16 positions from
    // `first` on; lanes see the `seen` positions before their `ends`.
    __device__ void see(uint32_t queries, uint32_t tile, const ScoreScale& scale, bool masked, int first,
                        const int (&ends)[2 * kLaneTiles], int seen, int g, int t) {
        float scores[kLaneTiles][2][4] = {};
#pragma unroll(kDim > 128 ? 2 : kDim / 32)  // wide heads have no registers left for addresses
        for (int j = 0; j < kDim / 32; ++j) {
            uint4 key[2];
#pragma unroll
            for (int n = 0; n < 2; ++n)
                key[n] = load_shared(tile + key_offset<Layout::kKeyVectors>(n * 8 + g, j * 4 + t));
#pragma unroll
            for (int m = 0; m < kLaneTiles; ++m) {
                const uint4 low = load_shared(queries + key_offset<Layout::kKeyVectors>(m * 16 + g, j * 4 + t));
                const uint4 high = load_shared(queries + key_offset<Layout::kKeyVectors>(m * 16 + g + 8, j * 4 + t));
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    multiply_tile(scores[m][n], low.x, high.x, low.y, high.y, key[n].x, key[n].y, T{});
#pragma unroll
                for (int n = 0; n < 2; ++n)
                    multiply_tile(scores[m][n], low.z, high.z, low.w, high.w, key[n].z, key[n].w, T{});
            }
        }
        uint32_t weights[kLaneTiles][4];
        bool grew = false;
        float shrink[2 * kLaneTiles];
#pragma unroll
        for (int m = 0; m < kLaneTiles; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int row = 2 * m + r;
                float v[4];  // positions 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = scale.quick(scores[m][i / 2][r * 2 + i % 2]);
                if (masked) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int position = first + i / 2 * 8 + t * 2 + i % 2;
                        if (position >= ends[row] || position < ends[row] - seen) v[i] = kNothing;
                    }
                }
                float peak = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
                peak = fmaxf(peak, peaks[row]);
                const float base = base_of(peak);
                shrink[row] = exp2_fast(peaks[row] - base);
                grew |= peak != peaks[row];
                peaks[row] = peak;
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = exp2_fast(v[i] - base);
                totals[row] = totals[row] * shrink[row] + ((v[0] + v[1]) + (v[2] + v[3]));
                weights[m][r] = pack(v[0], v[1], T{});
                weights[m][2 + r] = pack(v[2], v[3], T{});
            }
        }
        if (__any_sync(~0u, grew)) {  // else all factors are one
#pragma unroll
            for (int m = 0; m < kLaneTiles; ++m) {
#pragma unroll
                for (int b = 0; b < Layout::kValueBlocks; ++b) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) sums[m][b][j][i] *= shrink[2 * m + i / 2];
                    }
                }
            }
        }
#pragma unroll
        for (int b = 0; b < Layout::kValueBlocks; ++b) {
            uint4 value[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                value[i] = load_shared(tile + Layout::kKeyBytes +
                                       value_offset<Layout::kValueVectors>(i / 2 * 8 + t * 2 + i % 2, b * 8 + g));
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint32_t pick = j % 2 ? 0x7632 : 0x5410;  // the high or low halves of two words
                const uint32_t b0 = __byte_perm(word(value[0], j / 2), word(value[1], j / 2), pick);
                const uint32_t b1 = __byte_perm(word(value[2], j / 2), word(value[3], j / 2), pick);
#pragma unroll
                for (int m = 0; m < kLaneTiles; ++m)
                    multiply_tile(sums[m][b][j], weights[m][0], weights[m][1], weights[m][2], weights[m][3], b0, b1,
                                  T{});
            }
        }
    }

    // Sums [lane][dim] and stats [lane] of the 8 * kSumRows lanes from 8 * first_row on, to shared memory.
    __device__ void leave(float* to, float2* stats, int first_row, int num_lanes, int g, int t) {
#pragma unroll
        for (int r = 0; r < Layout::kSumRows; ++r) {
            const int row = first_row + r, lane = r * 8 + g;
            float total = totals[row];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (row * 8 + g >= num_lanes) continue;
            if (t == 0) stats[lane] = make_float2(peaks[row], total);
#pragma unroll
            for (int b = 0; b < Layout::kValueBlocks; ++b) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const auto& from = sums[row / 2][b];
                    const int i = row % 2 * 2 + c;
                    const int dim = b * 64 + t * 16 + c * 8;
                    *reinterpret_cast<float4*>(to + sum_index<Layout::kSumStride>(lane, dim)) =
                        make_float4(from[0][i], from[1][i], from[2][i], from[3][i]);
                    *reinterpret_cast<float4*>(to + sum_index<Layout::kSumStride>(lane, dim + 4)) =
                        make_float4(from[4][i], from[5][i], from[6][i], from[7][i]);
                }
            }
        }
    }

    __device__ static uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};

#endif

}  // namespace tide::cuda
