// NEON (part of every aarch64) and, where the processor has them, the SHA-2 instructions.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <cstring>

#include "lmcache/kernels.hpp"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace lmcache {
namespace {

struct Neon {
    uint64x2_t acc[4];

    void load(const Lanes& lanes) {
        for (unsigned i = 0; i < 4; ++i) acc[i] = vld1q_u64(lanes.acc + 2 * i);
    }
    void save(Lanes& lanes) const {
        for (unsigned i = 0; i < 4; ++i) vst1q_u64(lanes.acc + 2 * i, acc[i]);
    }
    void line(u8* dst, const u8* src, const u8* key, bool hash, bool store) {
        for (unsigned i = 0; i < 4; ++i) {
            const uint8x16_t bytes = vld1q_u8(src + 16 * i);
            if (store) vst1q_u8(dst + 16 * i, bytes);
            if (!hash) continue;
            const uint64x2_t data = vreinterpretq_u64_u8(bytes);
            const uint64x2_t mixed = veorq_u64(data, vreinterpretq_u64_u8(vld1q_u8(key + 16 * i)));
            acc[i] = vaddq_u64(acc[i], vextq_u64(data, data, 1));
            acc[i] = vmlal_u32(acc[i], vmovn_u64(mixed), vshrn_n_u64(mixed, 32));
        }
    }
    void scramble(const u8* key) {
        const uint32x2_t prime = vdup_n_u32(static_cast<u32>(kPrime32_1));
        for (unsigned i = 0; i < 4; ++i) {
            const uint64x2_t secret = vreinterpretq_u64_u8(vld1q_u8(key + 16 * i));
            const uint64x2_t mixed = veorq_u64(veorq_u64(acc[i], vshrq_n_u64(acc[i], 47)), secret);
            const uint64x2_t high = vshlq_n_u64(vmull_u32(vshrn_n_u64(mixed, 32), prime), 32);
            acc[i] = vmlal_u32(high, vmovn_u64(mixed), prime);
        }
    }
};

// Stores are ordinary ones: aarch64 cores detect streaming writes by themselves.
void move(Lanes* lanes, u8* dst, const u8* src, const Runs& runs, Store store) {
    Neon vector{};
    if (lanes) vector.load(*lanes);
    unsigned stripe = lanes ? lanes->stripe : 0;
    for (std::size_t outer = 0; outer < runs.outer; ++outer) {
        const u8* from = src;
        u8* to = dst;
        for (std::size_t inner = 0; inner < runs.inner; ++inner) {
            for (std::size_t at = 0; at < runs.run; at += kLine) {
                const u8* key = lanes ? lanes->secret + 8 * stripe : nullptr;
                vector.line(to + at, from + at, key, lanes != nullptr, store != Store::none);
                if (lanes && ++stripe == kStripesPerBlock) {
                    vector.scramble(lanes->secret + kSecretBytes - kLine);
                    stripe = 0;
                }
            }
            from += runs.inner_src;
            to += runs.inner_dst;
        }
        src += runs.outer_src;
        dst += runs.outer_dst;
    }
    if (!lanes) return;
    vector.save(*lanes);
    lanes->stripe = stripe;
}

__attribute__((target("+crypto"))) void sha256_crypto(u32 state[8], const u8* blocks,
                                                      std::size_t count) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; count; --count, blocks += 64) {
        const uint32x4_t abcd0 = abcd, efgh0 = efgh;
        uint32x4_t w[4];
        for (unsigned group = 0; group < 16; ++group) {
            uint32x4_t& now = w[group & 3];
            if (group < 4) {
                now = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(blocks + 16 * group)));
            } else {
                const uint32x4_t partial = vsha256su0q_u32(now, w[(group + 1) & 3]);
                now = vsha256su1q_u32(partial, w[(group + 2) & 3], w[(group + 3) & 3]);
            }
            const uint32x4_t keyed = vaddq_u32(now, vld1q_u32(kSha256Rounds + 4 * group));
            const uint32x4_t previous = abcd;
            abcd = vsha256hq_u32(abcd, efgh, keyed);
            efgh = vsha256h2q_u32(efgh, previous, keyed);
        }
        abcd = vaddq_u32(abcd, abcd0);
        efgh = vaddq_u32(efgh, efgh0);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

bool has_sha() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_SHA2;
#elif defined(__APPLE__)
    return true;
#else
    return false;
#endif
}

}  // namespace

const Kernels* detail::neon() {
    static const Kernels set = {"neon", move, has_sha() ? sha256_crypto : detail::scalar.sha256};
    return &set;
}

}  // namespace lmcache

#endif
