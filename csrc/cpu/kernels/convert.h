#pragma once

#include "cpu/kernels/simd.h"

namespace tide::TIDE_ISA {

template <typename T>
TIDE_INLINE void convert_to_float(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    if (i < count) store_partial(to + i, load_partial(from + i, count - i), count - i);
}

}  // namespace tide::TIDE_ISA
