#include "lmcache/xxh3.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace lmcache {
namespace {

constexpr std::size_t kShort = 240;  // up to here the result comes from the whole input at once
constexpr u64 kMix1 = 0x165667919E3779F9U, kMix2 = 0x9FB21C651E98DF25U;

alignas(64) constexpr u8 kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Result {
    u64 low, high;
};

u32 read32(const u8* p) {
    u32 value;
    std::memcpy(&value, p, 4);
    return std::endian::native == std::endian::little ? value : __builtin_bswap32(value);
}

u64 read64(const u8* p) {
    u64 value;
    std::memcpy(&value, p, 8);
    return std::endian::native == std::endian::little ? value : __builtin_bswap64(value);
}

void write64(u8* p, u64 value) {
    if constexpr (std::endian::native == std::endian::big) value = __builtin_bswap64(value);
    std::memcpy(p, &value, 8);
}

using Wide = unsigned __int128;

u64 folded(u64 a, u64 b) {
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

u64 avalanche(u64 x) {
    x = (x ^ (x >> 37)) * kMix1;
    return x ^ (x >> 32);
}

u64 avalanche64(u64 x) {
    x = (x ^ (x >> 33)) * kPrime64_2;
    x = (x ^ (x >> 29)) * kPrime64_3;
    return x ^ (x >> 32);
}

Result up_to_3(const u8* p, std::size_t n, u64 seed) {
    const u32 combined =
        u32{p[n - 1]} | static_cast<u32>(n) << 8 | u32{p[0]} << 16 | u32{p[n >> 1]} << 24;
    const u64 low = (u64{read32(kSecret) ^ read32(kSecret + 4)} + seed) ^ combined;
    const u64 high = (u64{read32(kSecret + 8) ^ read32(kSecret + 12)} - seed) ^
                     std::rotl(__builtin_bswap32(combined), 13);
    return {avalanche64(low), avalanche64(high)};
}

Result up_to_8(const u8* p, std::size_t n, u64 seed) {
    seed ^= u64{__builtin_bswap32(static_cast<u32>(seed))} << 32;
    const u64 combined = read32(p) | u64{read32(p + n - 4)} << 32;
    const u64 value = ((read64(kSecret + 16) ^ read64(kSecret + 24)) + seed) ^ combined;
    const Wide product = static_cast<Wide>(value) * (kPrime64_1 + (u64{n} << 2));
    u64 low = static_cast<u64>(product), high = static_cast<u64>(product >> 64);
    high += low << 1;
    low ^= high >> 3;
    low = (low ^ (low >> 35)) * kMix2;
    return {low ^ (low >> 28), avalanche(high)};
}

Result up_to_16(const u8* p, std::size_t n, u64 seed) {
    const u64 first = read64(p), last = read64(p + n - 8);
    const u64 a = ((read64(kSecret + 32) ^ read64(kSecret + 40)) - seed) ^ first ^ last;
    const u64 b = ((read64(kSecret + 48) ^ read64(kSecret + 56)) + seed) ^ last;
    const Wide product = static_cast<Wide>(a) * kPrime64_1;
    u64 low = static_cast<u64>(product) + (u64{n - 1} << 54);
    u64 high = static_cast<u64>(product >> 64) + b + (b & 0xFFFFFFFFU) * (kPrime32_2 - 1);
    low ^= __builtin_bswap64(high);
    const Wide again = static_cast<Wide>(low) * kPrime64_2;
    high = static_cast<u64>(again >> 64) + high * kPrime64_2;
    return {avalanche(static_cast<u64>(again)), avalanche(high)};
}

// Two 16-byte pieces against 32 bytes of secret.
void mix(u64 acc[2], const u8* a, const u8* b, const u8* key, u64 seed) {
    const u64 a0 = read64(a), a1 = read64(a + 8), b0 = read64(b), b1 = read64(b + 8);
    acc[0] += folded(a0 ^ (read64(key) + seed), a1 ^ (read64(key + 8) - seed));
    acc[1] += folded(b0 ^ (read64(key + 16) + seed), b1 ^ (read64(key + 24) - seed));
    acc[0] ^= b0 + b1;
    acc[1] ^= a0 + a1;
}

Result up_to_240(const u8* p, std::size_t n, u64 seed) {
    u64 acc[2] = {u64{n} * kPrime64_1, 0};
    if (n <= 128) {
        for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;) {
            mix(acc, p + 16 * i, p + n - 16 * i - 16, kSecret + 32 * i, seed);
        }
    } else {
        for (std::size_t i = 0; i < 4; ++i)
            mix(acc, p + 32 * i, p + 32 * i + 16, kSecret + 32 * i, seed);
        acc[0] = avalanche(acc[0]);
        acc[1] = avalanche(acc[1]);
        for (std::size_t i = 4; i < n / 32; ++i) {
            mix(acc, p + 32 * i, p + 32 * i + 16, kSecret + 32 * (i - 4) + 3, seed);
        }
        mix(acc, p + n - 16, p + n - 32, kSecret + 103, u64{0} - seed);
    }
    const u64 high = acc[0] * kPrime64_1 + acc[1] * kPrime64_4 + (u64{n} - seed) * kPrime64_2;
    return {avalanche(acc[0] + acc[1]), u64{0} - avalanche(high)};
}

Result short_input(const u8* p, std::size_t n, u64 seed) {
    if (n == 0) {
        return {avalanche64(seed ^ read64(kSecret + 64) ^ read64(kSecret + 72)),
                avalanche64(seed ^ read64(kSecret + 80) ^ read64(kSecret + 88))};
    }
    if (n <= 3) return up_to_3(p, n, seed);
    if (n <= 8) return up_to_8(p, n, seed);
    if (n <= 16) return up_to_16(p, n, seed);
    return up_to_240(p, n, seed);
}

u64 merged(const Lanes& lanes, const u8* key, u64 start) {
    for (unsigned i = 0; i < 8; i += 2) {
        start +=
            folded(lanes.acc[i] ^ read64(key + 8 * i), lanes.acc[i + 1] ^ read64(key + 8 * i + 8));
    }
    return avalanche(start);
}

}  // namespace

Xxh3::Xxh3(u64 total, u64 seed)
    : total_(total), seed_(seed), stripes_(total > kShort ? (total - 1) / kLine : 0) {
    if (total <= kShort) return;
    constexpr u64 start[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                              kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    std::copy(std::begin(start), std::end(start), lanes_.acc);
    for (std::size_t i = 0; i < kSecretBytes; i += 8) {
        write64(lanes_.secret + i,
                i % 16 ? read64(kSecret + i) - seed : read64(kSecret + i) + seed);
    }
    lanes_.stripe = 0;
}

void Xxh3::piece(u8* dst, const u8* src, std::size_t n, Store store) {
    while (n) {
        std::size_t step;
        if (held_ == 0 && stripes_ && n >= kLine) {
            const u64 lines = std::min<u64>(n / kLine, stripes_);
            step = lines * kLine;
            const bool aligned = reinterpret_cast<std::uintptr_t>(dst) % kLine == 0;
            const Store how = store == Store::stream && !aligned ? Store::plain : store;
            kernels().move(&lanes_, dst, src, Runs{step}, how);
            if ((stripes_ -= lines) == 0) std::memcpy(last_, src + step - kLine, kLine);
        } else {
            step = total_ <= kShort ? n : std::min(n, kLine - held_);
            std::memcpy(buffer_ + held_, src, step);
            if (store != Store::none) std::memcpy(dst, src, step);
            held_ += step;
            if (held_ == kLine && stripes_) {
                kernels().move(&lanes_, buffer_, buffer_, Runs{kLine}, Store::none);
                if (--stripes_ == 0) std::memcpy(last_, buffer_, kLine);
                held_ = 0;
            }
        }
        src += step;
        dst += step;
        n -= step;
    }
}

void Xxh3::move(u8* dst, const u8* src, const Runs& runs, Store store) {
    const auto misfit = static_cast<std::size_t>(runs.inner_dst | runs.outer_dst) |
                        reinterpret_cast<std::uintptr_t>(dst);
    const bool whole = runs.run % kLine == 0 && held_ == 0;
    std::size_t outer = 0;
    if (whole && (store != Store::stream || misfit % kLine == 0)) {
        // All rows that end before the last line of the stream go through one kernel call.
        const u64 row = runs.run / kLine * runs.inner;
        outer = std::min<u64>(runs.outer, row ? stripes_ / row : 0);
        if (outer && stripes_ == outer * row) --outer;
        if (outer) {
            Runs rows = runs;
            rows.outer = outer;
            kernels().move(&lanes_, dst, src, rows, store);
            stripes_ -= outer * row;
        }
    }
    for (; outer < runs.outer; ++outer) {
        for (std::size_t inner = 0; inner < runs.inner; ++inner) {
            const auto o = static_cast<std::ptrdiff_t>(outer),
                       i = static_cast<std::ptrdiff_t>(inner);
            piece(dst + o * runs.outer_dst + i * runs.inner_dst,
                  src + o * runs.outer_src + i * runs.inner_src, runs.run, store);
        }
    }
}

void Xxh3::finish(u8 out[kDigestBytes]) const {
    Result result;
    if (total_ <= kShort) {
        result = short_input(buffer_, held_, seed_);
    } else {
        u8 tail[kLine];  // the last 64 bytes of the input, reaching back into the line before
        std::memcpy(tail, last_ + held_, kLine - held_);
        std::memcpy(tail + kLine - held_, buffer_, held_);
        Lanes lanes = lanes_;
        for (unsigned i = 0; i < 8; ++i) {
            const u64 word = read64(tail + 8 * i);
            const u64 mixed = word ^ read64(lanes.secret + kSecretBytes - 71 + 8 * i);
            lanes.acc[i ^ 1] += word;
            lanes.acc[i] += (mixed & 0xFFFFFFFFU) * (mixed >> 32);
        }
        result = {merged(lanes, lanes.secret + 11, total_ * kPrime64_1),
                  merged(lanes, lanes.secret + kSecretBytes - 75, ~(total_ * kPrime64_2))};
    }
    for (unsigned i = 0; i < 8; ++i) {
        out[i] = static_cast<u8>(result.high >> (56 - 8 * i));
        out[8 + i] = static_cast<u8>(result.low >> (56 - 8 * i));
    }
}

void digest(const u8* data, std::size_t n, u64 seed, u8 out[kDigestBytes]) {
    Xxh3 state(n, seed);
    state.move(const_cast<u8*>(data), data, Runs{n}, Store::none);  // never written
    state.finish(out);
}

}  // namespace lmcache
