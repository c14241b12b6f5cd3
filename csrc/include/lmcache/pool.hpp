// A few sleeping threads that help with large calls.
#pragma once

#include <cstddef>

namespace lmcache {

// Runs task(context, i) for every i in [0, tasks) on the calling thread and up to threads - 1
// helpers, and returns when all are done. Helpers are started on demand, detached, never joined:
// they do not hold up the end of the process. If none can be started the caller does all the work.
// Safe to call from any thread, and again in a forked child. No allocation per call.
void parallel(std::size_t tasks, unsigned threads, void (*task)(void*, std::size_t), void* context);

template <class F>
void parallel(std::size_t tasks, unsigned threads, F& task) {
    parallel(
        tasks, threads, [](void* context, std::size_t i) { (*static_cast<F*>(context))(i); },
        &task);
}

}  // namespace lmcache
