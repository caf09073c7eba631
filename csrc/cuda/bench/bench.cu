// Times the linears with every tile; `python -m benchmarks.kernels` times the other ops and tests/gpu checks them all.
// Arguments: any of linear, narrow, head, chain; none: all.
#include <cstring>

#include "cuda/bench/support.cuh"

int main(int argc, char** argv) {
    using namespace tide::cuda::bench;
    const auto wanted = [&](const char* part) {
        if (argc == 1) return true;
        for (int i = 1; i < argc; ++i) {
            if (std::strcmp(argv[i], part) == 0) return true;
        }
        return false;
    };
    const int64_t bytes = wanted("chain") ? int64_t{16} << 30 : int64_t{2} << 30;
    const Buffer arena(bytes);
    fill(arena.get<__nv_bfloat16>(), bytes / 2, 8, 0.02f);
    if (wanted("linear")) time_linear(arena);
    if (wanted("narrow")) time_narrow(arena);
    if (wanted("head")) time_head(arena);
    if (wanted("chain")) time_chain(arena);
}
