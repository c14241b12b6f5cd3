// Gather and scatter between paged engine memory and one contiguous payload.
#pragma once

#include <cstdint>
#include <span>

#include "lmcache/copy.hpp"

namespace lmcache {

// One plane of one layer; see lmcache_core.spi.layout.PageSpec. All distances in bytes.
struct Plane {
    std::int64_t pointer, heads, cell, block_stride, state_stride, head_stride;
    std::int64_t rows;    // 1: [token][head][cell] in the payload; 0: [block][head][state][cell]
    std::int64_t before;  // payload bytes of one unit in the planes before this one

    std::int64_t unit() const { return heads * cell; }
};
static_assert(sizeof(Plane) == 8 * sizeof(std::int64_t));

// Planes in payload order. A unit is one token slot (one state for recurrent planes); consecutive
// planes of one layer are a segment, and starts[i] is the first plane of segment i.
struct PlaneTable {
    std::span<const Plane> planes;
    std::span<const std::int64_t> starts;  // one more than there are segments
    std::int64_t states;                   // units per block
    std::int64_t blocks;

    std::size_t segments() const { return starts.size() - 1; }
    std::int64_t unit() const {
        return planes.empty() ? 0 : planes.back().before + planes.back().unit();
    }
};

// What to move: units [first, first + count) of the sequence made by the listed blocks. All fields
// have been checked against the table by the caller; for planes without rows both ends are blocks.
struct Selection {
    const std::int64_t* ids;
    std::int64_t first, count;
    unsigned threads;
};

// `digests` receives 16 bytes per segment, or is null.
void gather(const PlaneTable& table, const Selection& part, u8* dst, u64 seed, u8* digests);

// Verifies against `digests` unless null. Returns the first damaged segment, or -1; everything is
// copied either way.
std::int64_t scatter(const PlaneTable& table, const Selection& part, const u8* src, u64 seed,
                     const u8* digests);

}  // namespace lmcache
