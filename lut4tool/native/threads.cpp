#include "threads.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace lut4tool {
namespace {

// A thread that sleeps is awake again after some 50 microseconds; the next product of a model comes sooner.
constexpr std::chrono::microseconds SPIN{60};

// Whether a condition holds within SPIN; another thread is about to make it so.
template <typename Condition>
bool spin_until(const Condition &condition) {
    for (const auto end = std::chrono::steady_clock::now() + SPIN; !condition();) {
        if (std::chrono::steady_clock::now() > end) return false;
#if defined(__x86_64__) && defined(__GNUC__)
        __builtin_ia32_pause();
#endif
    }
    return true;
}

struct Job {
    Job(std::size_t count, const std::function<void(std::size_t)> &what) : pieces(count), work(what) {}

    std::size_t pieces;
    const std::function<void(std::size_t)> &work;
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> done{0};  // changed under `mutex`
    std::mutex mutex;
    std::condition_variable finished;

    void help() {
        std::size_t mine = 0;
        for (std::size_t piece; (piece = next.fetch_add(1)) < pieces; ++mine) work(piece);
        if (mine == 0) return;
        const std::lock_guard<std::mutex> lock(mutex);
        if ((done += mine) == pieces) finished.notify_all();
    }

    void wait() {
        spin_until([this] { return done == pieces; });
        std::unique_lock<std::mutex> lock(mutex);
        finished.wait(lock, [this] { return done == pieces; });
    }
};

class Pool {
  public:
    // Ask for `helpers` threads on this job.
    void offer(const std::shared_ptr<Job> &job, std::size_t helpers) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            while (threads_ < helpers && start()) ++threads_;
            helpers = std::min(helpers, threads_);
            jobs_.insert(jobs_.end(), helpers, job);
            waiting_ = jobs_.size();
        }
        for (std::size_t i = 0; i < helpers; ++i) wanted_.notify_one();
    }

  private:
    bool start() {
        try {
            std::thread([this] { serve(); }).detach();
            return true;
        } catch (const std::system_error &) {
            return false;  // no further thread to be had: those that there are do the work
        }
    }

    void serve() {
        for (;;) {
            std::shared_ptr<Job> job;
            spin_until([this] { return waiting_ > 0; });
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wanted_.wait(lock, [this] { return !jobs_.empty(); });
                job = std::move(jobs_.front());
                jobs_.pop_front();
                waiting_ = jobs_.size();
            }
            job->help();
        }
    }

    std::mutex mutex_;
    std::condition_variable wanted_;
    std::deque<std::shared_ptr<Job>> jobs_;
    std::atomic<std::size_t> waiting_{0};  // how many jobs_ has: for threads that spin without the lock
    std::size_t threads_ = 0;
};

// Never destroyed: its threads may be asleep in it when the process ends. A forked child has no threads: a new pool.
std::atomic<Pool *> pool{nullptr};

Pool &the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool = new Pool;
#ifndef _WIN32
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
#endif
    });
    return *pool;
}

}  // namespace

void parallel(std::size_t pieces, unsigned threads, const std::function<void(std::size_t)> &work) {
    const std::size_t machine = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t used = std::min({pieces, std::size_t(std::max(1u, threads)), machine});
    if (used <= 1) {
        for (std::size_t piece = 0; piece < pieces; ++piece) work(piece);
        return;
    }
    const auto job = std::make_shared<Job>(pieces, work);
    the_pool().offer(job, used - 1);
    job->help();
    job->wait();
}

namespace {

// Pieces [first, first + count) of each phase; the tickets of all phases before are taken when one begins.
struct alignas(64) Share {
    std::size_t first = 0, count = 0;
    std::atomic<std::size_t> ticket{0};

    bool take(std::size_t phase, std::size_t &piece) {
        std::size_t next = ticket.load(std::memory_order_relaxed);
        do {
            if (next >= (phase + 1) * count) return false;
        } while (!ticket.compare_exchange_weak(next, next + 1, std::memory_order_relaxed));
        piece = first + next - phase * count;
        return true;
    }
};

}  // namespace

void parallel_phases(std::size_t phases, std::size_t pieces, unsigned threads,
                     const std::function<void(std::size_t, std::size_t, std::size_t)> &work) {
    const std::size_t machine = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t workers = std::max<std::size_t>(1, std::min({pieces, std::size_t(threads), machine}));
    std::unique_ptr<Share[]> shares(new Share[workers]);
    for (std::size_t w = 0; w < workers; ++w) {
        shares[w].first = pieces * w / workers;
        shares[w].count = pieces * (w + 1) / workers - shares[w].first;
    }
    std::atomic<std::size_t> done{0};
    parallel(workers, threads, [&](std::size_t worker) {
        for (std::size_t phase = done.load(std::memory_order_acquire) / std::max<std::size_t>(pieces, 1); phase < phases; ++phase) {
            for (std::size_t other = 0; other < workers; ++other) {
                Share &share = shares[(worker + other) % workers];
                for (std::size_t piece; share.take(phase, piece);) {
                    work(phase, piece, worker);
                    done.fetch_add(1, std::memory_order_release);
                }
            }
            const auto over = [&] { return done.load(std::memory_order_acquire) >= (phase + 1) * pieces; };
            if (!spin_until(over))
                while (!over()) std::this_thread::yield();
        }
    });
}

}  // namespace lut4tool
