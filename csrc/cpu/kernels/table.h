// The kernels of one instruction set, as function pointers indexed by DType.
#pragma once

#include "cpu/kernels/params.h"

namespace tide {

constexpr int kNumDTypes = 3;

// The bfloat16 linear of a tile unit: pack x, then any columns.
struct TileLinear {
    int64_t (*packed_words)(int64_t rows, int64_t in_features);
    // x is packed in so many units, each of them by any thread.
    int64_t (*pack_units)(int64_t rows, int64_t in_features);
    void (*pack)(const TileLinearParams&, int64_t first, int64_t last);
    int64_t (*scratch_floats)(int64_t rows, int64_t in_features, int64_t columns);
    // Output columns [first, last); first is a multiple of 16, and so is last but at the end.
    void (*linear)(const TileLinearParams&, int64_t first, int64_t last, float* scratch);
};

struct KernelTable {
    const char* name;
    // Converts `count` elements to float32.
    void (*to_float[kNumDTypes])(const void* from, float* to, int64_t count);
    // Output columns [first, last); `scratch` holds linear_scratch_floats(in_features) floats.
    void (*linear[kNumDTypes])(const LinearParams&, int64_t first, int64_t last, float* scratch);
    // The same for float32 x, bias and y with a bfloat16 weight.
    void (*linear_narrow_weight)(const LinearParams&, int64_t first, int64_t last, float* scratch);
    int64_t (*linear_scratch_floats)(int64_t in_features);
    const TileLinear* tile_linear;  // null without a tile unit
    // Rows [first, last) of x to 8 bits, then panels [first, last) of outputs.
    void (*quantise_rows)(const float* x, int64_t in_features, void* rows, int64_t first, int64_t last);
    void (*quantised_linear)(const QuantisedLinearParams&, int64_t first, int64_t last);
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
    Top2 (*top2_logsumexp)(const float* x, int64_t count);
};

namespace baseline {
const KernelTable& kernel_table();
}
namespace dotprod {
const KernelTable& kernel_table();
}
namespace avx2 {
const KernelTable& kernel_table();
}
namespace avx512 {
const KernelTable& kernel_table();
}
namespace vnni {
const KernelTable& kernel_table();
}
namespace amx {
const KernelTable& kernel_table();
}

}  // namespace tide
