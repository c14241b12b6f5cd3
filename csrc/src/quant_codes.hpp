// The quantising codecs of one plane, for any instruction set. For quant.cpp alone.
#pragma once

#include <vector>

#include "quant_rows.hpp"

namespace lmcache {
namespace {

// -- one scale for each row

template <Element E, std::size_t D>
LMCACHE_INLINE bool int8_row_encode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    alignas(64) float row[kMostDim];
    u8* codes = out + 2 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, in += dim * kItem<E>, codes += dim) {
        const u32 most = load_row<E>(in, row, dim);
        const u16 scale = float_to_half(float_of(most) * (1.0F / 127));
        if (most >= kInfinity || scale >= 0x7C00) return false;
        const float by = inverse(half_to_float(scale));
        for (std::size_t i = 0; i < dim; ++i)
            codes[i] = static_cast<u8>(round_to(row[i] * by, -127, 127));
        put16(out + 2 * r, scale);
    }
    return true;
}

template <Element E, std::size_t D>
LMCACHE_INLINE void int8_row_decode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    const u8* codes = in + 2 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, out += dim * kItem<E>, codes += dim) {
        const float scale = half_to_float(get16(in + 2 * r));
        for (std::size_t i = 0; i < dim; ++i)
            store_one<E>(out, i, static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale);
    }
}

// Smallest and largest of a row, in lanes so that compilers need no licence to reorder.
LMCACHE_INLINE void range_of(const float* row, std::size_t dim, float* low, float* high) {
    constexpr std::size_t lanes = 8;
    float least[lanes], most[lanes];
    for (std::size_t j = 0; j < lanes; ++j) least[j] = most[j] = row[j];
    for (std::size_t i = lanes; i < dim; i += lanes) {
        for (std::size_t j = 0; j < lanes; ++j) {
            least[j] = row[i + j] < least[j] ? row[i + j] : least[j];
            most[j] = row[i + j] > most[j] ? row[i + j] : most[j];
        }
    }
    *low = least[0], *high = most[0];
    for (std::size_t j = 1; j < lanes; ++j) {
        *low = least[j] < *low ? least[j] : *low;
        *high = most[j] > *high ? most[j] : *high;
    }
}

template <Element E, std::size_t D, unsigned bits, bool rotated>
LMCACHE_INLINE bool range_row_encode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    constexpr float most_code = (1 << bits) - 1;
    alignas(64) float row[kMostDim];
    alignas(64) u8 code[kMostDim];
    const Rotation by(dim);
    u8* codes = out + 4 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, in += dim * kItem<E>, codes += dim * bits / 8) {
        if (load_row<E>(in, row, dim) >= kLargest) return false;
        if constexpr (rotated) rotate(row, dim, by);
        float low, high;
        range_of(row, dim, &low, &high);
        const u16 scale = float_to_half((high - low) * (1.0F / most_code)), zero = float_to_half(low);
        if (scale >= 0x7C00 || (zero & 0x7C00) == 0x7C00) return false;
        const float times = inverse(half_to_float(scale)), from = half_to_float(zero);
        for (std::size_t i = 0; i < dim; ++i)
            code[i] = static_cast<u8>(round_to((row[i] - from) * times, 0, most_code));
        pack<bits>(code, codes, dim);
        put16(out + 4 * r, scale);
        put16(out + 4 * r + 2, zero);
    }
    return true;
}

template <Element E, std::size_t D, unsigned bits, bool rotated>
LMCACHE_INLINE void range_row_decode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    alignas(64) float row[kMostDim];
    alignas(64) u8 code[kMostDim];
    const Rotation by(dim);
    const u8* codes = in + 4 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, out += dim * kItem<E>, codes += dim * bits / 8) {
        const float scale = half_to_float(get16(in + 4 * r));
        const float zero = half_to_float(get16(in + 4 * r + 2));
        unpack<bits>(codes, code, dim);
        for (std::size_t i = 0; i < dim; ++i) row[i] = static_cast<float>(code[i]) * scale + zero;
        if constexpr (rotated) rotate_back(row, dim, by);
        store_row<E>(out, row, dim);
    }
}

// -- levels of a normal distribution; the scale makes the length of the row right again

template <unsigned bits>
LMCACHE_INLINE float level(unsigned code) {
    constexpr unsigned half = 1U << (bits - 1);
    const unsigned at = code < half ? half - 1 - code : code - half;
    const float value = bits == 4 ? kLevels4[at & 7] : kLevels3[at & 3];
    return code < half ? -value : value;
}

LMCACHE_INLINE float length_of(const float* row, std::size_t dim) {
    constexpr std::size_t lanes = 8;
    float sums[lanes] = {};
    for (std::size_t i = 0; i < dim; i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) sums[j] = sums[j] + row[i + j] * row[i + j];
    float sum = 0;
    for (std::size_t j = 0; j < lanes; ++j) sum = sum + sums[j];
    return std::sqrt(sum);
}

template <Element E, std::size_t D, unsigned bits>
LMCACHE_INLINE bool normal_encode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    constexpr unsigned half = 1U << (bits - 1);
    alignas(64) float row[kMostDim], near[kMostDim];
    alignas(64) u8 code[kMostDim];
    float between[half], levels[2 * half];
    for (unsigned k = 0; k < 2 * half; ++k) levels[k] = level<bits>(k);
    for (unsigned k = 0; k < half - 1; ++k)
        between[k] = (levels[half + k] + levels[half + k + 1]) * 0.5F;
    const Rotation by(dim);
    const float root = std::sqrt(static_cast<float>(dim));
    u8* codes = out + 2 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, in += dim * kItem<E>, codes += dim * bits / 8) {
        if (load_row<E>(in, row, dim) >= kLargest) return false;
        rotate(row, dim, by);
        const float length = length_of(row, dim);
        const float times = length > 0 ? root / length : 0;
        for (std::size_t i = 0; i < dim; ++i) {
            const float value = row[i] * times, size = value < 0 ? -value : value;
            unsigned above = 0;
            for (unsigned k = 0; k < half - 1; ++k) above += size > between[k];
            code[i] = static_cast<u8>(value < 0 ? half - 1 - above : half + above);
        }
        for (std::size_t i = 0; i < dim; ++i) near[i] = levels[code[i]];
        const u16 scale = float_to_half(length / length_of(near, dim));
        if ((scale & 0x7C00) == 0x7C00) return false;
        pack<bits>(code, codes, dim);
        put16(out + 2 * r, scale);
    }
    return true;
}

template <Element E, std::size_t D, unsigned bits>
LMCACHE_INLINE void normal_decode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    alignas(64) float row[kMostDim];
    alignas(64) u8 code[kMostDim];
    float levels[1U << bits];
    for (unsigned k = 0; k < 1U << bits; ++k) levels[k] = level<bits>(k);
    const Rotation by(dim);
    const u8* codes = in + 2 * s.rows();
    for (std::size_t r = 0; r < s.rows(); ++r, out += dim * kItem<E>, codes += dim * bits / 8) {
        const float scale = half_to_float(get16(in + 2 * r));
        unpack<bits>(codes, code, dim);
        for (std::size_t i = 0; i < dim; ++i) row[i] = levels[code[i]] * scale;
        rotate_back(row, dim, by);
        store_row<E>(out, row, dim);
    }
}

// -- a scale for each channel in a group of tokens

float* scratch(std::size_t n) {
    thread_local std::vector<float> kept;
    if (kept.size() < n) kept.resize(n);
    return kept.data();
}

// `bits` 8: symmetric; 4: scale and zero, tokens in pairs of a group's halves share a byte.
template <Element E, unsigned bits>
LMCACHE_INLINE bool channel_encode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    constexpr bool ranged = bits < 8;
    const std::size_t n = s.channels(), line = n * kItem<E>;
    float* const low = scratch(3 * n);
    float *const high = low + n, *const row = high + n;
    u8* scales = out;
    u8* codes = out + s.groups() * n * (ranged ? 4 : 2);
    for (std::size_t first = 0; first < s.tokens; first += s.group) {
        const std::size_t count = s.tokens - first < s.group ? s.tokens - first : s.group;
        u32 most = 0;
        for (std::size_t t = 0; t < count; ++t) {
            const u32 size = load_row<E>(in + (first + t) * line, row, n);
            most = size > most ? size : most;
            if (!t) {
                for (std::size_t c = 0; c < n; ++c) {
                    high[c] = ranged ? row[c] : float_of(bits_of(row[c]) & 0x7FFFFFFF);
                    low[c] = row[c];
                }
                continue;
            }
            for (std::size_t c = 0; c < n; ++c) {
                const float value = ranged ? row[c] : float_of(bits_of(row[c]) & 0x7FFFFFFF);
                high[c] = value > high[c] ? value : high[c];
                low[c] = row[c] < low[c] ? row[c] : low[c];
            }
        }
        if (most >= kInfinity) return false;
        u32 worst = 0;
        for (std::size_t c = 0; c < n; ++c) {
            const float width = ranged ? (high[c] - low[c]) * (1.0F / 15) : high[c] * (1.0F / 127);
            const u16 scale = float_to_half(width), zero = ranged ? float_to_half(low[c]) : u16{0};
            worst = scale > worst ? scale : worst;
            worst = (zero & 0x7FFF) > static_cast<int>(worst) ? zero & 0x7FFFU : worst;
            put16(scales + 2 * c, scale);
            if constexpr (ranged) put16(scales + 2 * (n + c), zero);
            high[c] = inverse(half_to_float(scale));
            low[c] = ranged ? half_to_float(zero) : 0.0F;
        }
        if (worst >= 0x7C00) return false;
        const std::size_t half = (count + 1) / 2;
        for (std::size_t t = 0; t < count; ++t) {
            load_row<E>(in + (first + t) * line, row, n);
            if constexpr (ranged) {
                u8* const to = codes + (t < half ? t : t - half) * n;
                if (t < half) {
                    for (std::size_t c = 0; c < n; ++c)
                        to[c] = static_cast<u8>(round_to((row[c] - low[c]) * high[c], 0, 15));
                } else {
                    for (std::size_t c = 0; c < n; ++c)
                        to[c] = static_cast<u8>(
                            to[c] | round_to((row[c] - low[c]) * high[c], 0, 15) << 4);
                }
            } else {
                u8* const to = codes + t * n;
                for (std::size_t c = 0; c < n; ++c)
                    to[c] = static_cast<u8>(round_to(row[c] * high[c], -127, 127));
            }
        }
        codes += n * (ranged ? half : count);
        scales += n * (ranged ? 4 : 2);
    }
    return true;
}

template <Element E, unsigned bits>
LMCACHE_INLINE void channel_decode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    constexpr bool ranged = bits < 8;
    const std::size_t n = s.channels(), line = n * kItem<E>;
    float* const scale = scratch(3 * n);
    float* const zero = scale + n;
    const u8* codes = in + s.groups() * n * (ranged ? 4 : 2);
    for (std::size_t first = 0; first < s.tokens; first += s.group) {
        const std::size_t count = s.tokens - first < s.group ? s.tokens - first : s.group;
        for (std::size_t c = 0; c < n; ++c) {
            scale[c] = half_to_float(get16(in + 2 * c));
            if constexpr (ranged) zero[c] = half_to_float(get16(in + 2 * (n + c)));
        }
        const std::size_t half = (count + 1) / 2;
        for (std::size_t t = 0; t < count; ++t) {
            u8* const to = out + (first + t) * line;
            if constexpr (ranged) {
                const u8* const from = codes + (t < half ? t : t - half) * n;
                const unsigned shift = t < half ? 0 : 4;
                for (std::size_t c = 0; c < n; ++c)
                    store_one<E>(to, c, static_cast<float>(from[c] >> shift & 15) * scale[c] + zero[c]);
            } else {
                const u8* const from = codes + t * n;
                for (std::size_t c = 0; c < n; ++c)
                    store_one<E>(
                        to, c, static_cast<float>(static_cast<std::int8_t>(from[c])) * scale[c]);
            }
        }
        codes += n * (ranged ? half : count);
        in += n * (ranged ? 4 : 2);
    }
}

// -- 8-bit floats (OCP FP8): `mantissa` bits, largest magnitude `top`

template <unsigned mantissa>
LMCACHE_INLINE u8 to_fp8(float value) {
    constexpr u32 bias = mantissa == 3 ? 7 : 15, most = mantissa == 3 ? 0x7E : 0x7B;
    const u32 bits = bits_of(value), size = bits & 0x7FFFFFFF;
    const float step = float_of((126 + bias + mantissa) << 23);  // of subnormal numbers, inverted
    const u32 small = bits_of(float_of(size) * step + kMagic) - kMagicBits;
    const u32 large =
        ((size + (size >> (23 - mantissa) & 1) + (1U << (22 - mantissa)) - 1) >> (23 - mantissa)) -
        ((127 - bias) << mantissa);
    const u32 code = size < (128 - bias) << 23 ? small : large;
    return static_cast<u8>((bits >> 24 & 0x80) | (code > most ? most : code));
}

template <unsigned mantissa>
float from_fp8(unsigned code) {
    constexpr int bias = mantissa == 3 ? 7 : 15;
    const int exponent = static_cast<int>(code >> mantissa & (mantissa == 3 ? 15 : 31));
    const auto low = static_cast<float>(code & ((1U << mantissa) - 1));
    const float one = static_cast<float>(1U << mantissa);
    const float size = exponent ? std::ldexp(one + low, exponent - bias - static_cast<int>(mantissa))
                                : std::ldexp(low, 1 - bias - static_cast<int>(mantissa));
    return code & 0x80 ? -size : size;
}

template <Element E, std::size_t D, unsigned mantissa>
LMCACHE_INLINE bool fp8_encode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    constexpr float top = mantissa == 3 ? 448 : 57344;
    float* const most = scratch(2 * s.heads);
    alignas(64) float row[kMostDim];
    for (std::size_t h = 0; h < s.heads; ++h) most[h] = 0;
    const std::size_t nbytes = dim * kItem<E>;
    for (std::size_t r = 0; r < s.rows(); ++r) {
        const u32 size = load_row<E>(in + r * nbytes, row, dim);
        if (size >= kInfinity) return false;
        float& largest = most[r % s.heads];
        largest = float_of(size) > largest ? float_of(size) : largest;
    }
    for (std::size_t h = 0; h < s.heads; ++h) {
        const float scale = most[h] * (1.0F / top);
        std::memcpy(out + 4 * h, &scale, 4);
        most[h] = scale >= float_of(0x00800000U) ? 1.0F / scale : 0.0F;
    }
    out += 4 * s.heads;
    for (std::size_t r = 0; r < s.rows(); ++r, out += dim) {
        load_row<E>(in + r * nbytes, row, dim);
        const float by = most[r % s.heads];
        for (std::size_t i = 0; i < dim; ++i) out[i] = to_fp8<mantissa>(row[i] * by);
    }
    return true;
}

template <Element E, std::size_t D, unsigned mantissa>
LMCACHE_INLINE void fp8_decode(const PlaneShape& s, const u8* __restrict in, u8* __restrict out) {
    const std::size_t dim = D ? D : s.dim;
    const u8* codes = in + 4 * s.heads;
    const std::size_t nbytes = dim * kItem<E>;
    u8 table[256 * kItem<E>];
    for (std::size_t h = 0; h < s.heads; ++h) {
        float scale;
        std::memcpy(&scale, in + 4 * h, 4);
        for (unsigned code = 0; code < 256; ++code)
            store_one<E>(table, code, from_fp8<mantissa>(code) * scale);
        for (std::size_t r = h; r < s.rows(); r += s.heads) {
            u8* const to = out + r * nbytes;
            for (std::size_t i = 0; i < dim; ++i)
                std::memcpy(to + i * kItem<E>, table + codes[r * dim + i] * kItem<E>, kItem<E>);
        }
    }
}

}  // namespace
}  // namespace lmcache
