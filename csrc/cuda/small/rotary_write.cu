// Norm, rotary positions and page writes of the projections of one attention layer. A warp for each head of a token.
#include "cuda/common/launch.h"
#include "cuda/small/ops.h"
#include "cuda/small/rotary_head.cuh"

namespace tide::cuda {
namespace {

constexpr int kRotaryWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kRotaryWarps* kWarp)
    rotary_write_kernel(const __grid_constant__ RotaryWriteParams p, Divider by_heads, Divider by_block, bool aligned) {
    wait_for_previous();
    let_next_start();  // attention follows, and may read older pages then
    const int heads = static_cast<int>(p.q.heads + p.k.heads + p.v.heads);
    const int tasks = static_cast<int>(p.rows) * heads;
    const int first = blockIdx.x * kRotaryWarps + threadIdx.x / kWarp, step = gridDim.x * kRotaryWarps;
    for (int task = first; task < tasks; task += step) {
        const int token = by_heads(task), head = task - token * heads;
        const int64_t position = p.positions == nullptr ? token : p.positions[token];
        if (head < p.q.heads) {
            T* y = static_cast<T*>(p.q_out) + token * p.q_out_token_stride + head * p.q_out_head_stride;
            rotate_head(p, head_of<T>(p.q, token, head), y, static_cast<const T*>(p.q_norm), position, aligned);
            continue;
        }
        const int64_t slot = p.slots[token], k_head = head - p.q.heads, v_head = k_head - p.k.heads;
        if (k_head < p.k.heads) {
            T* y = place_of<T>(p, by_block, p.k_pool, p.k.heads, slot, k_head, p.key_dim);
            if (y == nullptr) continue;
            rotate_head(p, head_of<T>(p.k, token, k_head), y, static_cast<const T*>(p.k_norm), position, aligned);
        } else {
            T* y = place_of<T>(p, by_block, p.v_pool, p.v.heads, slot, v_head, p.value_dim);
            if (y != nullptr) copy_head(head_of<T>(p.v, token, v_head), y, p.value_dim, aligned);
        }
    }
}

}  // namespace

void rotary_write(DType dtype, const RotaryWriteParams& p, cudaStream_t stream) {
    const int64_t tasks = p.rows * (p.q.heads + p.k.heads + p.v.heads);
    if (tasks == 0) return;
    if (tasks > INT32_MAX / 2) throw std::runtime_error("rotary_write: too many heads for one launch");
    with_storage("rotary_write", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("rotary_write", rotary_write_kernel<T>,
               LaunchShape{grid_of((tasks + kRotaryWarps - 1) / kRotaryWarps), kRotaryWarps * kWarp, 0, 1,
                           Effect::kPublishes},
               stream, p, Divider(p.q.heads + p.k.heads + p.v.heads), Divider(p.block_size > 0 ? p.block_size : 1),
               in_twos<T>(p));
    });
    if (p.k_pool != nullptr) StreamHistory::record_new_tokens(stream, p.k_pool);
}

}  // namespace tide::cuda
