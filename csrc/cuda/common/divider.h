// Division by a number that the host knows.
#pragma once

#include <stdint.h>

namespace tide::cuda {

// Divides numbers below 2^31: a division on the device takes longer than a read of the second-level cache, and much of
// a short kernel is finding out what to do.
struct Divider {
    uint32_t factor;
    int shift;

    explicit Divider(int64_t by) : shift(31) {
        while ((int64_t{1} << (shift - 31)) < by) ++shift;
        factor = static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by);
    }
#ifdef __CUDACC__
    __device__ int operator()(int v) const {
        return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(v)) * factor) >> shift);
    }
#endif
};

}  // namespace tide::cuda
