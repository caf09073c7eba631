// A model of the CTAs of a cluster on the host: their threads are contexts that take turns, and change at what makes
// lanes wait. The shared memory of the CTA whose turn it is lies at `shared`, that of the others is kept elsewhere.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

namespace tide::cuda {

using std::max;
using std::min;

constexpr int kSharedBytes = 232448;
extern char shared[kSharedBytes], memory[kSharedBytes];  // two names of the same

struct Copy {
    uint32_t to;
    unsigned char bytes[16];
    int count;
};

struct Lane {
    ucontext_t context;
    std::vector<char> stack;
    std::vector<std::vector<Copy>> groups;  // the last one is open
    bool done = false;
};

struct Machine {
    std::vector<std::unique_ptr<Lane>> lanes;  // of a CTA after another
    ucontext_t scheduler;
    int current = 0, threads = 0;  // of all CTAs of the cluster, and of one of them
    size_t shared_bytes = 0;
    int resident = 0;  // the CTA of the cluster whose memory is at `shared`
    std::vector<std::vector<char>> memories;
    std::function<void()> body;

    int cta() const { return current / threads; }
    int ctas() const { return static_cast<int>(lanes.size()) / threads; }
    // A barrier of a warp, or of all: how many came, and how often it opened.
    std::vector<int> came, opened;
    std::vector<uint64_t> exchange;  // a value of each thread
    uint32_t block = 0, blocks = 0;
};
inline Machine machine;

struct Index {
    struct X {
        bool is_thread;
        operator uint32_t() const {
            return is_thread ? machine.current % machine.threads : machine.block + machine.cta();
        }
    } x;
};
inline const Index threadIdx = {{true}}, blockIdx = {{false}};

inline void yield() {
    Lane& lane = *machine.lanes[machine.current];
    swapcontext(&lane.context, &machine.scheduler);
}

inline void meet(int barrier, int count) {
    const int turn = machine.opened[barrier];
    if (++machine.came[barrier] == count) {
        machine.came[barrier] = 0;
        ++machine.opened[barrier];
    }
    while (machine.opened[barrier] == turn) yield();
}
inline void __syncwarp() {
    meet(machine.current / 32, 32);
}
// Barriers of all warps come first, then 16 of each CTA, then that of the cluster.
inline void meet_in_cta(int barrier, int count) {
    meet(static_cast<int>(machine.lanes.size()) / 32 + machine.cta() * 16 + barrier, count);
}
inline void meet_in_cluster() {
    const int all = static_cast<int>(machine.lanes.size());
    meet(all / 32 + machine.ctas() * 16, all);
}
inline void __syncthreads() {
    meet_in_cta(0, machine.threads);
}
// Where a byte of the shared memory of a CTA of the cluster is now.
inline char* memory_of(int cta, uint32_t address) {
    if (machine.lanes[cta * machine.threads]->done) std::abort();  // no CTA writes to one that has left
    return cta == machine.resident ? shared + address : &machine.memories[cta][address];
}

// The values of all lanes of the warp.
template <typename T>
std::vector<T> exchanged(T mine) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    std::memcpy(&machine.exchange[machine.current], &mine, sizeof(T));
    __syncwarp();
    std::vector<T> all(32);
    for (int lane = 0; lane < 32; ++lane)
        std::memcpy(&all[lane], &machine.exchange[machine.current / 32 * 32 + lane], sizeof(T));
    __syncwarp();
    return all;
}
inline float __shfl_sync(unsigned, float v, int lane) {
    return exchanged(v)[lane];
}
inline bool __all_sync(unsigned, bool v) {
    const auto all = exchanged(static_cast<int>(v));
    return std::all_of(all.begin(), all.end(), [](int one) { return one != 0; });
}

inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = uint64_t{b} << 32 | a;
    uint32_t found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return found;
}
inline uint32_t __float_as_uint(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}
inline float rsqrtf(float v) {
    return 1.0f / std::sqrt(v);
}

inline void run_lane() {
    machine.body();
    machine.lanes[machine.current]->done = true;
    while (true) yield();
}

inline void run_grid(int64_t grid, int threads, int cluster, size_t shared_bytes, const std::function<void()>& body) {
    machine.body = body;
    machine.threads = threads;
    machine.shared_bytes = shared_bytes;
    const int all = threads * cluster;
    for (int64_t block = 0; block < grid; block += cluster) {
        machine.block = static_cast<uint32_t>(block);
        std::memset(shared, 0x7f, sizeof(shared));  // not a number of any type
        machine.memories.assign(cluster, std::vector<char>(cluster > 1 ? shared_bytes : 0, 0x7f));
        machine.resident = 0;
        machine.lanes.resize(all);
        machine.came.assign(all / 32 + cluster * 16 + 1, 0);
        machine.opened.assign(machine.came.size(), 0);
        machine.exchange.assign(all, 0);
        for (auto& lane : machine.lanes) {
            if (!lane) lane = std::make_unique<Lane>();
            lane->stack.resize(1 << 16);
            lane->groups.assign(1, {});
            lane->done = false;
            getcontext(&lane->context);
            lane->context.uc_stack.ss_sp = lane->stack.data();
            lane->context.uc_stack.ss_size = lane->stack.size();
            lane->context.uc_link = &machine.scheduler;
            makecontext(&lane->context, run_lane, 0);
        }
        for (bool left = true; left;) {
            left = false;
            for (int i = 0; i < all; ++i) {
                if (machine.lanes[i]->done) continue;
                left = true;
                machine.current = i;
                if (machine.cta() != machine.resident) {
                    std::memcpy(machine.memories[machine.resident].data(), shared, shared_bytes);
                    machine.resident = machine.cta();
                    std::memcpy(shared, machine.memories[machine.resident].data(), shared_bytes);
                }
                swapcontext(&machine.scheduler, &machine.lanes[i]->context);
            }
        }
    }
}

}  // namespace tide::cuda
