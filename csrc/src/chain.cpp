#include "lmcache/chain.hpp"

#include <algorithm>
#include <cstring>

namespace lmcache {

void Sha256::update(const void* data, std::size_t n) {
    const u8* from = static_cast<const u8*>(data);
    total_ += n;
    if (held_) {
        const std::size_t step = std::min(n, sizeof buffer_ - held_);
        std::memcpy(buffer_ + held_, from, step);
        held_ += step;
        from += step;
        n -= step;
        if (held_ < sizeof buffer_) return;
        kernels().sha256(state_, buffer_, 1);
        held_ = 0;
    }
    kernels().sha256(state_, from, n / 64);
    held_ = n % 64;
    std::memcpy(buffer_, from + n - held_, held_);
}

void Sha256::finish(u8 out[kChainBytes]) {
    u8 padding[72] = {0x80};
    const u64 bits = 8 * total_;
    const std::size_t zeros = (held_ < 56 ? 56 : 120) - held_;
    for (unsigned i = 0; i < 8; ++i) padding[zeros + i] = static_cast<u8>(bits >> (56 - 8 * i));
    update(padding, zeros + 8);
    for (unsigned i = 0; i < kChainBytes; ++i)
        out[i] = static_cast<u8>(state_[i / 4] >> (24 - 8 * (i % 4)));
}

void chain(const u8 root[kChainBytes], const u8* tokens, std::size_t chunks, u32 chunk_tokens,
           u8* out) {
    u8 head[sizeof kChunkTag + kChainBytes + 4];
    std::memcpy(head, kChunkTag, sizeof kChunkTag);
    for (unsigned i = 0; i < 4; ++i)
        head[sizeof head - 4 + i] = static_cast<u8>(chunk_tokens >> (8 * i));
    const std::size_t step = std::size_t{4} * chunk_tokens;
    constexpr u8 no_extras[4] = {};
    for (const u8* previous = root; chunks; --chunks, tokens += step, out += kChainBytes) {
        std::memcpy(head + sizeof kChunkTag, previous, kChainBytes);
        Sha256 hash;
        hash.update(head, sizeof head);
        hash.update(tokens, step);
        hash.update(no_extras, sizeof no_extras);
        hash.finish(out);
        previous = out;
    }
}

}  // namespace lmcache
