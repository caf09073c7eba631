#include <algorithm>

#include "ops/checks.h"
#include "ops/isa.h"
#include "ops/ops.h"
#include "ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kElementsPerPiece = 32 * 1024;  // about 10 us of work

}  // namespace

void rms_norm(DType dtype, const void* x, const void* weight, void* y, int64_t rows, int64_t width, float eps) {
    const int index = dtype_index(dtype);
    require(rows >= 0 && width >= 0, "rms_norm: sizes must not be negative");
    if (rows == 0 || width == 0) return;
    const RmsNormParams params = {x, weight, y, width, eps};
    const int64_t grain = std::max<int64_t>(1, kElementsPerPiece / width);
    parallel_for(rows, grain, [&](int64_t first, int64_t last) { kernels().rms_norm[index](params, first, last); });
}

}  // namespace tide
