#include "threads.h"

#include <algorithm>
#include <atomic>
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

struct Job {
    Job(std::size_t count, const std::function<void(std::size_t)> &what) : pieces(count), work(what) {}

    std::size_t pieces;
    const std::function<void(std::size_t)> &work;
    std::atomic<std::size_t> next{0};
    std::size_t done = 0;  // under `mutex`, as the condition below
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
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wanted_.wait(lock, [this] { return !jobs_.empty(); });
                job = std::move(jobs_.front());
                jobs_.pop_front();
            }
            job->help();
        }
    }

    std::mutex mutex_;
    std::condition_variable wanted_;
    std::deque<std::shared_ptr<Job>> jobs_;
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

}  // namespace lut4tool
