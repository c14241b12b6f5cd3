// XXH3 with 128-bit result and 64-bit seed, written from the public xxHash specification.
#pragma once

#include "lmcache/kernels.hpp"

namespace lmcache {

inline constexpr std::size_t kDigestBytes = 16;

// A digest over a stream of known length, optionally fused with the copy of the same bytes.
//
// The length is known everywhere in this library, and knowing it lets every whole line be taken
// straight from the source: only the last line of the stream is ever held back.
class Xxh3 {
public:
    Xxh3(u64 total, u64 seed);

    // Absorbs all runs in order and copies them to `dst`, which is not written if the store is
    // none.
    void move(u8* dst, const u8* src, const Runs& runs, Store store);

    // Canonical form, most significant byte first. All `total` bytes must have been absorbed.
    void finish(u8 out[kDigestBytes]) const;

private:
    void piece(u8* dst, const u8* src, std::size_t n, Store store);

    u64 total_, seed_;
    u64 stripes_;           // whole lines still to absorb before the last one
    std::size_t held_ = 0;  // bytes in buffer_
    Lanes lanes_;
    u8 last_[kLine];  // the line absorbed last, once stripes_ is 0
    u8 buffer_[256];  // an incomplete line, or all of a short input
};

// The digest of contiguous memory.
void digest(const u8* data, std::size_t n, u64 seed, u8 out[kDigestBytes]);

}  // namespace lmcache
