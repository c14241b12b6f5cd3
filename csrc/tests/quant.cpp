// Close on what they are for, refused where they are not, quiet on any bytes.
#include "lmcache/quant.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include "check.hpp"

using namespace lmcache;

namespace {

constexpr u8 kCodes = 10;

std::vector<u8> plane(const PlaneShape& shape, Element element, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> bell;
    std::vector<u8> bytes;
    for (std::size_t i = 0; i < shape.rows() * shape.dim; ++i) {
        const float value = element == Element::float16 ? 1.5F : bell(random);
        u8 raw[4];
        std::memcpy(raw, &value, 4);
        const u8 half[2] = {static_cast<u8>(random()), 0x3C};  // 1 to 2
        if (element == Element::float32) bytes.insert(bytes.end(), raw, raw + 4);
        else if (element == Element::bfloat16) bytes.insert(bytes.end(), raw + 2, raw + 4);
        else bytes.insert(bytes.end(), half, half + 2);
    }
    return bytes;
}

float first_of(const std::vector<u8>& bytes, std::size_t i) {
    u32 bits = 0;
    std::memcpy(reinterpret_cast<u8*>(&bits) + 2, bytes.data() + 2 * i, 2);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}


void every_code_comes_back_close() {
    for (u8 code = 1; code <= kCodes; ++code) {
        for (const std::size_t tokens : {std::size_t{1}, std::size_t{37}, std::size_t{64}}) {
            const PlaneShape shape{tokens, 3, 48, 16};
            const auto which = static_cast<PlaneCode>(code);
            const std::vector<u8> in = plane(shape, Element::bfloat16, code);
            std::vector<u8> coded(quant_nbytes(which, shape)), back(in.size());
            CHECK(quant_encode(which, Element::bfloat16, shape, in.data(), coded.data()));
            quant_decode(which, Element::bfloat16, shape, coded.data(), back.data());
            double error = 0, all = 0;
            for (std::size_t i = 0; i < in.size() / 2; ++i) {
                const double a = first_of(in, i), b = first_of(back, i);
                error += (a - b) * (a - b), all += a * a;
            }
            CHECK(std::sqrt(error / all) < 0.25);
        }
    }
}

void other_elements_and_any_bytes() {
    std::mt19937 random(1);
    for (u8 code = 1; code <= kCodes; ++code) {
        for (const Element element : {Element::bfloat16, Element::float16, Element::float32}) {
            const PlaneShape shape{9, 2, 24, 4};
            const auto which = static_cast<PlaneCode>(code);
            const std::vector<u8> in = plane(shape, element, code);
            std::vector<u8> coded(quant_nbytes(which, shape)), back(in.size());
            CHECK(quant_encode(which, element, shape, in.data(), coded.data()));
            for (int n = 0; n < 50; ++n) {
                for (u8& byte : coded) byte = static_cast<u8>(random());
                quant_decode(which, element, shape, coded.data(), back.data());
            }
        }
    }
}

void what_is_not_finite_is_refused() {
    for (u8 code = 1; code <= kCodes; ++code) {
        const PlaneShape shape{8, 1, 16, 8};
        const auto which = static_cast<PlaneCode>(code);
        for (const u8 high : {u8{0x80}, u8{0xC0}}) {
            std::vector<u8> in = plane(shape, Element::bfloat16, code);
            in[100] = high, in[101] = 0x7F;
            std::vector<u8> coded(quant_nbytes(which, shape));
            CHECK(!quant_encode(which, Element::bfloat16, shape, in.data(), coded.data()));
        }
        CHECK(!quant_nbytes(which, PlaneShape{8, 1, 12, 8}));
    }
}

}  // namespace

void test_quant() {
    every_code_comes_back_close();
    other_elements_and_any_bytes();
    what_is_not_finite_is_refused();
}
