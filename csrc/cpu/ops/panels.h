// Block-quantised weights: from the rows of a GGUF file to panels (kernels/panels.h), and back to numbers.
#pragma once

#include "cpu/kernels/panels.h"

namespace tide {

// Bytes of one block of a row in the file.
int64_t block_bytes(PanelKind kind);

// Bytes of the panels of a matrix; in_features must be whole blocks.
int64_t panels_bytes(PanelKind kind, int64_t in_features, int64_t out_features);

// `blocks`: the rows as they lie in the file. Output `i` is row `order[i]` of them, or row i without an order. Whether
// all numbers are finite: codes and factors always are, halves may be infinite or no number.
bool pack_panels(PanelKind kind, const void* blocks, const int64_t* order, int64_t in_features, int64_t out_features,
                 void* panels);

// Outputs `ids` as float32, y [count, in_features]; each number is that of the file's format.
void unpack_rows(PanelKind kind, const void* panels, int64_t in_features, int64_t out_features, const int64_t* ids,
                 int64_t count, float* y);

}  // namespace tide
