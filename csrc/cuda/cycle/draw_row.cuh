// What a row of logits is drawn from, as tide_core/sampling/weights.py has it: whole-number weights, and the head of
// the ranking that top-k and top-p keep. Nothing is sorted: a radix search over the bits of the logits, four at a time,
// finds where the head ends.
#pragma once

#include "cuda/cycle/draw.h"
#include "cuda/cycle/draw_team.cuh"

namespace tide::cuda {

struct RowSettings {
    double temperature, top_p;
    int64_t top_k;
    float min_p;
    double least;

    static __device__ RowSettings of(const double* settings, int64_t rows, int64_t row) {
        const auto number = [&](int which) { return settings[which * rows + row]; };
        return {number(0), number(2), static_cast<int64_t>(number(1)), static_cast<float>(number(3)), number(4)};
    }
};

// The largest logit of a row; NaN stands above every number, and of equals the first counts.
struct Largest {
    float best;
    int index;

    __device__ bool is_finite() const { return isfinite(best); }
};

// Weights of tokens, in units of which the likeliest has `size`.
struct Weigher {
    float best, temperature, min_p;
    int bits;  // of the size

    static __device__ Weigher of(float best, const RowSettings& settings, int64_t vocabulary) {
        const float temperature = fmaxf(static_cast<float>(settings.temperature), 1.17549435e-38f);
        return {best, temperature, settings.min_p, 62 - (64 - __clzll(vocabulary))};
    }
    __device__ double size() const { return static_cast<double>(uint64_t{1} << bits); }
    __device__ float share(float x) const { return expf((x - best) / temperature); }
    // The whole part of share times size: the share's own bits, shifted.
    __device__ uint64_t weight_of_share(float share) const {
        const uint32_t raw = __float_as_uint(share), exponent = raw >> 23;
        const uint64_t mantissa = exponent ? (raw & 0x7fffffu) | 0x800000u : raw;
        const int shift = static_cast<int>(exponent ? exponent : 1) - 150 + bits;
        if (shift >= 0) return mantissa << shift;
        return shift > -32 ? mantissa >> -shift : 0;
    }
    __device__ uint64_t weight(float x) const { return weight_of_share(share(x)); }
    // After min-p.
    __device__ uint64_t final_weight(float x) const {
        const float here = share(x);
        return here < min_p ? 0 : weight_of_share(here);
    }
};

// The head of the ranking that is kept: logits above the cut, and those at it up to a place.
struct Head {
    float cut = -INFINITY;
    int last = INT32_MAX;

    __device__ bool keeps(float x, int index) const { return x > cut || (x == cut && index <= last); }
};

// Keys rank like the numbers they are made of.
template <typename T>
struct Keys {
    static constexpr int kBits = 8 * sizeof(T);
    static constexpr uint32_t kSign = 1u << (kBits - 1), kAll = kSign | (kSign - 1);

    static __device__ uint32_t of(T element) {
        uint32_t bits = 0;
        if constexpr (sizeof(T) == 2) {
            bits = *reinterpret_cast<const uint16_t*>(&element);
        } else {
            bits = __float_as_uint(element);
        }
        if (bits == kSign) return kSign;  // both zeros are equal
        return bits & kSign ? ~bits & kAll : bits | kSign;
    }
    static __device__ float number(uint32_t key) {
        const uint32_t bits = key & kSign ? key & ~kSign : ~key & kAll;
        if constexpr (sizeof(T) == 2) {
            const uint16_t narrow = static_cast<uint16_t>(bits);
            return to_float(*reinterpret_cast<const T*>(&narrow));
        } else {
            return __uint_as_float(bits);
        }
    }
};

template <typename T>
__device__ inline Largest largest_of(Team& team, const LogitRow<T>& row) {
    uint64_t most = 0;
#pragma unroll 1
    for (int at = team.thread() * kPack; at < row.width; at += team.threads() * kPack) {
        const Pack pack = load_pack(row.x + at, row.width - at, row.aligned, -INFINITY);
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
            const uint64_t rank = isnan(pack.at[i]) ? 0xffffffffu : Keys<float>::of(pack.at[i]);
            const uint64_t here = rank << 32 | static_cast<uint32_t>(~(at + i));
            if (here > most) most = here;
        }
    }
    most = team.most(most);
    const uint32_t rank = static_cast<uint32_t>(most >> 32);
    const uint32_t index = ~static_cast<uint32_t>(most);
    return {rank == 0xffffffffu ? NAN : Keys<float>::number(rank), static_cast<int>(index)};
}

struct Cut {
    bool reached;
    uint32_t key;
    uint64_t above;  // the amounts of elements above the key
    uint64_t at;     // and of those that have it
    uint64_t wanted;
};

// Where a search looks: at elements above the floor, none of them above the top. Those at or below the base, where that
// is higher than the floor, are known to lie below what is searched for.
struct Range {
    uint32_t floor, base, top;
};

// The largest key at or above which the amounts reach what is wanted. `wanted_of(total)` returns what is wanted of the
// total, at least 1. Not reached: `above` is the total.
template <typename T, typename Amount, typename WantedOf>
__device__ inline Cut select(Team& team, const LogitRow<T>& row, const Section& section, const Range& range,
                             Amount&& amount, WantedOf&& wanted_of) {
    static_assert(kTeamWarps == kBins, "every warp adds up one of the bins");
    TeamMemory& memory = team.memory();
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    uint32_t prefix = 0;
    uint64_t above = 0, at = 0, wanted = 0;
    const int highest = (31 - __clz((range.top - range.base) | 1)) / 4 * 4;
    for (int shift = highest; shift >= 0; shift -= 4) {
        const bool first = shift == highest;
#pragma unroll
        for (int bin = 0; bin < kBins - 1; ++bin) memory.bins[bin][threadIdx.x] = 0;
        uint64_t lowest = 0;
        each(row, section, [&](T element, int) {
            const uint32_t key = Keys<T>::of(element);
            const uint32_t rank = key > range.base ? key - range.base : 0;
            if (key <= range.floor || (!first && rank >> (shift + 4) != prefix)) return;
            const uint32_t bin = rank >> shift & (kBins - 1);
            const uint64_t here = amount(to_float(element));
            if (bin == 0) {
                lowest += here;
            } else {
                memory.bins[bin - 1][threadIdx.x] += here;
            }
        });
        lowest = Team::warp_total(lowest);
        if (lane == 0) memory.lowest[warp] = lowest;
        __syncthreads();
        uint64_t sum = 0;
        if (warp == 0) {
            sum = lane < kTeamWarps ? memory.lowest[lane] : 0;
        } else {
#pragma unroll
            for (int i = 0; i < kTeamThreads / kWarp; ++i) sum += memory.bins[warp - 1][i * kWarp + lane];
        }
        team.post(Team::warp_total(sum));
        // Bins from the highest down, one a lane.
        uint64_t mine = 0;
#pragma unroll
        for (int i = 0; i < kMostTeam / 2; ++i) {
            mine += team.posted_or_0((2 * i + lane / kBins) * kTeamWarps + kBins - 1 - lane % kBins);
        }
        mine += __shfl_xor_sync(kAllLanes, mine, kBins);
        if (lane >= kBins) mine = 0;
        const uint64_t reached = Team::warp_scan(mine);
        if (first) {
            const uint64_t total = __shfl_sync(kAllLanes, reached, kWarp - 1);
            wanted = wanted_of(total);
            if (total < wanted) return {false, range.floor, total, 0, wanted};
        }
        const int found = __ffs(static_cast<int>(__ballot_sync(kAllLanes, above + reached >= wanted))) - 1;
        above += __shfl_sync(kAllLanes, reached - mine, found);
        at = __shfl_sync(kAllLanes, mine, found);
        prefix = prefix << 4 | static_cast<uint32_t>(kBins - 1 - found);
    }
    return {true, range.base + prefix, above, at, wanted};
}

// The place of the element that is number `count` (from 1) of those with this key.
template <typename T>
__device__ inline int place_of_equal(Team& team, const LogitRow<T>& row, const Section& section, uint32_t key,
                                     uint64_t count) {
    uint64_t equal = 0;
    const auto is_equal = [&](T element, int) -> uint64_t { return Keys<T>::of(element) == key; };
    each(row, section, [&](T element, int index) { equal += is_equal(element, index); });
    const Shares shares = share_of_point(team, equal, [&](uint64_t) { return count - 1; });
    int place = -1;
    if (shares.warp == team.warp()) place = locate(row, section, count - 1 - shares.before, is_equal);
    return static_cast<int>(team.most(static_cast<uint64_t>(place + 1))) - 1;
}

// A key that what top-p keeps lies above: all tokens below it together weigh less than may be left out, even if the
// likeliest one is alone.
template <typename T>
__device__ inline uint32_t key_below(const Weigher& weigher, double top_p, int64_t width) {
    if (top_p > 0.999999) return 0;  // what may be left out is not much more than rounding
    const float share = static_cast<float>((1.0 - top_p) / static_cast<double>(2 * width));
    const float x = weigher.best + weigher.temperature * (logf(share) - 0.01f);
    return Keys<T>::of(from_float<T>(x)) - 1;
}

// What top-k and then top-p keep of a row whose largest logit is finite.
template <typename T>
__device__ inline Head head_of(Team& team, const LogitRow<T>& row, const Section& section, const Weigher& weigher,
                               const RowSettings& settings, int64_t vocabulary) {
    const int64_t top_k = settings.top_k;
    if (!(0 < top_k && top_k < vocabulary) && settings.top_p >= 1.0) return {};
    const uint32_t top = Keys<T>::of(from_float<T>(weigher.best));
    uint32_t key = 0;
    uint64_t equal = 0, equals = 0;
    if (0 < top_k && top_k < row.width) {
        const Cut cut = select(
            team, row, section, {0, 0, top}, [](float) { return uint64_t{1}; },
            [&](uint64_t) { return static_cast<uint64_t>(top_k); });
        key = cut.key;
        equal = static_cast<uint64_t>(top_k) - cut.above;
        equals = cut.at;
    }
    const uint64_t at_key = equal ? weigher.weight(Keys<T>::number(key)) : 0;
    const uint32_t below = key_below<T>(weigher, settings.top_p, row.width);
    const Cut cut = select(
        team, row, section, {key, below > key ? below : key, top}, [&](float x) { return weigher.weight(x); },
        [&](uint64_t above) {
            const uint64_t total = above + equal * at_key;
            const double share = ceil(static_cast<double>(static_cast<int64_t>(total)) * settings.top_p);
            const uint64_t needed = share < 1.0 ? 1 : static_cast<uint64_t>(share);
            return needed < total ? needed : total;
        });
    // The tokens at the end of the head are equally likely; so many of them are kept as are needed.
    const uint64_t each_weighs = cut.reached ? weigher.weight(Keys<T>::number(cut.key)) : at_key;
    const uint64_t needed = (cut.wanted - cut.above + each_weighs - 1) / each_weighs;
    if (cut.reached) equals = cut.at / each_weighs;
    const float number = Keys<T>::number(cut.key);
    return {number, needed == equals ? INT32_MAX : place_of_equal(team, row, section, cut.key, needed)};
}

// A point below `total` for a number in [0, 1), rounded as tide_core/sampling/draw.py rounds it.
__device__ inline uint64_t point_of(uint64_t total, double number) {
    return static_cast<uint64_t>(static_cast<int64_t>(static_cast<double>(static_cast<int64_t>(total)) * number));
}

// Inverse CDF in the order of places. One lane of the team gets the place, all others -1.
struct Drawn {
    uint64_t total;
    int place;
};

template <typename T, typename Weight>
__device__ inline Drawn draw_from(Team& team, const LogitRow<T>& row, const Section& section, double number,
                                  Weight&& weight) {
    uint64_t sum = 0;
    each(row, section, [&](T element, int index) { sum += weight(element, index); });
    const Shares shares = share_of_point(team, sum, [&](uint64_t total) { return point_of(total, number); });
    if (shares.warp != team.warp()) return {shares.total, -1};
    return {shares.total, locate(row, section, point_of(shares.total, number) - shares.before, weight)};
}

}  // namespace tide::cuda
