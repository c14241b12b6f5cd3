// AVX2, AVX-512 and SHA extensions. Each function carries its own target, so the library loads on
// any x86-64 and no header function is ever compiled for a processor that may not be there.
#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include "lmcache/kernels.hpp"

#define LMCACHE_AVX2 __attribute__((target("avx2")))
#define LMCACHE_AVX512 __attribute__((target("avx512f")))
#define LMCACHE_SHA __attribute__((target("sha,ssse3,sse4.1")))
#define LMCACHE_INLINE inline __attribute__((always_inline))

namespace lmcache {
namespace {

struct Avx512 {
    __m512i acc;

    LMCACHE_AVX512 LMCACHE_INLINE void load(const Lanes& lanes) {
        acc = _mm512_load_si512(lanes.acc);
    }
    LMCACHE_AVX512 LMCACHE_INLINE void save(Lanes& lanes) const {
        _mm512_store_si512(lanes.acc, acc);
    }

    template <bool hash, Store store>
    LMCACHE_AVX512 LMCACHE_INLINE void line(u8* dst, const u8* src, const u8* key) {
        const __m512i data = _mm512_loadu_si512(src);
        if constexpr (store == Store::stream)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), data);
        if constexpr (store == Store::plain) _mm512_storeu_si512(dst, data);
        if constexpr (hash) {
            const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
            const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
            const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
            acc = _mm512_add_epi64(_mm512_add_epi64(acc, swapped), product);
        }
    }

    LMCACHE_AVX512 LMCACHE_INLINE void scramble(const u8* key) {
        const __m512i prime = _mm512_set1_epi32(static_cast<int>(kPrime32_1));
        const __m512i folded = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
        const __m512i mixed = _mm512_xor_si512(folded, _mm512_loadu_si512(key));
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        acc = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
};

struct Avx2 {
    __m256i acc[2];

    LMCACHE_AVX2 LMCACHE_INLINE void load(const Lanes& lanes) {
        acc[0] = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.acc));
        acc[1] = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.acc + 4));
    }
    LMCACHE_AVX2 LMCACHE_INLINE void save(Lanes& lanes) const {
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.acc), acc[0]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.acc + 4), acc[1]);
    }

    template <bool hash, Store store>
    LMCACHE_AVX2 LMCACHE_INLINE void line(u8* dst, const u8* src, const u8* key) {
        for (unsigned half = 0; half < 2; ++half) {
            const auto* from = reinterpret_cast<const __m256i*>(src + 32 * half);
            auto* to = reinterpret_cast<__m256i*>(dst + 32 * half);
            const __m256i data = _mm256_loadu_si256(from);
            if constexpr (store == Store::stream) _mm256_stream_si256(to, data);
            if constexpr (store == Store::plain) _mm256_storeu_si256(to, data);
            if constexpr (hash) {
                const auto* secret = reinterpret_cast<const __m256i*>(key + 32 * half);
                const __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256(secret));
                const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
                const __m256i swapped = _mm256_shuffle_epi32(data, 0x4E);
                acc[half] = _mm256_add_epi64(_mm256_add_epi64(acc[half], swapped), product);
            }
        }
    }

    LMCACHE_AVX2 LMCACHE_INLINE void scramble(const u8* key) {
        const __m256i prime = _mm256_set1_epi32(static_cast<int>(kPrime32_1));
        for (unsigned half = 0; half < 2; ++half) {
            const auto* secret = reinterpret_cast<const __m256i*>(key + 32 * half);
            const __m256i folded = _mm256_xor_si256(acc[half], _mm256_srli_epi64(acc[half], 47));
            const __m256i mixed = _mm256_xor_si256(folded, _mm256_loadu_si256(secret));
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            acc[half] =
                _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
    }
};

// The loop over runs, once for both vector widths; inlined into a function of the right target.
#define LMCACHE_MOVE(TARGET, VECTOR, NAME)                                                       \
    template <bool hash, Store store>                                                            \
    TARGET void NAME##_loop(Lanes* lanes, u8* dst, const u8* src, const Runs& runs) {            \
        VECTOR vector;                                                                           \
        unsigned stripe = 0;                                                                     \
        const u8* secret = nullptr;                                                              \
        const std::ptrdiff_t ahead = runs.ahead;                                                 \
        if constexpr (hash) {                                                                    \
            vector.load(*lanes);                                                                 \
            stripe = lanes->stripe;                                                              \
            secret = lanes->secret;                                                              \
        }                                                                                        \
        for (std::size_t outer = 0; outer < runs.outer; ++outer) {                               \
            const u8* from = src;                                                                \
            u8* to = dst;                                                                        \
            for (std::size_t inner = 0; inner < runs.inner; ++inner) {                           \
                for (std::size_t at = 0; at < runs.run; at += kLine) {                           \
                    _mm_prefetch(reinterpret_cast<const char*>(from + at) + ahead, _MM_HINT_T1); \
                    vector.template line<hash, store>(to + at, from + at, secret + 8 * stripe);  \
                    if constexpr (hash) {                                                        \
                        if (++stripe == kStripesPerBlock) {                                      \
                            vector.scramble(secret + kSecretBytes - kLine);                      \
                            stripe = 0;                                                          \
                        }                                                                        \
                    }                                                                            \
                }                                                                                \
                from += runs.inner_src;                                                          \
                to += runs.inner_dst;                                                            \
            }                                                                                    \
            src += runs.outer_src;                                                               \
            dst += runs.outer_dst;                                                               \
        }                                                                                        \
        if constexpr (hash) {                                                                    \
            vector.save(*lanes);                                                                 \
            lanes->stripe = stripe;                                                              \
        }                                                                                        \
    }                                                                                            \
    void NAME(Lanes* lanes, u8* dst, const u8* src, const Runs& runs, Store store) {             \
        if (store == Store::none) return NAME##_loop<true, Store::none>(lanes, dst, src, runs);  \
        if (store == Store::plain) {                                                             \
            return lanes ? NAME##_loop<true, Store::plain>(lanes, dst, src, runs)                \
                         : NAME##_loop<false, Store::plain>(lanes, dst, src, runs);              \
        }                                                                                        \
        return lanes ? NAME##_loop<true, Store::stream>(lanes, dst, src, runs)                   \
                     : NAME##_loop<false, Store::stream>(lanes, dst, src, runs);                 \
    }

LMCACHE_MOVE(LMCACHE_AVX512, Avx512, move_avx512)
LMCACHE_MOVE(LMCACHE_AVX2, Avx2, move_avx2)

// The SHA extensions keep the state as ABEF and CDGH, and do two rounds at a time.
LMCACHE_SHA void sha256_ni(u32 state[8], const u8* blocks, std::size_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    auto* words = reinterpret_cast<__m128i*>(state);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; count; --count, blocks += 64) {
        const __m128i abef0 = abef, cdgh0 = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (unsigned group = 0; group < 16; ++group) {
            __m128i& now = w[group & 3];
            if (group < 4) {
                const auto* from = reinterpret_cast<const __m128i*>(blocks) + group;
                now = _mm_shuffle_epi8(_mm_loadu_si128(from), swap);
            } else {
                const __m128i last = w[(group + 3) & 3];
                const __m128i seventh = _mm_alignr_epi8(last, w[(group + 2) & 3], 4);
                const __m128i partial = _mm_sha256msg1_epu32(now, w[(group + 1) & 3]);
                now = _mm_sha256msg2_epu32(_mm_add_epi32(partial, seventh), last);
            }
            const auto* rounds = reinterpret_cast<const __m128i*>(kSha256Rounds) + group;
            const __m128i keyed = _mm_add_epi32(now, _mm_loadu_si128(rounds));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, keyed);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(keyed, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef0);
        cdgh = _mm_add_epi32(cdgh, cdgh0);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

bool has_sha() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b >> 29 & 1);
}

auto sha256_best() {
    return has_sha() ? sha256_ni : detail::scalar.sha256;
}

}  // namespace

const Kernels* detail::avx512() {
    static const Kernels set = {"avx512", move_avx512, sha256_best()};
    return __builtin_cpu_supports("avx512f") ? &set : nullptr;
}

const Kernels* detail::avx2() {
    static const Kernels set = {"avx2", move_avx2, sha256_best()};
    return __builtin_cpu_supports("avx2") ? &set : nullptr;
}

}  // namespace lmcache

#endif
