// Just enough to state expectations; one executable, one name per part.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lmcache/kernels.hpp"

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                        \
        }                                                                        \
    } while (0)

// Bytes that never repeat with a period the code under test could know.
inline std::vector<lmcache::u8> noise(std::size_t n, lmcache::u32 start = 0) {
    std::vector<lmcache::u8> bytes(n);
    for (std::size_t i = 0; i < n; ++i) {
        bytes[i] =
            static_cast<lmcache::u8>((static_cast<lmcache::u32>(i) + start) * 2654435761U >> 13);
    }
    return bytes;
}

inline std::string hex(const lmcache::u8* bytes, std::size_t n) {
    std::string text;
    for (std::size_t i = 0; i < n; ++i) {
        char pair[3];
        std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
        text += pair;
    }
    return text;
}

// Runs `body` once with every instruction set of this machine.
template <class F>
void with_every_set(F&& body) {
    for (const lmcache::Kernels* set : lmcache::available()) {
        CHECK(lmcache::select(set->name));
        body();
    }
    CHECK(lmcache::select(lmcache::available()[0]->name));
}

void test_basis();
void test_chain();
void test_codecs();
void test_copy();
void test_pages();
void test_pool();
void test_quant();
void test_threads();
void test_xxh3();
