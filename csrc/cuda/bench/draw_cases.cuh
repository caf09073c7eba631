// Rows to draw from and cycles to verify.
#pragma once

#include "cuda/bench/support.cuh"
#include "cuda/cycle/draw.h"

namespace tide::cuda::bench {

struct Settings {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
};

inline double number_of(uint64_t stream, uint64_t index) {  // in [0, 1)
    return static_cast<double>(noise(index, 100 + stream)) * 0.5 + 0.5;
}

template <typename T>
class Logits {
  public:
    Logits(int64_t rows, int64_t width, uint64_t seed, float spread) : width_(width), data_(rows * width * sizeof(T)) {
        fill(data_.template get<T>(), rows * width, seed, spread);
    }
    T* get() const { return data_.template get<T>(); }
    int64_t width() const { return width_; }

  private:
    int64_t width_;
    Buffer data_;
};

class Taken : public Buffer {
  public:
    using Buffer::Buffer;
    template <typename T>
    std::vector<T> take(int64_t count) const {
        std::vector<T> values(count);
        require(cudaDeviceSynchronize());
        require(cudaMemcpy(values.data(), get(), count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
};

inline std::vector<double> table_of(const Settings& s, int64_t rows) {
    std::vector<double> table;
    for (const double value : {s.temperature, static_cast<double>(s.top_k), s.top_p, s.min_p, -INFINITY + 0.0}) {
        table.insert(table.end(), rows, value);
    }
    return table;
}

template <typename T>
class DrawCase {
  public:
    DrawCase(const Logits<T>& logits, const Settings& s, int64_t vocabulary, int64_t rows)
        : places(rows * 8),
          heads(rows * kHeadNumbers * 8),
          settings_(rows * kDrawSettings * 8),
          numbers_(rows * 8),
          params_{} {
        std::vector<double> numbers(rows);
        for (int64_t r = 0; r < rows; ++r) numbers[r] = number_of(0, r);
        settings_.put(table_of(s, rows));
        numbers_.put(numbers);
        params_ = {logits.get(),          settings_.get<double>(), numbers_.get<double>(),
                   places.get<int64_t>(), heads.get<double>(),     rows,
                   logits.width(),        logits.width(),          vocabulary};
    }
    void run(cudaStream_t stream) const { draw(dtype_of<T>(), params_, stream); }

    Taken places, heads;

  private:
    Buffer settings_, numbers_;
    DrawParams params_;
};

// Rows with as many drafts each. The last draft of every fifth row has a score that is no number.
template <typename T>
class VerifyCase {
  public:
    VerifyCase(int64_t rows, int64_t drafts, int64_t vocabulary, int64_t shortlist, float spread, const Settings& s)
        : tokens(rows * (drafts + 1)),
          deep(tokens, vocabulary, 21, spread),
          shallow(drafts * rows > 0 ? drafts * rows : 1, shortlist, 22, spread),
          found(tokens * 8),
          rows_(rows),
          drafts_(drafts),
          step_(vocabulary / shortlist),
          ids_(drafts * rows * 8),
          draft_(shallow, s, vocabulary, drafts * rows),
          settings_(rows * kDrawSettings * 8),
          numbers_(3 * tokens * 8),
          scores_(drafts * rows * 4),
          sources_(tokens * 8),
          counts_(rows * 4 + 4),
          places_(vocabulary * 4),
          best_(tokens * 4) {
        std::vector<int64_t> sources;
        std::vector<int32_t> places(vocabulary, -1), counts(rows, static_cast<int32_t>(drafts));
        for (int64_t i = 0; i < shortlist; ++i) places[id(i)] = static_cast<int32_t>(i);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t ahead = 0; ahead <= drafts; ++ahead) sources.push_back(ahead * rows + r);
        }
        counts.push_back(static_cast<int32_t>(tokens));
        std::vector<double> numbers;
        for (int stream = 0; stream < 3; ++stream) {
            for (int64_t at = 0; at < tokens; ++at) numbers.push_back(number(stream, at));
        }
        std::vector<float> scores(drafts * rows, 0.5f);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t ahead = 0; ahead < drafts; ++ahead) {
                if (is_broken(r, ahead)) scores[ahead * rows + r] = NAN;
            }
        }
        places_.put(places);
        counts_.put(counts);
        sources_.put(sources);
        numbers_.put(numbers);
        scores_.put(scores);
        settings_.put(table_of(s, rows));
        draft_.run(nullptr);
        ids_.put(drafted());
        const double* all = numbers_.get<double>();
        params_ = {deep.get(),
                   sources_.get<int64_t>(),
                   counts_.get<int32_t>() + rows,
                   counts_.get<int32_t>(),
                   settings_.get<double>(),
                   all,
                   all + tokens,
                   all + 2 * tokens,
                   scores_.get<float>(),
                   ids_.get<int64_t>(),
                   shallow.get(),
                   draft_.heads.template get<double>(),
                   places_.get<int32_t>(),
                   best_.get<float>(),
                   found.template get<int64_t>(),
                   tokens,
                   rows,
                   drafts,
                   vocabulary,
                   shortlist,
                   vocabulary};
    }
    void run(cudaStream_t stream) const { verify_drawn(dtype_of<T>(), params_, stream); }
    double number(int stream, int64_t source) const { return number_of(10 + stream, source); }
    int64_t id(int64_t place) const { return place * step_; }
    bool is_broken(int64_t r, int64_t ahead) const { return r % 5 == 4 && ahead + 1 == drafts_; }
    std::vector<int64_t> drafted() const {
        std::vector<int64_t> ids = draft_.places.template take<int64_t>(drafts_ * rows_);
        for (int64_t& place : ids) place = id(place);
        return ids;
    }

    int64_t tokens;
    Logits<T> deep, shallow;
    Taken found;

  private:
    int64_t rows_, drafts_, step_;
    Buffer ids_;
    DrawCase<T> draft_;
    Buffer settings_, numbers_, scores_, sources_, counts_, places_, best_;
    VerifyDrawnParams params_ = {};
};

}  // namespace tide::cuda::bench
