#include <algorithm>

#include "ops/checks.h"
#include "ops/isa.h"
#include "ops/ops.h"
#include "ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kElementsPerPiece = 32 * 1024;  // about 10 us of work

}  // namespace

void rotary(DType dtype, const RotaryParams& params, int64_t num_tokens) {
    const int index = dtype_index(dtype);
    require(num_tokens >= 0 && params.num_heads >= 0, "rotary: sizes must not be negative");
    require(params.dim >= 0 && params.dim % 2 == 0, "rotary: the head size must be even");
    const int64_t grain = std::max<int64_t>(1, kElementsPerPiece / std::max<int64_t>(1, params.num_heads * params.dim));
    parallel_for(num_tokens, grain, [&](int64_t first, int64_t last) { kernels().rotary[index](params, first, last); });
}

}  // namespace tide
