// What all bindings share: buffers held for one call, the interpreter lock, refusals.
#pragma once

#include <nanobind/nanobind.h>

#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "lmcache/kernels.hpp"

namespace lmcache {

namespace nb = nanobind;

// Work below this is done before another thread could have taken the interpreter and given it back.
inline constexpr std::size_t kUnlockFrom = std::size_t{64} << 10;

template <class... A>
[[noreturn]] void refuse(const char* format, A... values) {
    char text[256];
    std::snprintf(text, sizeof text, format, values...);
    throw nb::value_error(text);
}

using Length = long long;  // what %lld prints

// A contiguous buffer, held for one call.
class View {
public:
    explicit View(nb::handle object, bool writable = false) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_ND | PyBUF_FORMAT)) {
            if (!PyErr_ExceptionMatches(PyExc_BufferError)) throw nb::python_error();
            PyErr_Clear();
            throw nb::value_error("buffer is not contiguous");
        }
        if (writable && buffer_.readonly) {
            const Length n = buffer_.len;
            PyBuffer_Release(&buffer_);
            refuse("target buffer of %lld bytes is read-only", n);
        }
    }
    ~View() { PyBuffer_Release(&buffer_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    u8* data() const { return static_cast<u8*>(buffer_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(buffer_.len); }
    std::size_t itemsize() const { return static_cast<std::size_t>(buffer_.itemsize); }
    bool readonly() const { return buffer_.readonly; }
    std::string_view format() const { return buffer_.format ? buffer_.format : "B"; }

private:
    Py_buffer buffer_;
};

// Lets other Python threads run during large calls.
class Unlocked {
public:
    explicit Unlocked(std::size_t bytes) {
        if (bytes >= kUnlockFrom) state_ = PyEval_SaveThread();
    }
    ~Unlocked() {
        if (!state_) return;
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            // The interpreter is ending and ends this daemon thread, which no frame here survives: unwinding
            // would abort the process, so the thread waits for the end instead.
            for (;;) pause();
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

private:
    PyThreadState* state_ = nullptr;
};

// bindings/basis.cpp, bindings/codecs.cpp, bindings/quant.cpp
void bind_basis(nb::module_& module);
void bind_codecs(nb::module_& module);
void bind_quant(nb::module_& module);

}  // namespace lmcache
