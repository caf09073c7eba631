// Draws and verified drafts against plain code on the host, which sorts; shares come from the device, so that every
// whole number must be the same.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/bench/draw_cases.cuh"

namespace tide::cuda::bench {
namespace {

int64_t total_of(const std::vector<int64_t>& weights) {
    int64_t total = 0;
    for (const int64_t weight : weights) total += weight;
    return total;
}

int64_t inverse_cdf(const std::vector<int64_t>& weights, double number) {
    const int64_t point = static_cast<int64_t>(static_cast<double>(total_of(weights)) * number);
    int64_t reached = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
        reached += weights[i];
        if (reached > point) return static_cast<int64_t>(i);
    }
    return -1;
}

// Steps 7 to 10 of the sampler on the logits of one row.
std::vector<int64_t> weights_of(const std::vector<float>& x, const std::vector<float>& shares, const Settings& s,
                                int64_t vocabulary) {
    int bits = 0;
    while (vocabulary >> bits) ++bits;
    std::vector<int64_t> weights(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        weights[i] = static_cast<int64_t>(static_cast<double>(shares[i]) * std::ldexp(1.0, 62 - bits));
    }
    if ((0 < s.top_k && s.top_k < vocabulary) || s.top_p < 1.0) {
        std::vector<int32_t> order(x.size());
        for (size_t i = 0; i < x.size(); ++i) order[i] = static_cast<int32_t>(i);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
        const size_t limit = s.top_k > 0 ? std::min<size_t>(s.top_k, x.size()) : x.size();
        int64_t total = 0, before = 0;
        for (size_t i = 0; i < limit; ++i) total += weights[order[i]];
        const int64_t share = static_cast<int64_t>(std::ceil(static_cast<double>(total) * s.top_p));
        const int64_t needed = std::min(std::max<int64_t>(share, 1), total);
        for (size_t i = 0; i < order.size(); ++i) {
            const bool kept = i < limit && before < needed;
            if (i < limit) before += weights[order[i]];
            if (!kept) weights[order[i]] = 0;
        }
    }
    for (size_t i = 0; i < x.size(); ++i) {
        if (shares[i] < static_cast<float>(s.min_p)) weights[i] = 0;
    }
    return weights;
}

int64_t largest(const std::vector<float>& x) {
    return std::max_element(x.begin(), x.end()) - x.begin();
}

std::vector<double> chances_of(const std::vector<int64_t>& weights) {
    const double total = static_cast<double>(total_of(weights));
    std::vector<double> chances(weights.size());
    for (size_t i = 0; i < weights.size(); ++i) chances[i] = static_cast<double>(weights[i]) / total;
    return chances;
}

std::string name_of_case(const char* op, const char* type, int64_t rows, int64_t width, const Settings& s) {
    return std::string(op) + " " + type + " rows=" + std::to_string(rows) + " width=" + std::to_string(width) +
           " t=" + std::to_string(s.temperature) + " k=" + std::to_string(s.top_k) + " p=" + std::to_string(s.top_p) +
           " m=" + std::to_string(s.min_p);
}

template <typename T>
void check_draws(int64_t rows, int64_t width, int64_t vocabulary, float spread, const Settings& s) {
    const Logits<T> logits(rows, width, 11, spread);
    const DrawCase<T> one(logits, s, vocabulary, rows);
    one.run(nullptr);
    const std::vector<int64_t> got = one.places.template take<int64_t>(rows);
    int wrong = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const std::vector<float> x = logits.row(r);
        int64_t want = largest(x);
        if (s.temperature > 0) {
            want = inverse_cdf(weights_of(x, logits.shares(r, s.temperature), s, vocabulary), number_of(0, r));
        }
        wrong += want != got[r];
    }
    expect(wrong == 0, name_of_case("draw", name_of<T>(), rows, width, s) + ": " + std::to_string(wrong) + " wrong");
}

template <typename T>
void check_verified(int64_t rows, int64_t drafts, int64_t vocabulary, int64_t shortlist, float spread,
                    const Settings& s) {
    const VerifyCase<T> one(rows, drafts, vocabulary, shortlist, spread, s);
    one.run(nullptr);
    const std::vector<int64_t> got = one.found.template take<int64_t>(one.tokens);
    int wrong = 0, accepted = 0;
    for (int64_t t = 0; t < one.tokens; ++t) {
        const int64_t r = t / (drafts + 1), ahead = t % (drafts + 1), source = ahead * rows + r;
        const std::vector<float> x = one.deep.row(t);
        int64_t want = largest(x);
        if (s.temperature > 0) {
            const std::vector<int64_t> weights = weights_of(x, one.deep.shares(t, s.temperature), s, vocabulary);
            if (ahead == drafts || one.is_broken(r, ahead)) {
                want = inverse_cdf(weights, one.number(0, source));
            } else {
                const int64_t at = source;
                std::vector<double> p = chances_of(weights), q(p.size(), 0.0);
                const std::vector<double> said =
                    chances_of(weights_of(one.shallow.row(at), one.shallow.shares(at, s.temperature), s, vocabulary));
                for (int64_t i = 0; i < shortlist; ++i) q[one.id(i)] = said[i];
                const int64_t draft = one.drafted()[at];
                double most = 0.0;
                std::vector<int64_t> rest(p.size());
                for (size_t i = 0; i < p.size(); ++i) most = std::max(most, p[i] - q[i]);
                int bits = 0;
                while (vocabulary >> bits) ++bits;
                for (size_t i = 0; i < p.size(); ++i) {
                    rest[i] = static_cast<int64_t>(std::max(p[i] - q[i], 0.0) / most * std::ldexp(1.0, 62 - bits));
                }
                const bool accept = one.number(1, source) * q[draft] < p[draft] || most <= 0.0;
                accepted += accept;
                want = accept ? draft : inverse_cdf(rest, one.number(2, source));
            }
        }
        wrong += want != got[t];
    }
    expect(wrong == 0, name_of_case("verify", name_of<T>(), rows, vocabulary, s) + " drafts=" + std::to_string(drafts) +
                           ": " + std::to_string(wrong) + " of " + std::to_string(one.tokens) + " wrong, " +
                           std::to_string(accepted) + " accepted");
}

template <typename T>
void check_type() {
    const Settings settings[] = {{0.0, 0, 1.0, 0.0},    {1.0, 0, 1.0, 0.0},        {0.7, 0, 0.9, 0.0},
                                 {1.0, 5, 1.0, 0.0},    {1.3, 50, 0.8, 0.0},       {0.9, 0, 1.0, 0.05},
                                 {0.9, 40, 0.95, 0.1},  {100.0, 0, 0.5, 0.0},      {1e-40, 7, 0.3, 0.0},
                                 {0.8, 1, 1e-9, 0.999}, {2.0, 1000000, 0.999, 0.0}};
    for (const Settings& s : settings) {
        for (const int64_t width : {1, 7, 300, 4096, 49152}) check_draws<T>(3, width, width, 4.0f, s);
        check_draws<T>(2, 8192, 49152, 2.0f, s);
        check_draws<T>(12, 20001, 20001, 0.01f, s);  // many equals
        check_draws<T>(140, 3000, 3000, 8.0f, s);
        check_verified<T>(3, 2, 1000, 300, 2.0f, s);
        check_verified<T>(2, 4, 49152, 8192, 2.0f, s);
        check_verified<T>(17, 3, 2111, 700, 0.02f, s);
        check_verified<T>(1, 0, 128256, 2, 3.0f, s);
    }
    check_draws<T>(1, kMostVocabulary, kMostVocabulary, 4.0f, settings[2]);
}

}  // namespace

void check_draw() {
    check_type<__nv_bfloat16>();
    check_type<__half>();
    check_type<float>();
}

}  // namespace tide::cuda::bench
