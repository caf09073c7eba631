// The kernels of the linear for many rows, by tile.
#pragma once

#include "cuda/linear_wide_stay.cuh"

namespace tide::cuda {

template <typename T>
void launch_linear_wide(const LinearParams& p, const WideTile& tile, cudaStream_t stream) {
    const bool one = tile.groups == 1, split = tile.split == 2;
    if (tile.stays) {
        if (tile.tokens == 32) return launch_stay<T, WideLayout<2, 32, 1>>(p, stream);
        return launch_stay<T, WideLayout<2, 64, 1>>(p, stream);
    }
    switch (tile.tokens) {
        case 32:
            if (one) return launch_wide<T, WideLayout<1, 32, 2>>(p, stream);
            if (split) return launch_wide<T, WideLayout<2, 32, 2>>(p, stream);
            return launch_wide<T, WideLayout<2, 32, 1>>(p, stream);
        case 64:
            if (one) return launch_wide<T, WideLayout<1, 64, 2>>(p, stream);
            if (split) return launch_wide<T, WideLayout<2, 64, 2>>(p, stream);
            return launch_wide<T, WideLayout<2, 64, 1>>(p, stream);
        default:
            return launch_wide<T, WideLayout<2, 128, 1>>(p, stream);
    }
}

}  // namespace tide::cuda
