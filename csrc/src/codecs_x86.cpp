// The codecs' loops for AVX-512 (with the byte permutes of VBMI) and AVX2; see kernels_x86.cpp.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "lmcache/codecs.hpp"

#define LMCACHE_AVX2 __attribute__((target("avx2")))
#define LMCACHE_INLINE inline __attribute__((always_inline))
#define LMCACHE_BW __attribute__((target("avx512f,avx512bw,popcnt")))
#define LMCACHE_VBMI __attribute__((target("avx512f,avx512bw,avx512vbmi,bmi,bmi2,lzcnt,popcnt")))

namespace lmcache::detail {
namespace {

constexpr std::size_t kBlock = 128;

// Puts the exponents that have no code where bits of `missing` say so; element 64 h + i.
inline bool patch(u8* dst, const u8* low, u64 missing, const u8** escapes, const u8* end) {
    for (; missing; missing &= missing - 1) {
        if (*escapes == end) return false;
        const auto i = static_cast<unsigned>(__builtin_ctzll(missing));
        const u32 value = *(*escapes)++;
        const auto word =
            static_cast<std::uint16_t>((low[i] & 0x80) << 8 | value << 7 | (low[i] & 0x7F));
        std::memcpy(dst + 2 * i, &word, 2);
    }
    return true;
}

LMCACHE_VBMI bool join_vbmi(u8* dst, const u8* low, const u8* codes, const u8* exponents,
                            std::size_t blocks, const u8** escapes, const u8* end) {
    u8 upper[16], lower[16];
    for (unsigned i = 0; i < 16; ++i) {
        upper[i] = static_cast<u8>(exponents[i] >> 1);
        lower[i] = static_cast<u8>(exponents[i] << 7);
    }
    const __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<__m128i*>(upper)));
    const __m512i last = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<__m128i*>(lower)));
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (; blocks; --blocks, dst += 2 * kBlock, low += kBlock, codes += kBlock / 2) {
        const __m512i both = _mm512_loadu_si512(codes);
#pragma GCC unroll 2
        for (unsigned half = 0; half < 2; ++half) {
            const __m512i code =
                _mm512_and_si512(half ? _mm512_srli_epi16(both, 4) : both, nibble);
            const __m512i bits = _mm512_loadu_si512(low + 64 * half);
            // 0xCA: sign ? bits : table, bit by bit; 0xAC the other way round.
            const __m512i top = _mm512_ternarylogic_epi64(
                sign, bits, _mm512_shuffle_epi8(high, code), 0xCA);
            const __m512i bottom = _mm512_ternarylogic_epi64(
                sign, bits, _mm512_shuffle_epi8(last, code), 0xAC);
            const __m512i a = _mm512_unpacklo_epi8(bottom, top);
            const __m512i b = _mm512_unpackhi_epi8(bottom, top);
            u8* to = dst + kBlock * half;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi64(a, front, b));
            _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi64(a, back, b));
            const u64 missing = _mm512_cmpeq_epi8_mask(code, nibble);
            if (__builtin_expect(missing != 0, 0) &&
                !patch(to, low + 64 * half, missing, escapes, end))
                return false;
        }
    }
    return true;
}

LMCACHE_VBMI std::size_t split_vbmi(const u8* src, u8* low, u8* codes, const u8* code_of,
                                    std::size_t blocks, u8* escapes, std::size_t most) {
    __m512i table[4];
    for (unsigned i = 0; i < 4; ++i) table[i] = _mm512_loadu_si512(code_of + 64 * i);
    alignas(64) u8 even[64];
    for (unsigned i = 0; i < 64; ++i) even[i] = static_cast<u8>(2 * i);
    const __m512i evens = _mm512_load_si512(even);
    const __m512i odds = _mm512_add_epi8(evens, _mm512_set1_epi8(1));
    const __m512i nibble = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    std::size_t used = 0;
    for (; blocks; --blocks, src += 2 * kBlock, low += kBlock, codes += kBlock / 2) {
        __m512i code[2];
#pragma GCC unroll 2
        for (unsigned half = 0; half < 2; ++half) {
            const __m512i a = _mm512_loadu_si512(src + kBlock * half);
            const __m512i b = _mm512_loadu_si512(src + kBlock * half + 64);
            const __m512i value = _mm512_permutex2var_epi8(_mm512_slli_epi16(a, 1), odds,
                                                           _mm512_slli_epi16(b, 1));
            const __m512i top = _mm512_permutex2var_epi8(a, odds, b);
            const __m512i bottom = _mm512_permutex2var_epi8(a, evens, b);
            _mm512_storeu_si512(low + 64 * half,
                                _mm512_ternarylogic_epi64(sign, top, bottom, 0xCA));
            const __m512i small = _mm512_permutex2var_epi8(table[0], value, table[1]);
            const __m512i large = _mm512_permutex2var_epi8(table[2], value, table[3]);
            code[half] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(value), small, large);
            u64 missing = _mm512_cmpeq_epi8_mask(code[half], nibble);
            if (__builtin_expect(missing != 0, 0)) {
                alignas(64) u8 values[64];
                _mm512_store_si512(values, value);
                for (; missing; missing &= missing - 1) {
                    if (used == most) return most + 1;
                    escapes[used++] = values[__builtin_ctzll(missing)];
                }
            }
        }
        _mm512_storeu_si512(codes, _mm512_or_si512(code[0], _mm512_slli_epi16(code[1], 4)));
    }
    return used;
}

template <bool joined>
LMCACHE_BW void rans_loop(RansState& state, const RansTables& tables, const u32* bases,
                            std::size_t period, const u8* rest, u8* out, std::size_t n) {
    __m512i x[2] = {_mm512_loadu_si512(state.x), _mm512_loadu_si512(state.x + 16)};
    const __m512i mask = _mm512_set1_epi32((1 << tables.bits) - 1);
    const __m512i twelve = _mm512_set1_epi32(0xFFF), one = _mm512_set1_epi32(1);
    const __m512i lowest = _mm512_set1_epi32(static_cast<int>(kRansLow));
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(tables.bits));
    const u32* slots = tables.slots.data();
    const u8* next = state.next;
    std::size_t at = 0, i = 0;
    for (; i + kLanes <= n && state.end - next >= 64; i += kLanes) {
        __m256i symbols[2];
#pragma GCC unroll 2
        for (unsigned half = 0; half < 2; ++half) {
            const __m512i base = _mm512_loadu_si512(bases + at + 16 * half);
            const __m512i where = _mm512_add_epi32(base, _mm512_and_si512(x[half], mask));
            const __m512i slot = _mm512_i32gather_epi32(where, slots, 4);
            const __m512i freq =
                _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(slot, 12), twelve), one);
            __m512i now = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srl_epi32(x[half], shift)),
                                           _mm512_and_si512(slot, twelve));
            const __mmask16 few = _mm512_cmplt_epu32_mask(now, lowest);
            const __m512i words = _mm512_cvtepu16_epi32(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)));
            const __m512i more = _mm512_maskz_expand_epi32(few, words);
            x[half] = _mm512_mask_or_epi32(now, few, _mm512_slli_epi32(now, 16), more);
            next += 2 * __builtin_popcount(few);
            symbols[half] = _mm512_cvtepi32_epi16(_mm512_srli_epi32(slot, 24));
        }
        const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(symbols[0]), symbols[1], 1);
        if constexpr (joined) {
            const __m512i others = _mm512_cvtepu8_epi16(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest + i)));
            const __m512i word = _mm512_or_si512(_mm512_slli_epi16(all, 8), others);
            const __m512i turned =
                _mm512_or_si512(_mm512_srli_epi16(word, 1), _mm512_slli_epi16(word, 15));
            _mm512_storeu_si512(out + 2 * i, turned);
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi16_epi8(all));
        }
        at += kLanes;
        if (at == period) at = 0;
    }
    _mm512_storeu_si512(state.x, x[0]);
    _mm512_storeu_si512(state.x + 16, x[1]);
    state.next = next;
    state.done = i;
}

void rans_bw(RansState& state, const RansTables& tables, const u32* bases, std::size_t period,
               const u8* rest, u8* out, std::size_t n) {
    return rest ? rans_loop<true>(state, tables, bases, period, rest, out, n)
                : rans_loop<false>(state, tables, bases, period, rest, out, n);
}

// Quotients of doubles are exact here: a quotient that is no integer is at least 2^-12 away from the
// next one, and less than 2^32.
LMCACHE_BW LMCACHE_INLINE __m512i divide(__m512i x, __m512i by) {
    const __m512d low = _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_castsi512_si256(x)),
                                      _mm512_cvtepu32_pd(_mm512_castsi512_si256(by)));
    const __m512d high = _mm512_div_pd(_mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(x, 1)),
                                       _mm512_cvtepu32_pd(_mm512_extracti64x4_epi64(by, 1)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvttpd_epu32(low)),
                              _mm512_cvttpd_epu32(high), 1);
}

LMCACHE_BW u8* rans_encode_bw(u32* state, const RansTables& tables, const u32* bases,
                              std::size_t period, const u8* symbols, std::size_t n, u8* top) {
    __m512i x[2] = {_mm512_loadu_si512(state), _mm512_loadu_si512(state + 16)};
    const __m128i bits = _mm_cvtsi32_si128(static_cast<int>(tables.bits));
    const __m128i above = _mm_cvtsi32_si128(static_cast<int>(32 - tables.bits));
    const __m512i starts = _mm512_set1_epi32(0xFFFF);
    std::size_t at = n % period;
    for (std::size_t i = n; i;) {
        i -= kLanes;
        at = (at ? at : period) - kLanes;
#pragma GCC unroll 2
        for (unsigned half = 2; half-- > 0;) {
            const __m512i symbol = _mm512_cvtepu8_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + i + 16 * half)));
            const __m512i where =
                _mm512_add_epi32(_mm512_loadu_si512(bases + at + 16 * half), symbol);
            const __m512i entry = _mm512_i32gather_epi32(where, tables.symbols.data(), 4);
            const __m512i freq = _mm512_srli_epi32(entry, 16);
            if (_mm512_testn_epi32_mask(freq, freq)) return nullptr;  // and nothing was written for it
            const __mmask16 many =
                _mm512_cmpge_epu32_mask(_mm512_srl_epi32(x[half], above), freq);
            const __m256i words =
                _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(many, x[half]));
            const auto count = static_cast<unsigned>(__builtin_popcount(many));
            top -= 2 * count;
            // Only these words: what lies above was written before.
            _mm512_mask_storeu_epi16(top, (u32{1} << count) - 1, _mm512_castsi256_si512(words));
            const __m512i now = _mm512_mask_srli_epi32(x[half], many, x[half], 16);
            const __m512i whole = divide(now, freq);
            const __m512i rest = _mm512_sub_epi32(now, _mm512_mullo_epi32(whole, freq));
            x[half] = _mm512_add_epi32(_mm512_sll_epi32(whole, bits),
                                       _mm512_add_epi32(rest, _mm512_and_si512(entry, starts)));
        }
    }
    _mm512_storeu_si512(state, x[0]);
    _mm512_storeu_si512(state + 16, x[1]);
    return top;
}

LMCACHE_AVX2 bool join_avx2(u8* dst, const u8* low, const u8* codes, const u8* exponents,
                            std::size_t blocks, const u8** escapes, const u8* end) {
    u8 upper[16], lower[16];
    for (unsigned i = 0; i < 16; ++i) {
        upper[i] = static_cast<u8>(exponents[i] >> 1);
        lower[i] = static_cast<u8>(exponents[i] << 7);
    }
    const __m256i high =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<__m128i*>(upper)));
    const __m256i last =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<__m128i*>(lower)));
    const __m256i nibble = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
    for (; blocks; --blocks, dst += 2 * kBlock, low += kBlock, codes += kBlock / 2) {
        for (unsigned half = 0; half < 2; ++half) {
            u64 missing = 0;
            u8* to = dst + kBlock * half;
            for (unsigned part = 0; part < 2; ++part) {
                const auto* from = reinterpret_cast<const __m256i*>(codes + 32 * part);
                const __m256i both = _mm256_loadu_si256(from);
                const __m256i code =
                    _mm256_and_si256(half ? _mm256_srli_epi16(both, 4) : both, nibble);
                const __m256i bits = _mm256_loadu_si256(
                    reinterpret_cast<const __m256i*>(low + 64 * half + 32 * part));
                const __m256i top = _mm256_or_si256(_mm256_and_si256(bits, sign),
                                                    _mm256_shuffle_epi8(high, code));
                const __m256i bottom = _mm256_or_si256(_mm256_andnot_si256(sign, bits),
                                                       _mm256_shuffle_epi8(last, code));
                const __m256i a = _mm256_unpacklo_epi8(bottom, top);
                const __m256i b = _mm256_unpackhi_epi8(bottom, top);
                auto* words = reinterpret_cast<__m256i*>(to + 64 * part);
                _mm256_storeu_si256(words, _mm256_permute2x128_si256(a, b, 0x20));
                _mm256_storeu_si256(words + 1, _mm256_permute2x128_si256(a, b, 0x31));
                const auto found = static_cast<u32>(
                    _mm256_movemask_epi8(_mm256_cmpeq_epi8(code, nibble)));
                missing |= u64{found} << (32 * part);
            }
            if (missing && !patch(to, low + 64 * half, missing, escapes, end)) return false;
        }
    }
    return true;
}

}  // namespace

const CodecKernels* codecs_avx512() {
    static const CodecKernels full = {join_vbmi, split_vbmi, rans_bw, rans_encode_bw};
    // Processors before Ice Lake and Zen 4.
    static const CodecKernels part = {join_avx2, nullptr, rans_bw, rans_encode_bw};
    if (!__builtin_cpu_supports("avx512bw")) return nullptr;
    return __builtin_cpu_supports("avx512vbmi") ? &full : &part;
}

const CodecKernels* codecs_avx2() {
    static const CodecKernels set = {join_avx2, nullptr, nullptr, nullptr};
    return __builtin_cpu_supports("avx2") ? &set : nullptr;
}

}  // namespace lmcache::detail

#endif
