// Coordinates come back close, escapes are counted, any symbols are survived.
#include "lmcache/basis.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include "check.hpp"

using namespace lmcache;

namespace {

constexpr std::size_t kTokens = 37, kHeads = 2, kDim = 48, kChannels = kHeads * kDim;

// A rotation in every pair of neighbours, so that backward is the transpose of forward.
Basis basis() {
    Basis made{kHeads, kDim, std::vector<float>(kChannels, 0.25F), std::vector<float>(kChannels * kDim),
               std::vector<float>(kChannels * kDim)};
    for (std::size_t head = 0; head < kHeads; ++head) {
        float* forward = made.forward.data() + head * kDim * kDim;
        float* backward = made.backward.data() + head * kDim * kDim;
        for (std::size_t i = 0; i < kDim; i += 2) {
            const float c = std::cos(static_cast<float>(i)), s = std::sin(static_cast<float>(i));
            forward[i * kDim + i] = forward[(i + 1) * kDim + i + 1] = c;
            forward[i * kDim + i + 1] = s, forward[(i + 1) * kDim + i] = -s;
        }
        for (std::size_t i = 0; i < kDim; ++i)
            for (std::size_t j = 0; j < kDim; ++j) backward[j * kDim + i] = forward[i * kDim + j];
    }
    return made;
}

struct Case {
    Basis coordinates;
    std::vector<float> steps = std::vector<float>(kChannels, 0.05F), turns, in, out;
    std::vector<u8> limits = std::vector<u8>(kChannels, 60), deltas, symbols, escapes;
    BasisRows rows;
    Fineness fine;

    Case(bool matrices, bool turned, bool grouped)
        : coordinates(basis()), in(kTokens * kChannels), out(in.size()), symbols(in.size()),
          escapes(2 * in.size()) {
        if (!matrices) coordinates.forward.clear(), coordinates.backward.clear();
        std::mt19937 random(7);
        std::normal_distribution<float> bell;
        for (float& value : in) value = bell(random);
        const std::size_t pairs = turned ? kDim / 4 : 0;  // half of the elements
        for (std::size_t t = 0; t < kTokens && turned; ++t) {
            for (std::size_t half = 0; half < 2; ++half)
                for (std::size_t i = 0; i < pairs; ++i) {
                    const float angle = static_cast<float>(t) / static_cast<float>(i + 1);
                    turns.push_back(half ? std::sin(angle) : std::cos(angle));
                }
        }
        if (grouped) deltas.assign(kChannels, 0xFF);
        rows = {Element::float32, kTokens, kChannels, turned ? turns.data() : nullptr, pairs, false};
        fine = {steps.data(), limits.data(), grouped ? deltas.data() : nullptr, 10, 0.5F};
    }

    const u8* source() const { return reinterpret_cast<const u8*>(in.data()); }
    u8* target() { return reinterpret_cast<u8*>(out.data()); }
    std::ptrdiff_t encode(std::size_t room) {
        return basis_encode(coordinates, fine, rows, source(), symbols.data(), escapes.data(), room);
    }
    std::ptrdiff_t decode(std::size_t bytes) {
        return basis_decode(coordinates, fine, rows, symbols.data(), escapes.data(), bytes, target());
    }
};

void rows_come_back_within_half_a_step() {
    for (unsigned kind = 0; kind < 8; ++kind) {
        Case c(kind & 1, kind & 2, kind & 4);
        const std::ptrdiff_t used = c.encode(c.escapes.size());
        CHECK(used > 0);  // three deviations are beyond 60 steps
        CHECK(c.decode(static_cast<std::size_t>(used)) == used);
        double error = 0;
        for (std::size_t i = 0; i < c.in.size(); ++i) {
            const double d = c.in[i] - c.out[i];
            error += d * d;
        }
        CHECK(std::sqrt(error / static_cast<double>(c.in.size())) < 0.5 * 0.05);
        CHECK(c.encode(static_cast<std::size_t>(used) - 2) == -1);
        CHECK(c.decode(static_cast<std::size_t>(used) - 2) == -1);
    }
}

void what_is_not_finite_is_refused() {
    for (const float bad : {INFINITY, NAN, 1e30F}) {
        Case c(true, true, false);
        c.in[c.in.size() - 5] = bad;
        CHECK(c.encode(c.escapes.size()) == -2);
    }
}

void any_symbols_are_some_numbers() {
    std::mt19937 random(1);
    for (int n = 0; n < 200; ++n) {
        Case c(n & 1, n & 2, n & 4);
        c.rows.element = n % 3 ? Element::bfloat16 : Element::float16;
        for (u8& symbol : c.symbols) symbol = static_cast<u8>(random());
        for (u8& byte : c.escapes) byte = static_cast<u8>(random());
        c.decode(random() % c.escapes.size());
    }
}

}  // namespace

void test_basis() {
    rows_come_back_within_half_a_step();
    what_is_not_finite_is_refused();
    any_symbols_are_some_numbers();
}
