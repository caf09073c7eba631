// The kernels of one instruction set, as function pointers indexed by DType.
#pragma once

#include "kernels/params.h"

namespace tide {

constexpr int kNumDTypes = 3;

struct KernelTable {
    const char* name;
    // Converts `count` elements to float32.
    void (*to_float[kNumDTypes])(const void* from, float* to, int64_t count);
    // Output columns [first, last); `scratch` holds linear_scratch_floats(in_features) floats.
    void (*linear[kNumDTypes])(const LinearParams&, int64_t first, int64_t last, float* scratch);
    // The same for float32 x, bias and y with a bfloat16 weight.
    void (*linear_narrow_weight)(const LinearParams&, int64_t first, int64_t last, float* scratch);
    int64_t (*linear_scratch_floats)(int64_t in_features);
    // Rows [first, last).
    void (*rms_norm[kNumDTypes])(const RmsNormParams&, int64_t first, int64_t last);
    // Elements [first, last).
    void (*silu_mul[kNumDTypes])(const SiluMulParams&, int64_t first, int64_t last);
    // Tokens [first, last).
    void (*rotary[kNumDTypes])(const RotaryParams&, int64_t first, int64_t last);
    // One task; `scratch` holds attention_scratch_floats(params, max queries of a task) floats.
    void (*paged_attention[kNumDTypes])(const PagedAttentionParams&, const AttentionTask&, float* scratch);
    int64_t (*attention_scratch_floats)(const PagedAttentionParams&, int64_t max_queries);
    // The largest of `count` numbers: NaN if any is, -inf of none.
    float (*maximum)(const float* x, int64_t count);
    Peak (*peak)(const float* x, int64_t count);
};

namespace baseline {
const KernelTable& kernel_table();
}
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}

}  // namespace tide
