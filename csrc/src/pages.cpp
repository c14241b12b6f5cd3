#include "lmcache/pages.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "lmcache/pool.hpp"

namespace lmcache {
namespace {

constexpr std::int64_t kLookAhead = 4096, kLargeBlock = 32768;  // bytes, found by measurement

enum class Way { gather, scatter };

// Visits units [begin, end) of one plane block by block, as runs between `payload` (where unit
// `part.first` of this plane begins) and the engine's memory.
template <Way way, class F>
void walk(const PlaneTable& table, const Plane& plane, const Selection& part, u8* payload,
          std::int64_t begin, std::int64_t end, F&& visit) {
    // The long dimension of a block in payload order, and the short one inside it.
    const bool rows = plane.rows;
    std::int64_t inner = rows ? plane.heads : table.states;
    const std::int64_t inner_stride = rows ? plane.head_stride : plane.state_stride;
    const std::int64_t outer_stride = rows ? plane.state_stride : plane.head_stride;
    std::int64_t run = plane.cell;
    if (inner == 1 || inner_stride == run) {
        run *= inner;
        inner = 1;
    }
    const std::int64_t row = run * inner;
    while (begin < end) {
        const std::int64_t slot = begin % table.states;
        const std::int64_t units = std::min(end - begin, table.states - slot);
        const std::int64_t block = part.ids[begin / table.states];
        const std::int64_t address =
            plane.pointer + block * plane.block_stride + slot * plane.state_stride;
        u8* pages = reinterpret_cast<u8*>(address);
        u8* packed = payload + (begin - part.first) * plane.unit();
        const std::int64_t outer = rows ? units : plane.heads;
        const bool whole = inner == 1 && (outer == 1 || outer_stride == run);
        Runs runs{.run = static_cast<std::size_t>(whole ? run * outer : run)};
        if (!whole) {
            runs.inner = static_cast<std::size_t>(inner);
            runs.outer = static_cast<std::size_t>(outer);
            (way == Way::gather ? runs.inner_src : runs.inner_dst) = inner == 1 ? 0 : inner_stride;
            (way == Way::gather ? runs.outer_src : runs.outer_dst) = outer_stride;
            (way == Way::gather ? runs.inner_dst : runs.inner_src) = inner == 1 ? 0 : run;
            (way == Way::gather ? runs.outer_dst : runs.outer_src) = row;
        }
        if (way == Way::gather) {
            // Small blocks lie anywhere: ask for the one that is kLookAhead bytes further in
            // payload order while reading this one. Inside large blocks ask for a later row.
            const std::int64_t bytes = units * plane.unit();
            const std::int64_t later =
                begin / table.states + std::max<std::int64_t>(1, kLookAhead / bytes);
            if (bytes > kLargeBlock) {
                if (runs.outer > 1)
                    runs.ahead = outer_stride * std::max<std::int64_t>(1, kLookAhead / row);
            } else if (later <= (part.first + part.count - 1) / table.states) {
                runs.ahead = (part.ids[later] - block) * plane.block_stride;
            }
        }
        way == Way::gather ? visit(packed, pages, runs) : visit(pages, packed, runs);
        begin += units;
    }
}

template <Way way>
void move_all(const PlaneTable& table, const Selection& part, u8* payload, Store store) {
    // Enough pieces for the threads to even out, cut at block boundaries.
    const auto planes = static_cast<std::int64_t>(table.planes.size());
    const std::int64_t first_block = part.first / table.states;
    const std::int64_t blocks =
        (part.first + part.count + table.states - 1) / table.states - first_block;
    const std::int64_t wanted = part.threads == 1 ? 1 : 1 + 4 * std::int64_t{part.threads} / planes;
    const std::int64_t cuts = std::min(blocks, wanted);
    auto piece = [&](std::size_t task) {
        const auto at = static_cast<std::int64_t>(task);
        const Plane& plane = table.planes[task / static_cast<std::size_t>(cuts)];
        const auto edge = [&](std::int64_t cut) {
            return (first_block + blocks * cut / cuts) * table.states;
        };
        const std::int64_t begin = std::max(edge(at % cuts), part.first);
        const std::int64_t end = std::min(edge(at % cuts + 1), part.first + part.count);
        walk<way>(table, plane, part, payload + plane.before * part.count, begin, end,
                  [&](u8* dst, const u8* src, const Runs& runs) { move(dst, src, runs, store); });
        fence();
    };
    parallel(static_cast<std::size_t>(planes * cuts), part.threads, piece);
}

template <Way way, class F>
void digest_all(const PlaneTable& table, const Selection& part, u8* payload, Store store, u64 seed,
                F&& done) {
    auto segment = [&](std::size_t i) {
        const auto begin = static_cast<std::size_t>(table.starts[i]);
        const auto planes =
            table.planes.subspan(begin, static_cast<std::size_t>(table.starts[i + 1]) - begin);
        const std::int64_t units =
            planes.back().before + planes.back().unit() - planes.front().before;
        Xxh3 hash(static_cast<u64>(units * part.count), seed);
        for (const Plane& plane : planes) {
            walk<way>(table, plane, part, payload + plane.before * part.count, part.first,
                      part.first + part.count, [&](u8* dst, const u8* src, const Runs& runs) {
                          hash.move(dst, src, runs, store);
                      });
        }
        fence();
        u8 digest[kDigestBytes];
        hash.finish(digest);
        done(i, digest);
    };
    parallel(table.segments(), part.threads, segment);
}

// How to store, and the selection with no more threads than its size is worth.
std::pair<Store, Selection> plan(const PlaneTable& table, Selection part) {
    const Store store = store_for(static_cast<std::size_t>(table.unit() * part.count));
    if (store == Store::plain) part.threads = 1;
    return {store, part};
}

}  // namespace

void gather(const PlaneTable& table, const Selection& selection, u8* dst, u64 seed, u8* digests) {
    const auto [store, part] = plan(table, selection);
    if (!digests) {
        if (part.count && !table.planes.empty()) move_all<Way::gather>(table, part, dst, store);
        return;
    }
    digest_all<Way::gather>(table, part, dst, store, seed, [&](std::size_t i, const u8* digest) {
        std::memcpy(digests + i * kDigestBytes, digest, kDigestBytes);
    });
}

std::int64_t scatter(const PlaneTable& table, const Selection& selection, const u8* src, u64 seed,
                     const u8* digests) {
    u8* payload = const_cast<u8*>(src);  // only read: scatter walks with the payload as source
    const auto [store, part] = plan(table, selection);
    if (!digests) {
        if (part.count && !table.planes.empty())
            move_all<Way::scatter>(table, part, payload, store);
        return -1;
    }
    std::atomic<std::int64_t> damaged{INT64_MAX};
    digest_all<Way::scatter>(
        table, part, payload, store, seed, [&](std::size_t i, const u8* digest) {
            if (std::memcmp(digest, digests + i * kDigestBytes, kDigestBytes) == 0) return;
            const auto index = static_cast<std::int64_t>(i);
            std::int64_t seen = damaged.load();
            while (index < seen && !damaged.compare_exchange_weak(seen, index)) {
            }
        });
    return damaged == INT64_MAX ? -1 : damaged.load();
}

}  // namespace lmcache
