#include "cpu/kernels/table.h"

#include "cpu/kernels/kernels.h"

#define TIDE_QUOTE(name) #name
#define TIDE_NAME_OF(macro) TIDE_QUOTE(macro)

namespace tide::TIDE_ISA {

const KernelTable& kernel_table() {
    static const KernelTable table = {
        TIDE_NAME_OF(TIDE_ISA),
        {to_float<float>, to_float<Half>, to_float<BFloat16>},
        {linear<float, float>, linear<Half, Half>, linear<BFloat16, BFloat16>},
        linear<float, BFloat16>,
        linear_scratch_floats,
        nullptr,
        quantise_rows,
        quantised_linear,
        {rms_norm<float>, rms_norm<Half>, rms_norm<BFloat16>},
        {silu_mul<float>, silu_mul<Half>, silu_mul<BFloat16>},
        {rotary<float>, rotary<Half>, rotary<BFloat16>},
        {paged_attention<float>, paged_attention<Half>, paged_attention<BFloat16>},
        attention_scratch_floats,
        maximum,
        top2_logsumexp,
    };
    return table;
}

}  // namespace tide::TIDE_ISA
