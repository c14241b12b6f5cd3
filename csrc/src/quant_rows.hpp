// What the quantising codecs do with one row: elements, rotation, packing. For quant.cpp alone.
//
// Rules that keep the bytes equal everywhere: no contraction of multiply and add (build flag of that
// file), rounding by the magic number, sums in a fixed order.
#pragma once

#include "lmcache/quant.hpp"

#include <cmath>
#include <cstring>

#define LMCACHE_INLINE inline __attribute__((always_inline))

namespace lmcache {
namespace {

using u16 = std::uint16_t;

constexpr float kMagic = 12582912.0F;  // 1.5 * 2**23: adding it rounds to an integer, half to even
constexpr u32 kMagicBits = 0x4B400000U;
constexpr u32 kInfinity = 0x7F800000U;
constexpr u32 kLargest = 0x7149F2CAU;  // 1e30: what a rotation still adds up

// Lloyd-Max levels for a normal distribution of variance 1 (J. Max, 1960), the positive half.
constexpr float kLevels4[8] = {0.1284F, 0.3881F, 0.6568F, 0.9424F, 1.2562F, 1.6181F, 2.0690F, 2.7326F};
constexpr float kLevels3[4] = {0.2451F, 0.7560F, 1.3439F, 2.1520F};

LMCACHE_INLINE u32 bits_of(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

LMCACHE_INLINE float float_of(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

LMCACHE_INLINE float half_to_float(u32 half) {
    // The product is exact for subnormal numbers too; infinity and NaN get the exponent they lost.
    const float scaled = float_of((half & 0x7FFF) << 13) * float_of(0x77800000U);
    const u32 whole = (half & 0x7C00) == 0x7C00 ? bits_of(scaled) | kInfinity : bits_of(scaled);
    return float_of(whole | (half & 0x8000) << 16);
}

LMCACHE_INLINE u16 float_to_half(float value) {
    const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    // Below the smallest normal number an addition aligns and rounds; above it integers do.
    const u32 small = bits_of(float_of(size) + 0.5F) - 0x3F000000U;
    const u32 large = (size + 0xC8000FFFU + (size >> 13 & 1)) >> 13;
    const u32 rounded = size < 0x38800000U ? small : large;
    const u32 finite = size >= 0x477FF000U ? 0x7C00 : rounded;
    return static_cast<u16>(sign | (size > kInfinity ? 0x7E00 : finite));
}

template <Element E>
LMCACHE_INLINE float load_one(const u8* in, std::size_t i) {
    if constexpr (E == Element::float32) {
        float value;
        std::memcpy(&value, in + 4 * i, 4);
        return value;
    } else {
        u16 word;
        std::memcpy(&word, in + 2 * i, 2);
        if constexpr (E == Element::bfloat16) return float_of(u32{word} << 16);
        else return half_to_float(word);
    }
}

template <Element E>
LMCACHE_INLINE void store_one(u8* out, std::size_t i, float value) {
    if constexpr (E == Element::float32) {
        std::memcpy(out + 4 * i, &value, 4);
    } else {
        u16 word;
        if constexpr (E == Element::bfloat16) {
            const u32 bits = bits_of(value);
            word = static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        } else {
            word = float_to_half(value);
        }
        std::memcpy(out + 2 * i, &word, 2);
    }
}

template <Element E>
constexpr std::size_t kItem = E == Element::float32 ? 4 : 2;

// Loads a row; the largest magnitude's bits tell whether all are finite.
template <Element E>
LMCACHE_INLINE u32 load_row(const u8* in, float* row, std::size_t dim) {
    u32 most = 0;
    for (std::size_t i = 0; i < dim; ++i) {
        row[i] = load_one<E>(in, i);
        const u32 size = bits_of(row[i]) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    return most;
}

template <Element E>
LMCACHE_INLINE void store_row(u8* out, const float* row, std::size_t dim) {
    for (std::size_t i = 0; i < dim; ++i) store_one<E>(out, i, row[i]);
}

LMCACHE_INLINE u16 get16(const u8* at) {
    u16 word;
    std::memcpy(&word, at, 2);
    return word;
}

LMCACHE_INLINE void put16(u8* at, u16 word) {
    std::memcpy(at, &word, 2);
}

LMCACHE_INLINE float inverse(float scale) {
    return scale > 0 ? 1.0F / scale : 0.0F;
}

LMCACHE_INLINE int round_to(float value, float low, float high) {
    const float above = value < low ? low : value;
    const float inside = above > high ? high : above;
    return static_cast<int>(bits_of(inside + kMagic) - kMagicBits);
}

// -- rotation: signs, then a Hadamard transform of the largest power of two in `dim` (at most 256)

std::size_t rotation(std::size_t dim) {
    const std::size_t width = dim & (~dim + 1);
    return width > 256 ? 256 : width;
}

u64 sign_bits(std::size_t word) {  // splitmix64
    u64 z = (word + 1) * 0x9E3779B97F4A7C15U;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9U;
    z = (z ^ z >> 27) * 0x94D049BB133111EBU;
    return z ^ z >> 31;
}

struct Rotation {
    std::size_t width;
    float norm;
    float signs[kMostDim];

    explicit Rotation(std::size_t dim)
        : width(rotation(dim)), norm(1.0F / std::sqrt(static_cast<float>(width))) {
        for (std::size_t i = 0; i < dim; ++i)
            signs[i] = sign_bits(i / 64) >> (i % 64) & 1 ? -norm : norm;
    }
};

// In the form with constant geometry (Pease): each stage reads two halves and writes pairs.
LMCACHE_INLINE void hadamard(float* row, std::size_t dim, std::size_t width) {
    alignas(64) float other[256];
    for (float* block = row; block < row + dim; block += width) {
        float *from = block, *to = other;
        for (std::size_t stage = 1; stage < width; stage *= 2) {
            for (std::size_t i = 0; i < width / 2; ++i) {
                const float a = from[i], b = from[i + width / 2];
                to[2 * i] = a + b;
                to[2 * i + 1] = a - b;
            }
            float* const swap = from;
            from = to;
            to = swap;
        }
        if (from != block) std::memcpy(block, from, 4 * width);
    }
}

LMCACHE_INLINE void rotate(float* row, std::size_t dim, const Rotation& by) {
    for (std::size_t i = 0; i < dim; ++i) row[i] *= by.signs[i];
    hadamard(row, dim, by.width);
}

LMCACHE_INLINE void rotate_back(float* row, std::size_t dim, const Rotation& by) {
    hadamard(row, dim, by.width);
    for (std::size_t i = 0; i < dim; ++i) row[i] *= by.signs[i];
}

// -- codes of one row in few bits

LMCACHE_INLINE void pack4(const u8* __restrict codes, u8* __restrict out, std::size_t dim) {
    for (std::size_t i = 0; i < dim / 2; ++i)
        out[i] = static_cast<u8>(codes[i] | codes[i + dim / 2] << 4);
}

LMCACHE_INLINE void unpack4(const u8* __restrict in, u8* __restrict codes, std::size_t dim) {
    for (std::size_t i = 0; i < dim / 2; ++i) {
        codes[i] = in[i] & 15;
        codes[i + dim / 2] = in[i] >> 4;
    }
}

// Two lower bits of four quarters, then the upper bit of eight eighths.
LMCACHE_INLINE void pack3(const u8* __restrict codes, u8* __restrict out, std::size_t dim) {
    const std::size_t quarter = dim / 4, eighth = dim / 8;
    for (std::size_t i = 0; i < quarter; ++i) {
        u8 byte = 0;
        for (unsigned k = 0; k < 4; ++k)
            byte = static_cast<u8>(byte | (codes[i + k * quarter] & 3) << 2 * k);
        out[i] = byte;
    }
    for (std::size_t i = 0; i < eighth; ++i) {
        u8 byte = 0;
        for (unsigned k = 0; k < 8; ++k)
            byte = static_cast<u8>(byte | (codes[i + k * eighth] >> 2) << k);
        out[quarter + i] = byte;
    }
}

LMCACHE_INLINE void unpack3(const u8* __restrict in, u8* __restrict codes, std::size_t dim) {
    const std::size_t quarter = dim / 4, eighth = dim / 8;
    for (unsigned k = 0; k < 4; ++k)
        for (std::size_t i = 0; i < quarter; ++i)
            codes[i + k * quarter] = static_cast<u8>(in[i] >> 2 * k & 3);
    for (unsigned k = 0; k < 8; ++k)
        for (std::size_t i = 0; i < eighth; ++i)
            codes[i + k * eighth] =
                static_cast<u8>(codes[i + k * eighth] | (in[quarter + i] >> k & 1) << 2);
}

template <unsigned bits>
LMCACHE_INLINE void pack(const u8* codes, u8* out, std::size_t dim) {
    if constexpr (bits == 4) pack4(codes, out, dim);
    else pack3(codes, out, dim);
}

template <unsigned bits>
LMCACHE_INLINE void unpack(const u8* in, u8* codes, std::size_t dim) {
    if constexpr (bits == 4) unpack4(in, codes, dim);
    else unpack3(in, codes, dim);
}

}  // namespace
}  // namespace lmcache
