#include <algorithm>
#include <vector>

#include "cpu/kernels/panels.h"
#include "cpu/ops/checks.h"
#include "cpu/ops/instruction_set.h"
#include "cpu/ops/ops.h"
#include "cpu/ops/panels.h"
#include "cpu/ops/thread_pool.h"

namespace tide {
namespace {

// Fewer multiplications than this take less time than handing them to another thread.
constexpr int64_t kMinParallelQuantisedWork = 256 * 1024;
constexpr int64_t kWorkPerPiece = 64 * 1024;
constexpr int64_t kMostRows = 256;  // of x at a time: in 8 bits they stay in the second-level cache while weights pass

}  // namespace

void quantised_linear(PanelKind kind, const float* x, const void* panels, const float* bias, float* y, int64_t rows,
                      int64_t in_features, int64_t out_features) {
    panels_bytes(kind, in_features, out_features);  // refuses what cannot be
    require(rows >= 0, "quantised_linear: sizes must not be negative");
    thread_local std::vector<char> quantised;
    const KernelTable& table = kernels();
    for (int64_t row = 0; row < rows; row += kMostRows) {
        const int64_t count = std::min(kMostRows, rows - row);
        quantised.resize(std::max<size_t>(quantised.size(), count * quantised_row_bytes(in_features)));
        char* to = quantised.data();
        const float* from = x + row * in_features;
        parallel_for(count, std::max<int64_t>(1, kWorkPerPiece / in_features),
                     [&](int64_t first, int64_t last) { table.quantise_rows(from, in_features, to, first, last); });
        const QuantisedLinearParams params = {kind,  to,          panels,      bias, y + row * out_features,
                                              count, in_features, out_features};
        const int64_t num_panels = (out_features + kPanel - 1) / kPanel;
        const int64_t work = count * in_features * kPanel;
        const int64_t grain =
            work * num_panels < kMinParallelQuantisedWork ? num_panels : std::max<int64_t>(1, kWorkPerPiece / work);
        parallel_for(num_panels, grain,
                     [&](int64_t first, int64_t last) { table.quantised_linear(params, first, last); });
    }
}

}  // namespace tide
