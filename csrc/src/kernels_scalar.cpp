// Portable versions: the fallback, and what the vector versions are compared with.
#include <bit>
#include <cstring>

#include "lmcache/kernels.hpp"

namespace lmcache {
namespace {

u64 load64(const u8* p) {
    u64 value;
    std::memcpy(&value, p, 8);
    if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap64(value);
    return value;
}

void absorb(Lanes& lanes, const u8* stripe) {
    const u8* key = lanes.secret + 8 * lanes.stripe;
    for (unsigned i = 0; i < 8; ++i) {
        const u64 word = load64(stripe + 8 * i), mixed = word ^ load64(key + 8 * i);
        lanes.acc[i ^ 1] += word;
        lanes.acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
    }
    if (++lanes.stripe < kStripesPerBlock) return;
    lanes.stripe = 0;
    for (unsigned i = 0; i < 8; ++i) {
        u64& acc = lanes.acc[i];
        acc = (acc ^ (acc >> 47) ^ load64(lanes.secret + kSecretBytes - 64 + 8 * i)) * kPrime32_1;
    }
}

void move(Lanes* lanes, u8* dst, const u8* src, const Runs& runs, Store store) {
    for (std::size_t o = 0; o < runs.outer; ++o) {
        for (std::size_t i = 0; i < runs.inner; ++i) {
            const auto outer = static_cast<std::ptrdiff_t>(o),
                       inner = static_cast<std::ptrdiff_t>(i);
            const u8* from = src + outer * runs.outer_src + inner * runs.inner_src;
            if (store != Store::none) {
                std::memcpy(dst + outer * runs.outer_dst + inner * runs.inner_dst, from, runs.run);
            }
            for (std::size_t at = 0; lanes && at < runs.run; at += kLine) absorb(*lanes, from + at);
        }
    }
}

u32 load32be(const u8* p) {
    return u32{p[0]} << 24 | u32{p[1]} << 16 | u32{p[2]} << 8 | u32{p[3]};
}

void sha256(u32 state[8], const u8* blocks, std::size_t count) {
    for (; count; --count, blocks += 64) {
        u32 w[64];
        for (unsigned t = 0; t < 16; ++t) w[t] = load32be(blocks + 4 * t);
        for (unsigned t = 16; t < 64; ++t) {
            const u32 x = w[t - 15], y = w[t - 2];
            const u32 s0 = std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3);
            const u32 s1 = std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10);
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        u32 a = state[0], b = state[1], c = state[2], d = state[3];
        u32 e = state[4], f = state[5], g = state[6], h = state[7];
#pragma GCC unroll 8
        for (unsigned t = 0; t < 64; ++t) {
            const u32 s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
            const u32 s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
            const u32 first = h + s1 + ((e & f) ^ (~e & g)) + kSha256Rounds[t] + w[t];
            const u32 second = s0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + first;
            d = c, c = b, b = a, a = first + second;
        }
        const u32 after[8] = {a, b, c, d, e, f, g, h};
        for (unsigned i = 0; i < 8; ++i) state[i] += after[i];
    }
}

}  // namespace

const Kernels detail::scalar = {"scalar", move, sha256};

}  // namespace lmcache
