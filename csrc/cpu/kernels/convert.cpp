#include "cpu/kernels/convert.h"

#include "cpu/kernels/kernels.h"

namespace tide::TIDE_ISA {

template <typename T>
void to_float(const void* from, float* to, int64_t count) {
    convert_to_float(static_cast<const T*>(from), to, count);
}

#define TIDE_INSTANTIATE(T) template void to_float<T>(const void*, float*, int64_t);
TIDE_FOR_EACH_DTYPE(TIDE_INSTANTIATE)

}  // namespace tide::TIDE_ISA
