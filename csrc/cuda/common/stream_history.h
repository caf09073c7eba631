// Which kernels may overlap with the one before them, and what they may read before wait_for_previous().
//
// With programmatic dependent launch a kernel starts when all CTAs of the one before it have allowed it. That orders
// their starts; it does not make writes visible. What an earlier kernel wrote can be seen
//   - after wait_for_previous(), whatever wrote it;
//   - before it, if a kernel that publishes was launched in between: it allows the next kernel only after its own wait,
//     so everything before it has ended and was flushed when anything after it starts. Reads before the wait bypass the
//     first-level cache;
//   - before it, if the launch does not overlap at all.
// Each launch states its effect, so that the host knows whether pages or indices were written since the last kernel
// that publishes. Kernels of others (Torch) are seen too: in a stream that is captured the last node is then not ours,
// and nothing counts as published. Outside of a capture nothing of the kind can be seen, and launches do not overlap.
//
// Weights are always read before the wait: they must not be written inside of a capture, but by a kernel that says so
// (widen_fp8). The launch after that one does not overlap with it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace tide::cuda {

enum class Effect {
    kWrites,     // it may write pages of the KV cache or indices
    kNone,       // it writes neither
    kPublishes,  // nor does it, and it lets the next kernel start after its own wait_for_previous()
    kWeights,    // it writes neither pages nor indices, but weights
};

// What a kernel may read before wait_for_previous().
enum class EarlyReads {
    kNone,
    kOldPages,  // indices, and all pages but those of the tokens that are its queries: the kernel before it writes
                // these
    kAll,       // indices and all pages
};

// What this thread has launched on each stream. What other threads launch counts as launched by others.
class StreamHistory {
  public:
    // Right before a launch: whether it may overlap with the one before it.
    static bool may_overlap(cudaStream_t stream) {
        const State& state = of(stream);
        return state.captured && !state.wrote_weights;
    }

    // Right after a launch.
    static void record(cudaStream_t stream, Effect effect) {
        State& state = states()[key_of(stream)];
        const Tail tail = tail_of(stream);
        state.capture = tail.capture;
        state.last_node = tail.node;
        state.new_tokens = nullptr;
        state.wrote_weights = effect == Effect::kWeights;
        if (effect == Effect::kNone || effect == Effect::kWeights) return;
        state.is_published = effect == Effect::kPublishes;
        state.written.clear();
    }

    // The launch just recorded writes new tokens to the pages of this pool, and else neither pages nor indices.
    static void record_pool(cudaStream_t stream, const void* pool) {
        State& state = states()[key_of(stream)];
        if (state.can_read(pool)) state.written.push_back(pool);  // once: some models never publish again
    }

    // The same of a kernel that publishes what was before it.
    static void record_new_tokens(cudaStream_t stream, const void* pool) {
        record(stream, Effect::kPublishes);
        record_pool(stream, pool);
        states()[key_of(stream)].new_tokens = pool;
    }

    // Whether all pages and indices are as they were when everything was published last.
    static bool is_published(cudaStream_t stream) {
        const State& state = of(stream);
        return state.is_published && state.written.empty();
    }

    // Whether the next launch may read the pages of this pool, and all indices, before it waits.
    static bool may_read(cudaStream_t stream, const void* pool) { return of(stream).can_read(pool); }

    // What the next launch may read of this pool before it waits. `reads_new_tokens`: its queries are the tokens that
    // the launch before it wrote there, if it wrote any.
    static EarlyReads early_reads(cudaStream_t stream, const void* pool, bool reads_new_tokens) {
        const State& state = of(stream);
        if (state.can_read(pool)) return EarlyReads::kAll;
        return reads_new_tokens && state.new_tokens == pool ? EarlyReads::kOldPages : EarlyReads::kNone;
    }

  private:
    struct State {
        unsigned long long capture = 0;
        cudaGraphNode_t last_node = nullptr;
        bool captured = false;
        bool is_published = false;
        bool wrote_weights = false;  // the last launch did
        std::vector<const void*> written;
        const void* new_tokens = nullptr;  // the pool that the last launch wrote, everything before being published

        bool can_read(const void* pool) const {
            return is_published && std::find(written.begin(), written.end(), pool) == written.end();
        }
    };

    // Where a captured stream stands: the only node that the next one depends on, or none.
    struct Tail {
        bool captured = false;
        unsigned long long capture = 0;
        cudaGraphNode_t node = nullptr;
    };

    static Tail tail_of(cudaStream_t stream) {
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        unsigned long long capture = 0;
        const cudaGraphNode_t* nodes = nullptr;
        size_t count = 0;
#if CUDART_VERSION >= 12030
        const cudaGraphEdgeData* edges = nullptr;  // without it the query fails where edges have data
#endif
#if CUDART_VERSION >= 13000
        const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#elif CUDART_VERSION >= 12030
        const cudaError_t error =
            cudaStreamGetCaptureInfo_v3(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#else
        const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &capture, nullptr, &nodes, &count);
#endif
        if (error != cudaSuccess) cudaGetLastError();  // clears it
        if (error != cudaSuccess || status != cudaStreamCaptureStatusActive) return {};
        return {true, capture, count == 1 ? nodes[0] : nullptr};
    }

    // As the next launch finds it.
    static const State& of(cudaStream_t stream) {
        State& state = states()[key_of(stream)];
        const Tail tail = tail_of(stream);
        if (!tail.captured) {  // the next launch does not overlap: it starts when everything has ended
            state = {};
            state.is_published = true;
        } else if (tail.capture != state.capture || tail.node == nullptr || tail.node != state.last_node) {
            state = {};  // somebody else was here
        }
        state.captured = tail.captured;
        return state;
    }

    // The default stream has one name on all devices.
    using Key = std::pair<int, cudaStream_t>;
    static Key key_of(cudaStream_t stream) {
        int device = 0;
        if (cudaGetDevice(&device) != cudaSuccess) device = -1;
        return {device, stream};
    }
    static std::map<Key, State>& states() {
        thread_local std::map<Key, State> all;
        return all;
    }
};

}  // namespace tide::cuda
