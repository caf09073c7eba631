// The CTAs that share one row of logits: a cluster on sm_90 and above, a single one elsewhere. Every warp has an
// unbroken section of the row. Warps exchange whole numbers, so the number of CTAs never shows in a
// result.
#pragma once

#include <algorithm>

#include "cuda/common/block.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pack.cuh"

namespace tide::cuda {

constexpr int kTeamThreads = 512;
constexpr int kTeamWarps = kTeamThreads / kWarp;
constexpr int kMostTeam = 8;
constexpr int kBins = 16;

struct TeamMemory {
    uint64_t values[2][kTeamWarps];  // in turns, so that one barrier for each exchange is enough
    uint64_t lowest[kTeamWarps];
    uint64_t bins[kBins - 1][kTeamThreads];  // a column for each thread; the lowest bin is in its registers
};
static_assert(sizeof(TeamMemory) <= kSharedOfCta75);

template <typename T>
struct LogitRow {
    const T* x;
    int width;
    bool aligned;
};

class Team {
  public:
    static constexpr int kEach = kMostTeam * kTeamWarps / kWarp;  // warps of the team that a lane listens to

    __device__ Team(TeamMemory* memory, int size)
        : memory_(memory), size_(size), rank_(static_cast<int>(blockIdx.x) % size) {}

    __device__ int warp() const { return rank_ * kTeamWarps + static_cast<int>(threadIdx.x) / kWarp; }
    __device__ int size() const { return size_; }
    __device__ int warps() const { return size_ * kTeamWarps; }
    __device__ int thread() const { return rank_ * kTeamThreads + static_cast<int>(threadIdx.x); }
    __device__ int threads() const { return size_ * kTeamThreads; }
    __device__ TeamMemory& memory() const { return *memory_; }

    // Every warp posts one number; returns when all have.
    __device__ void post(uint64_t number) {
        turn_ ^= 1;
        if (threadIdx.x % kWarp == 0) memory_->values[turn_][threadIdx.x / kWarp] = number;
        barrier();
    }

    // What a warp of the team posted last.
    __device__ uint64_t posted(int warp) const {
        const uint64_t* here = &memory_->values[turn_][warp % kTeamWarps];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(here));
        uint32_t there;
        uint64_t value;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(warp / kTeamWarps));
        asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(there) : "memory");
        return value;
#else
        return *here;
#endif
    }

    // The same, and 0 for a warp that there is not. No branch: several of them wait for other CTAs at once.
    __device__ uint64_t posted_or_0(int warp) const {
        const uint64_t number = posted(warp < warps() ? warp : 0);
        return warp < warps() ? number : 0;
    }

    // A CTA must not end while others still read what it posted.
    __device__ void barrier() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        if (size_ > 1) {
            asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
            return;
        }
#endif
        __syncthreads();
    }

    // The largest of what the warps of the team post.
    __device__ uint64_t most(uint64_t number) {
        post(warp_most(number));
        uint64_t found = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) found = max(found, posted_or_0(threadIdx.x % kWarp + i * kWarp));
        return warp_most(found);
    }

    static __device__ uint64_t warp_total(uint64_t number) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            number += __shfl_xor_sync(kAllLanes, number, distance);
        }
        return number;
    }

    // The sum over this lane and those before it.
    static __device__ uint64_t warp_scan(uint64_t number) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
            const uint64_t before = __shfl_up_sync(kAllLanes, number, distance);
            if (lane >= distance) number += before;
        }
        return number;
    }

  private:
    static __device__ uint64_t max(uint64_t a, uint64_t b) { return a < b ? b : a; }

    static __device__ uint64_t warp_most(uint64_t number) {
#pragma unroll
        for (int distance = kWarp / 2; distance > 0; distance /= 2) {
            number = max(number, __shfl_xor_sync(kAllLanes, number, distance));
        }
        return number;
    }

    TeamMemory* memory_;
    int size_, rank_, turn_ = 0;
};

// The shares of the warps of a team, one after another.
struct Shares {
    uint64_t total;
    int warp;         // the one whose share a point falls into
    uint64_t before;  // the shares before it
};

// Every warp has a share. `point_of(total)` is below the total, unless that is 0.
template <typename PointOf>
__device__ inline Shares share_of_point(Team& team, uint64_t share, PointOf&& point_of) {
    team.post(Team::warp_total(share));
    constexpr int kEach = Team::kEach;
    const int lane = threadIdx.x % kWarp;
    uint64_t mine[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        mine[i] = team.posted_or_0(lane * kEach + i);
        sum += mine[i];
    }
    uint64_t reached = Team::warp_scan(sum);
    Shares shares = {__shfl_sync(kAllLanes, reached, kWarp - 1), -1, 0};
    const uint64_t point = point_of(shares.total);
    reached -= sum;
    int warp = -1;
    uint64_t before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (reached <= point && point - reached < mine[i]) {
            warp = lane * kEach + i;
            before = reached;
        }
        reached += mine[i];
    }
    const unsigned found = __ballot_sync(kAllLanes, warp >= 0);
    if (found != 0) {
        const int owner = __ffs(static_cast<int>(found)) - 1;
        shares.warp = __shfl_sync(kAllLanes, warp, owner);
        shares.before = __shfl_sync(kAllLanes, before, owner);
    }
    return shares;
}

// The elements of a warp's section.
struct Section {
    int begin, end;
};

template <typename T>
__device__ inline Section section_of(const LogitRow<T>& row, const Team& team) {
    const int whole = team.warps() * kWarp;
    const int span = (row.width + whole - 1) / whole * kWarp, begin = span * team.warp();
    return {begin, min(begin + span, row.width)};
}

// visit(element, index) for all of a warp's section. What is done with an element takes far longer than to read it:
// lanes have one at a time, so that many warps share a row, and read the next one ahead.
template <typename T, typename Visit>
__device__ inline void each(const LogitRow<T>& row, const Section& section, Visit&& visit) {
    int at = section.begin + static_cast<int>(threadIdx.x) % kWarp;
    if (at >= section.end) return;
    T next = row.x[at];
#pragma unroll 1
    for (; at < section.end; at += kWarp) {
        const T element = next;
        if (at + kWarp < section.end) next = row.x[at + kWarp];
        visit(element, at);
    }
}

// Where the sum of weight(element, index) over a warp's section passes `point`, in the lane that finds it; -1 in the
// others. Called by whole warps.
template <typename T, typename Weight>
__device__ inline int locate(const LogitRow<T>& row, const Section& section, uint64_t point, Weight&& weight) {
#pragma unroll 1
    for (int begin = section.begin; begin < section.end; begin += kWarp) {
        const int mine = begin + static_cast<int>(threadIdx.x) % kWarp;
        const uint64_t here = mine < section.end ? weight(row.x[mine], mine) : 0;
        const uint64_t reached = Team::warp_scan(here), total = __shfl_sync(kAllLanes, reached, kWarp - 1);
        if (point < total) return point >= reached - here && point < reached ? mine : -1;
        point -= total;
    }
    return -1;
}

// CTAs for each of `rows` rows: more where there are few rows, as long as every lane has some elements.
inline int team_size(const char* op, int64_t rows, int64_t width) {
    constexpr int kCtasOfSm = 3, kLeastOfLane = 2;
    const DeviceInfo device = current_device(op);
    if (device.arch < kClusterArch) return 1;
    int size = kMostTeam;
    while (size > 1 && (rows * size > kCtasOfSm * device.num_sms || width < size * kTeamThreads * kLeastOfLane))
        size /= 2;
    return size;
}

}  // namespace tide::cuda
