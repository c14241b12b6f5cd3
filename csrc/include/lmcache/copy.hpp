// Copies of contiguous memory, and faulting it in.
#pragma once

#include "lmcache/xxh3.hpp"

namespace lmcache {

// From this size on a call writes around the caches: what is stored is not read again soon.
inline constexpr std::size_t kStreamFrom = std::size_t{1} << 20;

inline Store store_for(std::size_t bytes) {
    return bytes < kStreamFrom ? Store::plain : Store::stream;
}

// Copies runs without a digest, for any alignment and length of a run.
void move(u8* dst, const u8* src, const Runs& runs, Store store);

// `dst` and `src` may overlap (as memmove).
void copy(u8* dst, const u8* src, std::size_t n, unsigned threads);
void copy_and_digest(u8* dst, const u8* src, std::size_t n, u64 seed, u8 out[kDigestBytes]);

// Faults in every page that holds a byte of [start, start + n), for writing or for reading, and
// changes nothing. Returns 0 or an errno.
int populate(u8* start, std::size_t n, bool write, unsigned threads);

}  // namespace lmcache
