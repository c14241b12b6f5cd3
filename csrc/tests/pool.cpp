#include "lmcache/pool.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.hpp"

using namespace lmcache;

namespace {

void every_task_runs_once(std::size_t tasks, unsigned threads) {
    std::vector<int> runs(tasks, 0);  // plain: each task has its own
    auto task = [&](std::size_t i) { ++runs[i]; };
    parallel(tasks, threads, task);
    for (const int count : runs) CHECK(count == 1);
}

}  // namespace

void test_pool() {
    for (const unsigned threads : {1U, 2U, 5U, 1000U}) {
        for (const std::size_t tasks : {0, 1, 2, 3, 100}) every_task_runs_once(tasks, threads);
    }

    std::vector<std::thread> callers;
    for (int i = 0; i < 8; ++i) {
        callers.emplace_back([i] {
            for (int round = 0; round < 300; ++round)
                every_task_runs_once(20, static_cast<unsigned>(1 + i % 4));
        });
    }
    for (std::thread& caller : callers) caller.join();

    // A task may itself be split.
    std::atomic<int> inner{0};
    auto outer = [&](std::size_t) {
        auto task = [&](std::size_t) { ++inner; };
        parallel(10, 3, task);
    };
    parallel(10, 3, outer);
    CHECK(inner == 100);

#if !defined(__SANITIZE_THREAD__)  // its runtime does not follow a fork of a threaded process
    const pid_t child = fork();
    every_task_runs_once(100, 3);
    if (child == 0) _exit(0);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
}
