// Python face of calibrated coordinates; contract: the reference in serde/cachegen.
#include <nanobind/nanobind.h>

#include "lmcache/basis.hpp"
#include "views.hpp"

namespace lmcache {
namespace {

using namespace nb::literals;

// A buffer of floats, aligned as the processor wants them.
const float* floats(const View& view, std::size_t count, const char* what) {
    if (view.size() != 4 * count || reinterpret_cast<std::uintptr_t>(view.data()) % 4)
        refuse("%s are %lld aligned float32, got %lld bytes", what, static_cast<Length>(count),
               static_cast<Length>(view.size()));
    return reinterpret_cast<const float*>(view.data());
}

void make_basis(Basis* made, nb::handle mean, nb::handle forward, nb::handle backward, std::int64_t heads,
                std::int64_t dim) {
    if (heads < 1 || heads > 65536 || dim < 16 || dim % 16 || dim > Length{kMostDim})
        refuse("no basis of %lld heads of %lld elements", Length{heads}, Length{dim});
    const View means(mean), there(forward), back(backward);
    const auto channels = static_cast<std::size_t>(heads * dim);
    const std::size_t all = there.size() ? channels * static_cast<std::size_t>(dim) : 0;
    const float* m = floats(means, channels, "means");
    const float* f = floats(there, all, "coordinates of elements");
    const float* b = floats(back, all, "elements of coordinates");
    new (made) Basis{static_cast<std::size_t>(heads), static_cast<std::size_t>(dim), {m, m + channels},
                     {f, f + all}, {b, b + all}};
}

// What one call works on; views live as long as it.
struct Call {
    const View steps, limits, deltas, turns;
    Fineness fine;
    BasisRows rows;

    Call(const Basis& basis, nb::handle steps_, nb::handle limits_, nb::handle deltas_, std::int64_t group,
         double rounding, nb::handle turns_, bool interleaved, std::int64_t element, std::int64_t tokens,
         const View& plane, const View& symbols, std::int64_t offset, std::int64_t stride)
        : steps(steps_), limits(limits_), deltas(deltas_), turns(turns_) {
        const std::size_t channels = basis.heads * basis.dim;
        if (element < 0 || element > 2 || tokens < 1 || tokens > (1 << 24) || group < 1)
            refuse("no rows of %lld tokens in groups of %lld", Length{tokens}, Length{group});
        const auto count = static_cast<std::size_t>(tokens);
        if (plane.size() != count * channels * (element == 2 ? 4 : 2))
            refuse("a plane of %lld tokens has %lld bytes", Length{tokens}, static_cast<Length>(plane.size()));
        if (limits.size() != channels || (deltas.size() && deltas.size() != channels))
            refuse("%lld limits of %lld channels", static_cast<Length>(limits.size()),
                   static_cast<Length>(channels));
        if (turns.size() % (8 * count) || turns.size() / (8 * count) * 2 > basis.dim)
            refuse("%lld bytes are no turns of %lld tokens", static_cast<Length>(turns.size()), Length{tokens});
        if (offset < 0 || stride < static_cast<std::int64_t>(channels) || stride > (1 << 26) ||
            static_cast<std::size_t>(offset) + (count - 1) * static_cast<std::size_t>(stride) + channels >
                symbols.size())
            refuse("symbols from %lld in steps of %lld do not fit", Length{offset}, Length{stride});
        fine = {floats(steps, channels, "steps"), limits.data(), deltas.size() ? deltas.data() : nullptr,
                static_cast<std::size_t>(group), static_cast<float>(rounding)};
        const std::size_t pairs = turns.size() / (8 * count);
        rows = {static_cast<Element>(element), count, static_cast<std::size_t>(stride),
                pairs ? floats(turns, 2 * pairs * count, "turns") : nullptr, pairs, interleaved};
    }
};

std::ptrdiff_t py_encode(const Basis& basis, nb::handle source, nb::handle symbols, std::int64_t offset,
                         std::int64_t stride, nb::handle escapes, nb::handle steps, nb::handle limits,
                         nb::handle deltas, std::int64_t group, double rounding, nb::handle turns,
                         bool interleaved, std::int64_t element, std::int64_t tokens) {
    const View in(source), coded(symbols, true), out(escapes, true);
    const Call call(basis, steps, limits, deltas, group, rounding, turns, interleaved, element, tokens, in,
                    coded, offset, stride);
    const Unlocked unlocked(in.size());
    return basis_encode(basis, call.fine, call.rows, in.data(), coded.data() + offset, out.data(), out.size());
}

std::ptrdiff_t py_decode(const Basis& basis, nb::handle symbols, std::int64_t offset, std::int64_t stride,
                         nb::handle escapes, nb::handle into, nb::handle steps, nb::handle limits,
                         nb::handle deltas, std::int64_t group, nb::handle turns, bool interleaved,
                         std::int64_t element, std::int64_t tokens) {
    const View coded(symbols), far(escapes), out(into, true);
    const Call call(basis, steps, limits, deltas, group, 0.5, turns, interleaved, element, tokens, out, coded,
                    offset, stride);
    const Unlocked unlocked(out.size());
    return basis_decode(basis, call.fine, call.rows, coded.data() + offset, far.data(), far.size(), out.data());
}

}  // namespace

void bind_basis(nb::module_& module) {
    nb::class_<Basis>(module, "Basis")
        .def("__init__", make_basis, "mean"_a, "forward"_a, "backward"_a, "heads"_a, "dim"_a,
             nb::sig("def __init__(self, mean: Buffer, forward: Buffer, backward: Buffer, heads: int, "
                     "dim: int) -> None"));
    module.def("basis_encode", py_encode, "basis"_a, "source"_a, "symbols"_a, "offset"_a, "stride"_a,
               "escapes"_a, "steps"_a, "limits"_a, "deltas"_a, "group"_a, "rounding"_a, "turns"_a,
               "interleaved"_a, "element"_a, "tokens"_a,
               nb::sig("def basis_encode(basis: Basis, source: Buffer, symbols: Buffer, offset: int, "
                       "stride: int, escapes: Buffer, steps: Buffer, limits: Buffer, deltas: Buffer, "
                       "group: int, rounding: float, turns: Buffer, interleaved: bool, element: int, "
                       "tokens: int) -> int"));
    module.def("basis_decode", py_decode, "basis"_a, "symbols"_a, "offset"_a, "stride"_a, "escapes"_a,
               "into"_a, "steps"_a, "limits"_a, "deltas"_a, "group"_a, "turns"_a, "interleaved"_a,
               "element"_a, "tokens"_a,
               nb::sig("def basis_decode(basis: Basis, symbols: Buffer, offset: int, stride: int, "
                       "escapes: Buffer, into: Buffer, steps: Buffer, limits: Buffer, deltas: Buffer, "
                       "group: int, turns: Buffer, interleaved: bool, element: int, tokens: int) -> int"));
}

}  // namespace lmcache
