#include "ops/checks.h"
#include "ops/isa.h"
#include "ops/ops.h"
#include "ops/thread_pool.h"

namespace tide {
namespace {

constexpr int64_t kElementsPerPiece = 4 * 1024;  // about 10 us of work

}  // namespace

void silu_mul(DType dtype, const void* gate, const void* up, void* y, int64_t count) {
    const int index = dtype_index(dtype);
    require(count >= 0, "silu_mul: the count must not be negative");
    const SiluMulParams params = {gate, up, y};
    parallel_for(count, kElementsPerPiece,
                 [&](int64_t first, int64_t last) { kernels().silu_mul[index](params, first, last); });
}

}  // namespace tide
