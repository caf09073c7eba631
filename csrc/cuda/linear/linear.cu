// Plain or tensor cores: that depends on dtype, width and alignment, never on the rows. Of the kernels for tensor cores
// each gives the same bits.
#include "cuda/linear/kernels.h"
#include "cuda/linear/plain.cuh"

namespace tide::cuda {
namespace {

bool is_aligned(const void* pointer, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether x, weight and norm can be read `vector` elements at a time.
bool can_read(const LinearParams& p, int64_t vector, int64_t element_bytes) {
    return p.in_features % vector == 0 && p.x_stride % vector == 0 && is_aligned(p.x, vector * element_bytes) &&
           is_aligned(p.weight, vector * element_bytes) && is_aligned(p.norm, vector * element_bytes);
}

}  // namespace

bool fast_for_many_rows() {
    return has_wide_linear(current_device("linear"));
}

void linear(DType dtype, const LinearParams& params, cudaStream_t stream) {
    if (params.rows <= 0 || params.out_features <= 0) return;
    if (params.norm && dtype == DType::kFloat16) throw std::runtime_error("linear: float16 has no norm");
    const int64_t bytes = element_size(dtype);
    const DeviceInfo device = current_device("linear");
    const bool tiles = dtype != DType::kFloat32 && device.arch >= kTensorCoreArch && can_read(params, kVector, bytes);
    if (!tiles) {
        const bool aligned = can_read(params, kPlainVector, bytes);
        return with_storage("linear", dtype, [&](auto storage) {
            launch_linear_plain<typename decltype(storage)::Type>(params, aligned, stream);
        });
    }
    if (is_wide(params, device)) {
        const WideTile tile = choose_half_wide_tile(params, device);
        if (dtype == DType::kFloat16) return launch_linear_wide<__half>(params, tile, stream);
        return launch_linear_wide<__nv_bfloat16>(params, tile, stream);
    }
    const LinearTile tile = choose_tile(params, device);
    if (dtype == DType::kFloat16) return launch_linear_tiles<__half, false>(params, tile, stream);
    if (params.norm) return launch_linear_tiles<__nv_bfloat16, true>(params, tile, stream);
    launch_linear_tiles<__nv_bfloat16, false>(params, tile, stream);
}

}  // namespace tide::cuda
