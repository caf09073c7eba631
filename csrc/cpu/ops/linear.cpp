#include <algorithm>
#include <vector>

#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/linear_tiles.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

// Fewer multiplications than this take less time than handing them to another thread.
constexpr int64_t kMinParallelWork = 64 * 1024;
constexpr int64_t kWorkPerPiece = 16 * 1024;  // about 4 us, to even out threads that lose their core
constexpr int64_t kColumnMultiple = 8;        // pieces end where a strip of weights ends
constexpr int64_t kPanelBytes = 256 * 1024;   // of x: what the second-level cache keeps while weights pass

int64_t panel_rows(int64_t in_features) {
    const int64_t fitting = kPanelBytes / static_cast<int64_t>(sizeof(float)) / std::max<int64_t>(in_features, 1);
    return std::max<int64_t>(16, fitting / 16 * 16);
}

int64_t columns_per_piece(const LinearParams& params) {
    const int64_t work_per_column = std::max<int64_t>(1, params.rows * params.in_features);
    if (work_per_column * params.out_features < kMinParallelWork) return params.out_features;
    const int64_t columns = std::max<int64_t>(1, kWorkPerPiece / work_per_column);
    return (columns + kColumnMultiple - 1) / kColumnMultiple * kColumnMultiple;
}

const float* rows_as_float(DType dtype, const void* rows, int64_t count) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(rows);
    thread_local std::vector<float> converted;
    if (static_cast<int64_t>(converted.size()) < count) converted.resize(count);
    kernels().to_float[static_cast<int>(dtype)](rows, converted.data(), count);
    return converted.data();
}

}  // namespace

void linear(DType dtype, DType weight_dtype, const void* x, const void* weight, const void* bias, void* y, int64_t rows,
            int64_t in_features, int64_t out_features) {
    const int index = dtype_index(dtype);
    const bool narrow_weight = dtype == DType::kFloat32 && weight_dtype == DType::kBFloat16;
    require(narrow_weight || weight_dtype == dtype,
            "linear: weight must be of the dtype of x, or bfloat16 with float32");
    require(rows >= 0 && in_features >= 0 && out_features >= 0, "linear: sizes must not be negative");
    if (rows == 0 || out_features == 0) return;
    const KernelTable& table = kernels();
    if (dtype == DType::kBFloat16 && table.tile_linear) {
        linear_in_tiles(*table.tile_linear, static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(weight),
                        static_cast<const BFloat16*>(bias), static_cast<BFloat16*>(y), rows, in_features, out_features);
        return;
    }
    const auto kernel = narrow_weight ? table.linear_narrow_weight : table.linear[index];
    const int64_t panel = panel_rows(in_features);
    const int64_t bytes = element_size(dtype);
    const int64_t scratch_floats = table.linear_scratch_floats(in_features);
    for (int64_t row = 0; row < rows; row += panel) {
        const int64_t panel_size = std::min(panel, rows - row);
        const void* panel_x = static_cast<const char*>(x) + row * in_features * bytes;
        void* panel_y = static_cast<char*>(y) + row * out_features * bytes;
        const LinearParams params = {rows_as_float(dtype, panel_x, panel_size * in_features),
                                     weight,
                                     bias,
                                     panel_y,
                                     panel_size,
                                     in_features,
                                     out_features};
        parallel_for(out_features, columns_per_piece(params),
                     [&](int64_t first, int64_t last) { kernel(params, first, last, thread_scratch(scratch_floats)); });
    }
}

}  // namespace tide
