// Storage types. Arithmetic is always float32; these only define how a number lies in memory.
#pragma once

#include <cstdint>

namespace tide {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct Half {
    uint16_t bits;
};

struct BFloat16 {
    uint16_t bits;
};

inline int64_t element_size(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace tide
