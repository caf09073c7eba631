// Norm, gate, rotary positions and page writes: rows or tokens are shared out to threads.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

// About 10 us of work.
constexpr int64_t kElementsPerPiece = 32 * 1024, kGatedPerPiece = 4 * 1024, kBytesPerPiece = 128 * 1024;

// Copies the heads of one token into its slot of every head's page.
void write_token(const char* from, int64_t head_stride, char* pool, int64_t slot, int64_t num_heads, int64_t block_size,
                 int64_t row_bytes) {
    const int64_t block = slot / block_size;
    const int64_t offset = slot % block_size;
    for (int64_t head = 0; head < num_heads; ++head) {
        char* to = pool + ((block * num_heads + head) * block_size + offset) * row_bytes;
        std::memcpy(to, from + head * head_stride, row_bytes);
    }
}

}  // namespace

void rms_norm(DType dtype, const void* x, const void* weight, void* y, int64_t rows, int64_t width, float eps) {
    const int index = dtype_index(dtype);
    require(rows >= 0 && width >= 0, "rms_norm: sizes must not be negative");
    if (rows == 0 || width == 0) return;
    const RmsNormParams params = {x, weight, y, width, eps};
    const int64_t grain = std::max<int64_t>(1, kElementsPerPiece / width);
    parallel_for(rows, grain, [&](int64_t first, int64_t last) { kernels().rms_norm[index](params, first, last); });
}

void silu_mul(DType dtype, const void* gate, const void* up, void* y, int64_t count) {
    const int index = dtype_index(dtype);
    require(count >= 0, "silu_mul: the count must not be negative");
    const SiluMulParams params = {gate, up, y};
    parallel_for(count, kGatedPerPiece,
                 [&](int64_t first, int64_t last) { kernels().silu_mul[index](params, first, last); });
}

void rotary(DType dtype, const RotaryParams& params, int64_t num_tokens) {
    const int index = dtype_index(dtype);
    require(num_tokens >= 0 && params.num_heads >= 0, "rotary: sizes must not be negative");
    require(params.dim >= 0 && params.dim % 2 == 0, "rotary: the head size must be even");
    const int64_t grain = std::max<int64_t>(1, kElementsPerPiece / std::max<int64_t>(1, params.num_heads * params.dim));
    parallel_for(num_tokens, grain, [&](int64_t first, int64_t last) { kernels().rotary[index](params, first, last); });
}

void write_kv(DType dtype, const WriteKvParams& p) {
    dtype_index(dtype);
    require(p.num_tokens >= 0 && p.num_kv_heads >= 0 && p.key_dim >= 0 && p.value_dim >= 0 && p.num_blocks >= 0,
            "write_kv: sizes must not be negative");
    require(p.block_size > 0, "write_kv: block_size must be positive");
    const int64_t num_slots = p.num_blocks * p.block_size;
    for (int64_t t = 0; t < p.num_tokens; ++t) {
        if (p.slots[t] >= num_slots) {
            throw std::out_of_range("slots[" + std::to_string(t) + "]: got " + std::to_string(p.slots[t]) +
                                    ", expected less than the pool's " + std::to_string(num_slots) + " slots");
        }
    }
    const int64_t bytes = element_size(dtype);
    const int64_t token_bytes = p.num_kv_heads * (p.key_dim + p.value_dim) * bytes;
    const int64_t grain = std::max<int64_t>(1, kBytesPerPiece / std::max<int64_t>(1, token_bytes));
    parallel_for(p.num_tokens, grain, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
            const int64_t slot = p.slots[t];
            if (slot < 0) continue;
            write_token(static_cast<const char*>(p.k) + t * p.k_token_stride * bytes, p.k_head_stride * bytes,
                        static_cast<char*>(p.k_pool), slot, p.num_kv_heads, p.block_size, p.key_dim * bytes);
            write_token(static_cast<const char*>(p.v) + t * p.v_token_stride * bytes, p.v_head_stride * bytes,
                        static_cast<char*>(p.v_pool), slot, p.num_kv_heads, p.block_size, p.value_dim * bytes);
        }
    });
}

}  // namespace tide
