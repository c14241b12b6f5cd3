#include "lmcache/copy.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "lmcache/pool.hpp"

namespace lmcache {
namespace {

constexpr std::size_t kSlice = std::size_t{4} << 20;  // unit of work of one thread

bool overlap(const u8* a, const u8* b, std::size_t n) {
    return a < b + n && b < a + n;
}

// One run: ordinary stores up to the first line of `dst`, whole lines, ordinary stores again.
void stream(u8* dst, const u8* src, std::size_t n) {
    const std::size_t head = std::min(n, -reinterpret_cast<std::uintptr_t>(dst) % kLine);
    const std::size_t body = (n - head) / kLine * kLine;
    std::memcpy(dst, src, head);
    if (body) kernels().move(nullptr, dst + head, src + head, Runs{body}, Store::stream);
    std::memcpy(dst + head + body, src + head + body, n - head - body);
}

}  // namespace

void move(u8* dst, const u8* src, const Runs& runs, Store store) {
    const auto misfit = static_cast<std::size_t>(runs.inner_dst | runs.outer_dst) |
                        reinterpret_cast<std::uintptr_t>(dst);
    if (runs.run % kLine == 0 && (store == Store::plain || misfit % kLine == 0)) {
        kernels().move(nullptr, dst, src, runs, store);
        return;
    }
    for (std::size_t outer = 0; outer < runs.outer; ++outer) {
        u8* to = dst;
        const u8* from = src;
        for (std::size_t inner = 0; inner < runs.inner; ++inner) {
            store == Store::plain ? void(std::memcpy(to, from, runs.run))
                                  : stream(to, from, runs.run);
            to += runs.inner_dst;
            from += runs.inner_src;
        }
        dst += runs.outer_dst;
        src += runs.outer_src;
    }
}

void copy(u8* dst, const u8* src, std::size_t n, unsigned threads) {
    if (n < kStreamFrom || overlap(dst, src, n)) {
        if (n) std::memmove(dst, src, n);
        return;
    }
    // Slices end on lines of the target, so that no line is shared.
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % kLine;
    auto slice = [&](std::size_t i) {
        const std::size_t begin = i ? head + i * kSlice : 0;
        const std::size_t end = std::min(n, head + (i + 1) * kSlice);
        stream(dst + begin, src + begin, end - begin);
        fence();
    };
    parallel((n - head + kSlice - 1) / kSlice, threads, slice);
}

void copy_and_digest(u8* dst, const u8* src, std::size_t n, u64 seed, u8 out[kDigestBytes]) {
    Xxh3 hash(n, seed);
    if (overlap(dst, src, n)) {
        digest(src, n, seed, out);
        std::memmove(dst, src, n);
        return;
    }
    hash.move(dst, src, Runs{n}, store_for(n));
    hash.finish(out);
    fence();
}

int populate(u8* start, std::size_t n, bool write, unsigned threads) {
    if (n == 0) return 0;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    u8* base = start - reinterpret_cast<std::uintptr_t>(start) % page;
    const std::size_t length = n + static_cast<std::size_t>(start - base);
    constexpr std::size_t span = 8 * kSlice;
    std::atomic<int> failed{0};
    auto slice = [&](std::size_t i) {
        u8* from = base + i * span;
        const std::size_t size = std::min(span, length - i * span);
#if defined(__linux__)
        constexpr int populate_read = 22,
                      populate_write = 23;  // Linux 5.14, absent from older headers
        int code;
        do {
            code = madvise(from, size, write ? populate_write : populate_read) ? errno : 0;
        } while (code == EINTR || code == EAGAIN);
        if (code != EINVAL) {
            if (code) failed.store(code, std::memory_order_relaxed);
            return;
        }
#endif
        // A kernel without it. Adding zero writes, yet loses nothing that others write meanwhile.
        for (u8* at = std::max(from, start); at < from + size;
             at += page - reinterpret_cast<std::uintptr_t>(at) % page) {
            if (write) {
                __atomic_fetch_add(at, u8{0}, __ATOMIC_RELAXED);
            } else {
                (void)__atomic_load_n(at, __ATOMIC_RELAXED);
            }
        }
    };
    parallel((length + span - 1) / span, threads, slice);
    return failed.load();
}

}  // namespace lmcache
