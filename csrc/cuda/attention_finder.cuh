// How a warp finds pieces by itself: lane i knows the i-th share of neighbouring rows. No barrier, no shared memory.
#pragma once

#include "cuda/attention_work.cuh"

namespace tide::cuda {

template <int kLanes>
class WarpFinder {
  public:
    // All lanes of the warp, when what rows are is written.
    __device__ explicit WarpFinder(const AttentionWork& p, const IndexReader& read = {})
        : share_(static_cast<int>((p.rows + 31) / 32)), first_(0), queries_(0), length_(0), upto_(0) {
        const int lane = threadIdx.x % 32, rows = static_cast<int>(p.rows);
        const int true_rows = static_cast<int>(count_rows(p.num_rows, p.rows));
        int mine = 0;
        for (int row = share_ * lane; row < min(share_ * (lane + 1), rows); ++row) {
            const RowWork work = read_row(p, row, read);  // without waiting for true_rows
            mine += row < true_rows ? work.num_pieces<kLanes>(p) : 0;
            if (row > share_ * lane) continue;
            first_ = work.first_query;
            queries_ = work.num_queries;
            length_ = work.length;
        }
        upto_ = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, upto_, step);
            if (lane >= step) upto_ += other;
        }
        total_ = __shfl_sync(~0u, upto_, 31);
        before_ = upto_ - mine;
    }

    // The same as another one that was saved: it need not stay in registers.
    static constexpr int kSaved = 5 * 32;
    __device__ WarpFinder(const AttentionWork& p, const int* saved)
        : share_(static_cast<int>((p.rows + 31) / 32)),
          first_(saved[threadIdx.x % 32]),
          queries_(saved[32 + threadIdx.x % 32]),
          length_(saved[64 + threadIdx.x % 32]),
          before_(saved[96 + threadIdx.x % 32]),
          upto_(saved[128 + threadIdx.x % 32]),
          total_(saved[128 + 31]) {}
    __device__ void save(int* to) const {
        int i = threadIdx.x % 32;
        for (const int value : {first_, queries_, length_, before_, upto_}) {
            to[i] = value;
            i += 32;
        }
    }

    __device__ int total() const { return total_; }

    // All lanes of the warp get the same piece. `index` is below total().
    __device__ Piece find(const AttentionWork& p, int index, const IndexReader& read = {}) const {
        const int share = __popc(__ballot_sync(~0u, upto_ <= index));
        int row = share_ * share, rest = index - __shfl_sync(~0u, before_, share);
        RowWork work(p, __shfl_sync(~0u, first_, share), __shfl_sync(~0u, queries_, share),
                     __shfl_sync(~0u, length_, share));
        for (int pieces; rest >= (pieces = work.num_pieces<kLanes>(p)); rest -= pieces) work = read_row(p, ++row, read);
        return piece_of<kLanes>(p, work, row, rest);
    }

  private:
    int share_;                     // rows of a lane
    int first_, queries_, length_;  // of the first of them
    int before_, upto_, total_;     // pieces: of the shares before, with this one, of all
};

}  // namespace tide::cuda
