#include "ops/isa.h"

namespace tide {
namespace {

const KernelTable& best_table() {
#if defined(TIDE_HAS_X86_KERNELS)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    // Every processor with AVX2 or AVX-512 has the float16 conversions (F16C) too.
    if (has_avx2 && has_avx512) return avx512::kernel_table();
    if (has_avx2) return avx2::kernel_table();
#endif
    return baseline::kernel_table();
}

}  // namespace

const KernelTable& kernels() {
    static const KernelTable& table = best_table();
    return table;
}

}  // namespace tide
