#pragma once

#include <stdexcept>
#include <string>

#include "dtype.h"

namespace tide {

inline void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

inline int dtype_index(DType dtype) {
    const int index = static_cast<int>(dtype);
    if (index < 0 || index > 2) {
        throw std::invalid_argument("dtype: got code " + std::to_string(index) + ", expected 0, 1 or 2");
    }
    return index;
}

}  // namespace tide
