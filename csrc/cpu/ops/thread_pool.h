// A small pool of persistent threads. No OpenMP: Torch brings its own copy of that runtime, and two of
// them in one process fight over the cores.
#pragma once

#include <cstdint>

namespace tide {

// How many threads, the caller included, share one call (1 to 256). Starts as the number of hardware threads.
void set_num_threads(int count);
int num_threads();

// Non-owning reference to a callable `void(int64_t first, int64_t last)`.
class RangeBody {
  public:
    template <typename Body>
    RangeBody(const Body& body)  // NOLINT: implicit on purpose
        : body_(&body),
          call_([](const void* b, int64_t first, int64_t last) { (*static_cast<const Body*>(b))(first, last); }) {}
    void operator()(int64_t first, int64_t last) const { call_(body_, first, last); }

  private:
    const void* body_;
    void (*call_)(const void*, int64_t, int64_t);
};

// Calls body over [0, count) in pieces of `grain`, on this thread and on idle workers. Each thread has a
// stretch of neighbouring pieces and helps the others when it is done: a thread that lost its core finds
// the work done, and no caller waits for a worker that has not begun. If another thread is
// already using the pool, the whole range runs on the calling thread. `body` must not throw.
void parallel_for(int64_t count, int64_t grain, const RangeBody& body);

// Float32 working memory of the calling thread, kept between calls; valid until its next call.
float* thread_scratch(int64_t num_floats);

}  // namespace tide
