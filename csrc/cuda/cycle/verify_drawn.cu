// The token of full depth after every token of a cycle: whether the draft there is accepted, and if not what comes
// instead. Drawn drafts by the rejection rule of tide_core/exits/verify.py, all else by a plain choice.
#include "cuda/cycle/draw_row.cuh"

namespace tide::cuda {
namespace {

// Divides by one number again and again, to the last bit as a division does: a quotient that is off by less than the
// distance of two neighbours becomes the rounded one in one more step (Markstein, 1990). Nothing here comes near the
// ends of the range of doubles.
struct Divisor {
    double number, inverse;

    static __device__ Divisor of(double number) { return {number, __drcp_rn(number)}; }
    __device__ double divides(double dividend) const {
        double quotient = dividend * inverse;
#pragma unroll
        for (int step = 0; step < 2; ++step) quotient = fma(fma(-quotient, number, dividend), inverse, quotient);
        return quotient;
    }
};

// What full depth would draw a token with, or an exit: chances are those of tide_core/sampling.
template <typename T>
struct Chances {
    Weigher weigher;
    Head head;
    Divisor total;

    __device__ uint64_t weight(T element, int index) const {
        const float x = to_float(element);
        return head.keeps(x, index) ? weigher.final_weight(x) : 0;
    }
    __device__ double of(T element, int index) const {
        const uint64_t here = weight(element, index);
        return here == 0 ? 0.0 : total.divides(static_cast<double>(static_cast<int64_t>(here)));
    }
};

template <typename T>
struct Proposal {
    Chances<T> chances;
    const T* logits;        // [shortlist]
    const int32_t* places;  // [vocabulary]
    int64_t given;          // a suffix draft, whose chance is 1; -1: none

    __device__ double of(int64_t token) const {
        if (given >= 0) return token == given ? 1.0 : 0.0;
        const int32_t place = places[token];
        return place < 0 ? 0.0 : chances.of(logits[place], place);
    }
};

template <typename T>
__device__ Proposal<T> proposal_of(const VerifyDrawnParams& p, int64_t source, const RowSettings& settings) {
    const double* numbers = p.draft_heads + source * kHeadNumbers;
    if (numbers[3] == 0.0) return {{}, nullptr, nullptr, p.draft_ids[source]};  // no exit drew it
    const Weigher weigher = Weigher::of(static_cast<float>(numbers[0]), settings, p.vocabulary);
    const Head head = {static_cast<float>(numbers[1]), static_cast<int>(numbers[2])};
    return {{weigher, head, Divisor::of(numbers[3])},
            static_cast<const T*>(p.draft_logits) + source * p.shortlist,
            p.places,
            -1};
}

// Whether a draft follows the token: the row has one there, and every score up to it is a number that is high enough.
__device__ bool is_drafted(const VerifyDrawnParams& p, int64_t row, int64_t draft_index, double least) {
    if (draft_index >= p.counts[row]) return false;
    for (int64_t before = 0; before <= draft_index; ++before) {
        const float score = p.scores[before * p.rows + row];
        if (!isfinite(score) || !(score >= least)) return false;
    }
    return true;
}

// The token that follows, in at least one lane of the team, -1 in the others.
template <typename T>
__device__ int64_t verified_token(Team& team, const VerifyDrawnParams& p, const LogitRow<T>& row,
                                  const Section& section, Chances<T> full, int64_t source,
                                  const RowSettings& settings) {
    const auto weight = [&](T element, int index) { return full.weight(element, index); };
    const int64_t r = source % p.rows, draft_index = source / p.rows;
    if (!is_drafted(p, r, draft_index, settings.least))
        return draw_from(team, row, section, p.plain[source], weight).place;
    uint64_t sum = 0;
    each(row, section, [&](T element, int index) { sum += weight(element, index); });
    const Shares shares = share_of_point(team, sum, [](uint64_t) { return uint64_t{0}; });
    full.total = Divisor::of(static_cast<double>(static_cast<int64_t>(shares.total)));
    const Proposal<T> proposal = proposal_of<T>(p, source, settings);
    const int64_t draft = p.draft_ids[source];
    if (p.accept[source] * proposal.of(draft) < full.of(row.x[draft], draft)) return draft;

    // What full depth has more than the exit. Chances of 0 have no rest, so most tokens are done with at once.
    const auto rest = [&](T element, int index) {
        const double chance = full.of(element, index);
        if (chance == 0.0) return 0.0;
        const double more = chance - proposal.of(index);
        return more > 0.0 ? more : 0.0;
    };
    double largest = 0.0;
    uint64_t least = 1;  // a weight whose chance alone may be more than the largest rest so far
    each(row, section, [&](T element, int index) {
        if (full.weight(element, index) < least) return;
        const double here = rest(element, index);
        if (here <= largest) return;
        largest = here;
        least = static_cast<uint64_t>(static_cast<int64_t>(here * full.total.number * 0.999));
    });
    // Doubles from 0 up rank like their bits.
    const double most =
        __longlong_as_double(static_cast<long long>(team.most(static_cast<uint64_t>(__double_as_longlong(largest)))));
    if (most <= 0.0) return draft;  // the exit covers full depth up to rounding, so the draft is as good as any
    const Divisor by = Divisor::of(most);
    const double size = full.weigher.size();
    return draw_from(team, row, section, p.residual[source],
                     [&](T element, int index) {
                         return static_cast<uint64_t>(static_cast<int64_t>(by.divides(rest(element, index)) * size));
                     })
        .place;
}

template <typename T>
__global__ void __launch_bounds__(kTeamThreads, 2) verify_kernel(VerifyDrawnParams p, int size, bool aligned) {
    extern __shared__ __align__(16) char shared[];
    let_next_start();
    wait_for_previous();
    Team team(reinterpret_cast<TeamMemory*>(shared), size);
    const int64_t t = blockIdx.x / size;
    const bool first = team.warp() == 0 && threadIdx.x == 0;
    if (t >= *p.num_tokens) {
        if (first) {
            p.best[t] = 0.0f;
            p.ids[t] = 0;
        }
        return;  // the whole team, before any exchange
    }
    const LogitRow<T> row = {static_cast<const T*>(p.logits) + t * p.logits_stride, static_cast<int>(p.vocabulary),
                             aligned};
    const Section section = section_of(row, team);
    const int64_t source = p.sources[t];
    const RowSettings settings = RowSettings::of(p.settings, p.rows, source % p.rows);
    const Largest largest = largest_of(team, row);
    if (first) p.best[t] = largest.best;
    if (settings.temperature == 0.0 || !largest.is_finite()) {
        if (first) p.ids[t] = largest.index;
    } else {
        const Weigher weigher = Weigher::of(largest.best, settings, p.vocabulary);
        const Head head = head_of(team, row, section, weigher, settings, p.vocabulary);
        const int64_t token =
            verified_token<T>(team, p, row, section, {weigher, head, Divisor::of(1.0)}, source, settings);
        if (token >= 0) p.ids[t] = token;
    }
    team.barrier();
}

}  // namespace

void verify_drawn(DType dtype, const VerifyDrawnParams& p, cudaStream_t stream) {
    if (p.tokens == 0) return;
    const int size = team_size("verify_drawn", p.tokens, p.vocabulary);
    with_storage("verify_drawn", dtype, [&](auto storage) {
        using T = typename decltype(storage)::Type;
        launch("verify_drawn", verify_kernel<T>, LaunchShape{p.tokens * size, kTeamThreads, sizeof(TeamMemory), size},
               stream, p, size, is_aligned(p.logits, p.logits_stride, sizeof(T)));
    });
}

}  // namespace tide::cuda
