// Which kernels may read pages of the KV cache and indices before wait_for_previous().
//
// A kernel starts when all CTAs of the one before it have let it. Some kernels let the next one start only after their
// own wait: when anything behind such a one starts, everything before it has ended, and what that wrote can be read at
// once, past the first-level cache. The others say whether they write pages or indices, so that for a launch it is
// known whether any of those behind the last such kernel does. What is launched by others than us lets nothing start
// before its end, and changes nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace tide::cuda {

enum class Effect {
    kWrites,   // it may write pages or indices
    kNothing,  // it writes neither
    kSettles,  // nor does it, and it lets the next kernel start after its own wait_for_previous()
};

// What a kernel may read before wait_for_previous().
enum class Ahead {
    kNothing,
    kOld,  // indices, and all pages but those of the tokens that are its queries: the kernel before it writes these
    kAll,  // indices and all pages
};

// What this thread has launched on each stream since that was settled last. Other threads do not concern it: nobody
// writes the pages and indices of its launches but itself.
class Settled {
  public:
    static void note(cudaStream_t stream, Effect effect) {
        State& state = of(stream);
        state.fresh = nullptr;
        if (effect == Effect::kNothing) return;
        state.is_settled = effect == Effect::kSettles;
        state.written.clear();
    }

    // A kernel was launched that writes new tokens to the pages of this pool, and else neither pages nor indices.
    static void note_pool(cudaStream_t stream, const void* pool) {
        if (may_read(stream, pool)) of(stream).written.push_back(pool);  // once: some models never settle again
    }

    // The same of a kernel that lets the next one start after its own wait, right behind its launch.
    static void note_fresh(cudaStream_t stream, const void* pool) {
        note(stream, Effect::kSettles);
        note_pool(stream, pool);
        of(stream).fresh = pool;
    }

    // Whether all pages and indices are as they were when the stream was settled last.
    static bool is_settled(cudaStream_t stream) {
        const State& state = of(stream);
        return state.is_settled && state.written.empty();
    }

    // Whether the next launch may read the pages of this pool, and all indices, before it waits.
    static bool may_read(cudaStream_t stream, const void* pool) {
        const State& state = of(stream);
        return state.is_settled && std::find(state.written.begin(), state.written.end(), pool) == state.written.end();
    }

    // What the next launch may read of this pool before it waits. `fresh`: its queries are the tokens that the launch
    // before it wrote there, if it wrote any.
    static Ahead ahead(cudaStream_t stream, const void* pool, bool fresh) {
        if (may_read(stream, pool)) return Ahead::kAll;
        return fresh && of(stream).fresh == pool ? Ahead::kOld : Ahead::kNothing;
    }

  private:
    struct State {
        bool is_settled = false;
        std::vector<const void*> written;
        // The pool that the last launch wrote new tokens to, everything before being settled.
        const void* fresh = nullptr;
    };
    // The default stream has one name on all devices.
    static State& of(cudaStream_t stream) {
        thread_local std::map<std::pair<int, cudaStream_t>, State> states;
        int device = 0;
        if (cudaGetDevice(&device) != cudaSuccess) device = -1;
        return states[{device, stream}];
    }
};

}  // namespace tide::cuda
