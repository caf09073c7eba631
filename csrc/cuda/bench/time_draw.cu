// How long draws and verified drafts take, in captured graphs. One JSON line a case.
#include "cuda/bench/draw_cases.cuh"

namespace tide::cuda::bench {

void time_draw() {
    using T = __nv_bfloat16;
    constexpr int kLaunches = 20;
    const struct {
        const char* name;
        Settings settings;
    } kinds[] = {{"plain", {0.8, 0, 1.0, 0.0}}, {"top-p", {0.8, 0, 0.95, 0.0}}, {"top-k top-p", {0.8, 50, 0.95, 0.0}}};
    for (const int64_t vocabulary : {49152, 128256}) {
        for (const int64_t tokens : {1, 8, 32, 128}) {
            for (const auto& kind : kinds) {
                const Logits<T> logits(tokens, vocabulary, 31, 12.0f);
                const DrawCase<T> drawing(logits, kind.settings, vocabulary, tokens);
                const double draws = time_graph(kLaunches, [&](int, cudaStream_t stream) { drawing.run(stream); });
                const int64_t drafts = tokens >= 4 ? 3 : 0, rows = tokens / (drafts + 1);
                const VerifyCase<T> verifying(rows, drafts, vocabulary, 8192, 12.0f, kind.settings);
                const double verifies = time_graph(kLaunches, [&](int, cudaStream_t stream) { verifying.run(stream); });
                std::printf(
                    "{\"op\": \"draw\", \"case\": \"%s\", \"vocabulary\": %ld, \"tokens\": %ld, "
                    "\"draw_us\": %.2f, \"verify_us\": %.2f}\n",
                    kind.name, vocabulary, tokens, draws, verifies);
                std::fflush(stdout);
            }
        }
        for (const int64_t rows : {1, 8, 32}) {
            const Logits<T> logits(rows, 8192, 31, 12.0f);
            const DrawCase<T> drawing(logits, kinds[1].settings, vocabulary, rows);
            const double us = time_graph(kLaunches, [&](int, cudaStream_t stream) { drawing.run(stream); });
            std::printf("{\"op\": \"draw\", \"case\": \"shortlist of 8192, top-p\", \"rows\": %ld, \"us\": %.2f}\n",
                        rows, us);
        }
    }
}

}  // namespace tide::cuda::bench
