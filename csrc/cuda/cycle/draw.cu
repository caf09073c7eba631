// A place in each row of logits: drawn after temperature, top-k, top-p and min-p, or the largest without a
// temperature.
#include "cuda/cycle/draw_row.cuh"

namespace tide::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kTeamThreads) draw_kernel(DrawParams p, int size, bool aligned) {
    extern __shared__ __align__(16) char shared[];
    let_next_start();
    wait_for_previous();
    Team team(reinterpret_cast<TeamMemory*>(shared), size);
    const int64_t r = blockIdx.x / size;
    const LogitRow<T> row = {static_cast<const T*>(p.logits) + r * p.logits_stride, static_cast<int>(p.width), aligned};
    const Section section = section_of(row, team);
    const RowSettings settings = RowSettings::of(p.settings, p.rows, r);
    const Largest largest = largest_of(team, row);
    const auto write = [&](int64_t place, const Head& head, double total) {
        p.places[r] = place;
        double* numbers = p.heads + r * kHeadNumbers;
        numbers[0] = largest.best;
        numbers[1] = head.cut;
        numbers[2] = static_cast<double>(head.last < p.width ? head.last : p.width);
        numbers[3] = total;
    };
    if (settings.temperature == 0.0 || !largest.is_finite()) {
        if (team.warp() == 0 && threadIdx.x == 0) write(largest.index, {}, 0.0);
    } else {
        const Weigher weigher = Weigher::of(largest.best, settings, p.vocabulary);
        const Head head = head_of(team, row, section, weigher, settings, p.vocabulary);
        const Drawn drawn = draw_from(team, row, section, p.numbers[r], [&](T element, int index) -> uint64_t {
            const float x = to_float(element);
            return head.keeps(x, index) ? weigher.final_weight(x) : 0;
        });
        if (drawn.place >= 0) write(drawn.place, head, static_cast<double>(static_cast<int64_t>(drawn.total)));
    }
    team.barrier();
}

}  // namespace

void draw(DType dtype, const DrawParams& p, cudaStream_t stream) {
    if (p.rows == 0 || p.width == 0) return;
    const int size = team_size("draw", p.rows, p.width);
    with_storage("draw", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("draw", draw_kernel<T>, LaunchShape{p.rows * size, kTeamThreads, sizeof(TeamMemory), size}, stream, p,
               size, is_aligned(p.logits, p.logits_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
