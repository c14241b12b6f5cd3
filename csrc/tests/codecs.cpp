// Bit-exact on every pattern, and unmoved by what nobody encoded. LMCACHE_CASES: how many damaged
// inputs each codec sees (the nightly run has a million).
#include "lmcache/codecs.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "check.hpp"

using namespace lmcache;

namespace {

using Bytes = std::vector<u8>;
using Random = std::mt19937_64;

// A buffer of exactly this length, so that a sanitizer sees the first byte beyond.
Bytes exactly(const u8* data, std::size_t n) {
    return Bytes(data, data + n);
}

// bfloat16 of a bell curve, with some of everything that no arithmetic makes.
Bytes floats(Random& random, std::size_t n, double odd) {
    std::normal_distribution<float> bell;
    std::uniform_real_distribution<double> chance;
    Bytes bytes(2 * n);
    for (std::size_t i = 0; i < n; ++i) {
        const float value = bell(random) * static_cast<float>(1 << (i % 7));
        u32 bits;
        std::memcpy(&bits, &value, 4);
        auto word = static_cast<std::uint16_t>(bits >> 16);
        if (chance(random) < odd) word = static_cast<std::uint16_t>(random());
        std::memcpy(bytes.data() + 2 * i, &word, 2);
    }
    return bytes;
}

struct Codec {
    const char* name;
    std::size_t item, channels;

    Bytes encode(const Bytes& in, std::size_t planes) const {
        const bool fixed = *name == 'f';
        Bytes out(fixed ? x12_bound(in.size(), planes) : xr_bound(in.size(), planes));
        out.resize(fixed ? x12_encode(in.data(), in.size(), planes, out.data())
                         : xr_encode(in.data(), in.size(), planes, item, channels, out.data()));
        return out;
    }
    bool decode(const Bytes& in, std::size_t planes, Bytes& out) const {
        return *name == 'f' ? x12_decode(in.data(), in.size(), planes, out.data(), out.size())
                            : xr_decode(in.data(), in.size(), planes, item, channels, out.data(),
                                        out.size());
    }
};

constexpr Codec kCodecs[] = {{"fixed", 2, 96}, {"rans 8", 1, 96}, {"rans 16", 2, 96},
                             {"rans 32", 4, 48}};

void round_trip(const Codec& codec, const Bytes& in, std::size_t planes) {
    const Bytes coded = codec.encode(in, planes);
    Bytes back(in.size(), 0xEE);
    CHECK(codec.decode(coded, planes, back));
    CHECK(back == in);
}

// What one instruction set encodes every other decodes, and encodes alike.
void sets_agree(const Codec& codec, const Bytes& in) {
    Bytes first;
    with_every_set([&] {
        const Bytes coded = codec.encode(in, 2);
        if (first.empty()) first = coded;
        CHECK(coded == first);
        Bytes back(in.size());
        CHECK(codec.decode(first, 2, back));
        CHECK(back == in);
    });
}

void every_pattern(const Codec& codec) {
    Bytes all(4 * 65536);
    for (u32 i = 0; i < 65536; ++i) {
        const auto word = static_cast<std::uint16_t>(i);
        std::memcpy(all.data() + 2 * i, &word, 2);
        std::memcpy(all.data() + 131072 + 2 * ((i * 40503) & 0xFFFF), &word, 2);
    }
    all.resize(all.size() - all.size() % (2 * codec.item * codec.channels));
    sets_agree(codec, all);
}

void lengths(const Codec& codec, Random& random) {
    for (std::size_t rows : {0, 1, 2, 3, 7, 63, 64, 65, 130, 700}) {
        for (std::size_t planes : {1, 2}) {
            const std::size_t n = rows * codec.channels * codec.item * planes;
            for (double odd : {0.0, 0.002, 0.05, 1.0}) {
                Bytes in = floats(random, n / 2 + 1, odd);
                in.resize(n);
                round_trip(codec, in, planes);
            }
        }
    }
}

void odd_lengths(Random& random) {
    for (std::size_t n = 0; n < 300; ++n) {
        const Bytes in = floats(random, n, 0.003);
        for (const Codec& codec : {kCodecs[0], Codec{"rans 16", 2, 7}}) round_trip(codec, in, 1);
    }
}

void damage(const Codec& codec, Random& random, std::size_t cases) {
    const std::size_t n = 64 * codec.channels * codec.item;
    Bytes in = floats(random, n / 2 + 1, 0.001), out(n);
    in.resize(n);
    const Bytes good = codec.encode(in, 2);
    std::size_t refused = 0;
    for (std::size_t i = 0; i < cases; ++i) {
        Bytes bad = good;
        const std::size_t front = random() % 2 ? bad.size() : std::min<std::size_t>(64, bad.size());
        switch (random() % 5) {
            case 0: bad.resize(random() % bad.size()); break;
            case 1: bad[random() % front] ^= static_cast<u8>(1 << random() % 8); break;
            case 2: bad[random() % front] = static_cast<u8>(random()); break;
            case 3: bad.resize(bad.size() + 1 + random() % 600, 7); break;
            default:
                for (u8& byte : bad) byte = static_cast<u8>(random());
                if (random() % 2) std::memcpy(bad.data(), good.data(), 8);
                bad.resize(random() % (bad.size() + 1));
        }
        refused += !codec.decode(exactly(bad.data(), bad.size()), 2, out);
    }
    CHECK(refused > cases / 3);
}

void shared_coder(Random& random) {
    constexpr std::size_t kClasses = 3, kPeriod = 10;
    for (unsigned bits : {8U, 11U, 12U}) {
        u32 counts[kClasses][256] = {};
        std::vector<std::uint16_t> freqs;
        u8 of[kPeriod];
        for (std::size_t i = 0; i < kPeriod; ++i) of[i] = static_cast<u8>(i % kClasses);
        Bytes symbols(5003);
        std::geometric_distribution<int> steep(0.3);
        for (std::size_t i = 0; i < symbols.size(); ++i) {
            symbols[i] = static_cast<u8>(std::min(steep(random) * (1 + of[i % kPeriod]), 200));
            ++counts[of[i % kPeriod]][symbols[i]];
        }
        for (auto& each : counts) {
            rans_normalise(each, bits);
            for (u32 freq : each) freqs.push_back(static_cast<std::uint16_t>(freq));
        }
        RansTables tables;
        CHECK(tables.build(freqs.data(), kClasses, bits));
        Bytes out(rans_bound(symbols.size(), bits));
        const auto encode = [&] {
            return rans_encode(tables, {of, kPeriod}, symbols.data(), symbols.size(), out.data(),
                               out.size());
        };
        const std::size_t coded = encode();
        CHECK(coded > 0 && coded < symbols.size());
        with_every_set([&] {
            Bytes back(symbols.size());
            const Bytes in = exactly(out.data(), coded);
            CHECK(rans_decode(tables, {of, kPeriod}, in.data(), coded, back.data(), back.size()));
            CHECK(back == symbols);
            CHECK(!rans_decode(tables, {of, kPeriod}, in.data(), coded - 2, back.data(), back.size()));
        });
        symbols[17] = 255;
        CHECK(encode() == 0);
        freqs[0] = static_cast<std::uint16_t>(freqs[0] + 1);
        CHECK(!tables.build(freqs.data(), kClasses, bits));
    }
}

}  // namespace

void test_codecs() {
    const char* wanted = std::getenv("LMCACHE_CASES");
    const std::size_t cases = wanted ? std::strtoull(wanted, nullptr, 10) : 100'000;
    Random random(11);
    shared_coder(random);
    odd_lengths(random);
    for (const Codec& codec : kCodecs) {
        every_pattern(codec);
        lengths(codec, random);
        with_every_set([&] { damage(codec, random, cases / (4 * available().size())); });
    }
}
