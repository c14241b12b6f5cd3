// Every operation from several threads at once: each on what it alone has, and on what all of them only read.
//
// What a sanitizer watches here are the caches kept per thread, what is set up by the first call, and the pool.
#include <atomic>
#include <thread>

#include "check.hpp"
#include "lmcache/basis.hpp"
#include "lmcache/chain.hpp"
#include "lmcache/codecs.hpp"
#include "lmcache/pages.hpp"
#include "lmcache/pool.hpp"
#include "lmcache/quant.hpp"

using namespace lmcache;

namespace {

using Bytes = std::vector<u8>;

constexpr int kCallers = 6, kRounds = 4;
constexpr std::size_t kTokens = 64, kChannels = 96;

// Runs `body(caller)` on several threads, which all begin together.
template <class F>
void at_once(F&& body) {
    std::atomic<int> waiting{kCallers};
    std::vector<std::thread> callers;
    for (int i = 0; i < kCallers; ++i) {
        callers.emplace_back([&, i] {
            --waiting;
            while (waiting.load() > 0) std::this_thread::yield();
            for (int round = 0; round < kRounds; ++round) body(i);
        });
    }
    for (std::thread& caller : callers) caller.join();
}

// One value, and everything that is made of it on the way through a tier.
struct Work {
    Bytes value, coded, symbols, packed;
    RansTables tables;
    u8 classes[2] = {0, 0};

    explicit Work(u32 seed) : value(noise(2 * kStreamFrom + 77, seed)), symbols(5000) {
        std::uint16_t freqs[256] = {};
        for (std::size_t i = 0; i < 16; ++i) freqs[i] = 256;
        CHECK(tables.build(freqs, 1, 12));
        for (std::size_t i = 0; i < symbols.size(); ++i) symbols[i] = value[i] % 16;
        packed = pack();
        coded = encode();
    }

    std::size_t nbytes() const { return 2 * 2 * kTokens * kChannels; }

    Bytes copies(unsigned threads) const {
        Bytes to(value.size());
        copy(to.data(), value.data(), value.size(), threads);
        return to;
    }
    std::string digests(Bytes& to) const {
        u8 plain[kDigestBytes], fused[kDigestBytes];
        digest(value.data(), value.size(), 7, plain);
        copy_and_digest(to.data(), value.data(), value.size(), 7, fused);
        CHECK(hex(plain, sizeof plain) == hex(fused, sizeof fused));
        return hex(plain, sizeof plain);
    }
    std::string chained() const {
        const u8 root[kChainBytes] = {};
        u8 out[8 * kChainBytes];
        chain(root, value.data(), 8, 37, out);
        return hex(out, sizeof out);
    }
    Bytes pack() const {
        Bytes out(rans_bound(symbols.size(), 12));
        out.resize(rans_encode(tables, {classes, 2}, symbols.data(), symbols.size(), out.data(),
                               out.size()));
        return out;
    }
    void unpack() const {
        Bytes back(symbols.size());
        CHECK(rans_decode(tables, {classes, 2}, packed.data(), packed.size(), back.data(),
                          back.size()));
        CHECK(back == symbols);
    }
    Bytes encode() const {
        Bytes x12(x12_bound(nbytes(), 2)), xr(xr_bound(nbytes(), 2));
        x12.resize(x12_encode(value.data(), nbytes(), 2, x12.data()));
        xr.resize(xr_encode(value.data(), nbytes(), 2, 2, kChannels, xr.data()));
        Bytes back(nbytes());
        CHECK(x12_decode(x12.data(), x12.size(), 2, back.data(), back.size()));
        CHECK(std::equal(back.begin(), back.end(), value.begin()));
        CHECK(xr_decode(xr.data(), xr.size(), 2, 2, kChannels, back.data(), back.size()));
        CHECK(std::equal(back.begin(), back.end(), value.begin()));
        x12.insert(x12.end(), xr.begin(), xr.end());
        return x12;
    }

    // All of it; what comes out is the same every time.
    void again(int caller) const {
        Bytes to = copies(static_cast<unsigned>(1 + caller % 3));
        CHECK(to == value);
        CHECK(digests(to) == digests(to) && chained() == chained());
        CHECK(pack() == packed && encode() == coded);
        unpack();
    }
};

// Rows of numbers through the lossy codecs.
void rows(const std::vector<float>& numbers) {
    const auto* in = reinterpret_cast<const u8*>(numbers.data());
    const PlaneShape shape{kTokens, 2, kChannels / 2, 16};
    for (u8 code = 1; code <= 10; ++code) {
        const auto which = static_cast<PlaneCode>(code);
        Bytes coded(quant_nbytes(which, shape)), other(coded.size()), back(4 * numbers.size());
        CHECK(quant_encode(which, Element::float32, shape, in, coded.data()));
        CHECK(quant_encode(which, Element::float32, shape, in, other.data()));
        CHECK(coded == other);
        quant_decode(which, Element::float32, shape, coded.data(), back.data());
    }
    const Basis basis{2, kChannels / 2, std::vector<float>(kChannels, 0.25F), {}, {}};
    const std::vector<float> steps(kChannels, 0.05F);
    const Bytes limits(kChannels, 60);
    const BasisRows shapes{Element::float32, kTokens, kChannels, nullptr, 0, false};
    const Fineness fine{steps.data(), limits.data(), nullptr, 10, 0.5F};
    Bytes symbols(numbers.size()), escapes(4 * numbers.size()), back(4 * numbers.size());
    const std::ptrdiff_t used =
        basis_encode(basis, fine, shapes, in, symbols.data(), escapes.data(), escapes.size());
    CHECK(used >= 0);
    CHECK(basis_decode(basis, fine, shapes, symbols.data(), escapes.data(),
                       static_cast<std::size_t>(used), back.data()) == used);
}

// Pages of one engine, read by all; each has a target of its own.
void pages(const Bytes& memory) {
    constexpr std::int64_t cell = 64, states = 16, blocks = 64, block = states * cell;
    const std::vector<std::int64_t> starts = {0, 1};
    std::vector<std::int64_t> ids(blocks);
    for (std::int64_t i = 0; i < blocks; ++i) ids[static_cast<std::size_t>(i)] = blocks - 1 - i;
    const auto plane = [&](const u8* at) {
        return std::vector<Plane>{
            {reinterpret_cast<std::int64_t>(at), 1, cell, block, cell, cell, 1, 0}};
    };
    const auto from = plane(memory.data());
    Bytes payload(blocks * block), target(payload.size()), digests(kDigestBytes);
    const auto to = plane(target.data());
    const Selection all{ids.data(), 0, blocks * states, 3};
    gather({from, starts, states, blocks}, all, payload.data(), 5, digests.data());
    CHECK(scatter({to, starts, states, blocks}, all, payload.data(), 5, digests.data()) == -1);
    CHECK(std::equal(target.begin(), target.end(), memory.begin()));
}

}  // namespace

void test_threads() {
    with_every_set([] {
        const Work shared(1);
        std::vector<float> numbers(kTokens * kChannels);
        for (std::size_t i = 0; i < numbers.size(); ++i)
            numbers[i] = static_cast<float>(shared.value[i]) / 64.0F - 2.0F;
        at_once([&](int caller) {
            shared.again(caller);
            Work(static_cast<u32>(caller)).again(caller);
            rows(numbers);
            pages(shared.value);
        });
        // Faulting in changes nothing, whoever reads or does the same.
        at_once([&](int caller) {
            auto* start = const_cast<u8*>(shared.value.data());
            CHECK(populate(start, shared.value.size(), caller % 2, 2) == 0);
            CHECK(shared.copies(2) == shared.value);
        });
    });
}
