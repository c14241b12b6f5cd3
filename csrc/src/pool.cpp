#include "lmcache/pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace lmcache {
namespace {

constexpr unsigned kMaxHelpers = 31;

struct Job {
    void (*task)(void*, std::size_t);
    void* context;
    std::size_t tasks;
    unsigned wanted;       // helpers that may still join
    unsigned running = 0;  // helpers inside
    std::atomic<std::size_t> next{0};
    std::condition_variable idle{};
    Job* after = nullptr;

    void work() {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
            task(context, i);
    }
};

struct Pool {
    std::mutex mutex;
    std::condition_variable wake;
    Job* jobs = nullptr;
    unsigned helpers = 0;

    void run(Job& job) {
        const unsigned most = job.wanted;
        {
            std::lock_guard lock(mutex);
            while (helpers < most && start()) ++helpers;
            job.after = jobs;
            jobs = &job;
        }
        for (unsigned i = 0; i < most; ++i) wake.notify_one();
        job.work();
        std::unique_lock lock(mutex);
        for (Job** at = &jobs; *at; at = &(*at)->after) {
            if (*at == &job) {
                *at = job.after;
                break;
            }
        }
        job.idle.wait(lock, [&] { return job.running == 0; });
    }

    bool start() {
        // Signals belong to the threads of the host program.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([this] { help(); }).detach();
        } catch (const std::system_error&) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    void help() {
        std::unique_lock lock(mutex);
        for (;;) {
            Job* job = jobs;
            while (job && job->wanted == 0) job = job->after;
            if (!job) {
                wake.wait(lock);
                continue;
            }
            --job->wanted;
            ++job->running;
            lock.unlock();
            job->work();
            lock.lock();
            if (--job->running == 0) job->idle.notify_one();
        }
    }
};

// Never destroyed: helpers may be asleep in it while the process ends. A forked child has none of
// the helpers and maybe a locked mutex, so it begins with a new pool.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        pool.store(new Pool);
        pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
    });
    return *pool.load();
}

}  // namespace

void parallel(std::size_t tasks, unsigned threads, void (*task)(void*, std::size_t),
              void* context) {
    const auto most =
        static_cast<unsigned>(std::min<std::size_t>({threads, tasks, kMaxHelpers + 1}));
    if (most <= 1) {
        for (std::size_t i = 0; i < tasks; ++i) task(context, i);
        return;
    }
    Job job{.task = task, .context = context, .tasks = tasks, .wanted = most - 1};
    the_pool().run(job);
}

}  // namespace lmcache
