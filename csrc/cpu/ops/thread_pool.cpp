#include "cpu/ops/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace tide {
namespace {

// Decode ops follow one another every 50 to 100 us and waking a sleeping thread takes about 50 us, so a
// worker looks out for the next job this long before it sleeps.
constexpr auto kSpinTime = std::chrono::microseconds(100);
constexpr int kMaxThreads = 256;
constexpr int kSpinsPerClockRead = 64;
constexpr int kSpinsBeforeYield = 10000;

void relax() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // a short pause; "yield" does nothing on most cores
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    void run(int64_t count, int64_t grain, const RangeBody& body, int workers) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) {
            body(0, count);
            return;
        }
        grow(workers);
        deal(count, grain, workers + 1);
        job_body_ = &body;
        job_grain_ = grain;
        open_.store(true);
        number_.fetch_add(1);
        if (sleepers_.load() > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_);
            }
            wake_.notify_all();
        }
        work(0);
        // From here no worker can join: either it sees the job closed or we see it active.
        open_.store(false);
        for (int spins = 0; active_.load() != 0; ++spins) {
            if (spins < kSpinsBeforeYield)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    void grow(int workers) {
        for (; num_workers_ < workers; ++num_workers_) {
            try {
                std::thread(&Pool::serve, this, num_workers_).detach();
            } catch (const std::system_error&) {
                return;  // the machine has no thread to give; the caller does the work
            }
        }
    }

    // One stretch of the range for each thread, so that a thread walks neighbouring memory.
    void deal(int64_t count, int64_t grain, int threads) {
        const int64_t pieces = (count + grain - 1) / grain;
        for (int i = 0; i < threads; ++i) {
            stretches_[i].next.store(pieces * i / threads * grain, std::memory_order_relaxed);
            stretches_[i].end = std::min(count, pieces * (i + 1) / threads * grain);
        }
        num_stretches_ = threads;
    }

    // Takes the pieces of its own stretch, then helps with those of the others.
    void work(int own) {
        for (int i = 0; i < num_stretches_; ++i) {
            Stretch& stretch = stretches_[(own + i) % num_stretches_];
            for (;;) {
                const int64_t first = stretch.next.fetch_add(job_grain_, std::memory_order_relaxed);
                if (first >= stretch.end) break;
                (*job_body_)(first, std::min(first + job_grain_, stretch.end));
            }
        }
    }

    // The life of a worker. It never ends: at exit the process takes it along, asleep or spinning on
    // memory that is never freed.
    void serve(int index) {
        uint64_t seen = 0;
        for (;;) {
            seen = wait_for_job(seen);
            active_.fetch_add(1);
            if (open_.load() && index + 1 < num_stretches_) work(index + 1);
            active_.fetch_sub(1);
        }
    }

    uint64_t wait_for_job(uint64_t seen) {
        const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
        for (int spins = 1;; ++spins) {
            const uint64_t number = number_.load(std::memory_order_acquire);
            if (number != seen) return number;
            if (spins % kSpinsPerClockRead == 0 && std::chrono::steady_clock::now() >= deadline) break;
            relax();
        }
        std::unique_lock<std::mutex> lock(sleep_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return number_.load() != seen; });
        sleepers_.fetch_sub(1);
        return number_.load();
    }

    std::mutex turn_;  // held by the thread whose job it is
    int num_workers_ = 0;

    // The job. Written only while no worker is active and open_ is false.
    struct alignas(64) Stretch {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    const RangeBody* job_body_ = nullptr;
    int64_t job_grain_ = 1;
    int num_stretches_ = 0;
    Stretch stretches_[kMaxThreads];
    alignas(64) std::atomic<uint64_t> number_{0};  // of jobs so far
    std::atomic<bool> open_{false};
    alignas(64) std::atomic<int> active_{0};

    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> sleepers_{0};
};

std::atomic<Pool*> shared_pool{nullptr};
std::atomic<int> configured_threads{0};

// Threads do not survive fork: the child forgets the pool, locks and all, and builds its own when needed.
void forget_pool() {
    shared_pool.store(nullptr);
}

// When the module is loaded, not by the first call: a child that is forked during the first call would find the guard
// of a local static taken, and wait for ever.
[[maybe_unused]] const int kForkHandler = pthread_atfork(nullptr, nullptr, forget_pool);
const int kHardwareThreads = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);

Pool& pool() {
    if (Pool* existing = shared_pool.load()) return *existing;
    Pool* fresh = new Pool;  // never deleted: workers may outlive static destruction
    Pool* expected = nullptr;
    if (shared_pool.compare_exchange_strong(expected, fresh)) return *fresh;
    delete fresh;  // another thread was first; this one has no workers yet
    return *expected;
}

}  // namespace

void set_num_threads(int count) {
    configured_threads.store(std::clamp(count, 1, kMaxThreads));
}

int num_threads() {
    const int count = configured_threads.load(std::memory_order_relaxed);
    return count > 0 ? count : kHardwareThreads;
}

void parallel_for(int64_t count, int64_t grain, const RangeBody& body) {
    if (count <= 0) return;
    const int64_t pieces = (count + grain - 1) / grain;
    const int workers = static_cast<int>(std::min<int64_t>(num_threads(), pieces)) - 1;
    if (workers <= 0)
        body(0, count);
    else
        pool().run(count, grain, body, workers);
}

float* thread_scratch(int64_t num_floats) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < num_floats) memory.resize(num_floats);
    return memory.data();
}

}  // namespace tide
