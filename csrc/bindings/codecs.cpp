// Python face of the codecs. Contract of the coder: lmcache_core/codecs.py; of x12 and xr: the
// reference in serde/lossless. Sizes are checked here; damage is an answer, not an error.
#include <nanobind/nanobind.h>

#include <algorithm>

#include "lmcache/codecs.hpp"
#include "views.hpp"

namespace lmcache {
namespace {

using namespace nb::literals;

// The planes of a segment, for both lossless codecs.
struct Shape {
    std::size_t planes, item, channels;

    Shape(std::int64_t planes_, std::int64_t item_, std::int64_t channels_, std::size_t bytes)
        : planes(static_cast<std::size_t>(planes_)), item(static_cast<std::size_t>(item_)),
          channels(static_cast<std::size_t>(channels_)) {
        const bool known = item_ == 1 || item_ == 2 || item_ == 4;
        if (planes_ < 1 || planes_ > 255 || channels_ < 1 || channels_ > (1 << 24) || !known ||
            bytes % (planes * item)) {
            refuse("%lld bytes are not %lld planes of %lld-byte elements", static_cast<Length>(bytes),
                   Length{planes_}, Length{item_});
        }
        if (bytes >> 31) refuse("a segment of %lld bytes is too long", static_cast<Length>(bytes));
    }
};

void check_room(const View& target, std::size_t most) {
    if (target.size() < most) {
        refuse("encoding may need %lld bytes, got %lld", static_cast<Length>(most),
               static_cast<Length>(target.size()));
    }
}

std::size_t py_x12_encode(nb::handle source, nb::handle into, std::int64_t planes) {
    const View in(source), out(into, true);
    const Shape shape(planes, 2, 1, in.size());
    check_room(out, x12_bound(in.size(), shape.planes));
    const Unlocked unlocked(in.size());
    return x12_encode(in.data(), in.size(), shape.planes, out.data());
}

bool py_x12_decode(nb::handle source, nb::handle into, std::int64_t planes) {
    const View in(source), out(into, true);
    const Shape shape(planes, 2, 1, out.size());
    const Unlocked unlocked(out.size());
    return x12_decode(in.data(), in.size(), shape.planes, out.data(), out.size());
}

std::size_t py_xr_encode(nb::handle source, nb::handle into, std::int64_t planes, std::int64_t item,
                         std::int64_t channels) {
    const View in(source), out(into, true);
    const Shape shape(planes, item, channels, in.size());
    check_room(out, xr_bound(in.size(), shape.planes));
    const Unlocked unlocked(in.size());
    return xr_encode(in.data(), in.size(), shape.planes, shape.item, shape.channels, out.data());
}

bool py_xr_decode(nb::handle source, nb::handle into, std::int64_t planes, std::int64_t item,
                  std::int64_t channels) {
    const View in(source), out(into, true);
    const Shape shape(planes, item, channels, out.size());
    const Unlocked unlocked(out.size());
    return xr_decode(in.data(), in.size(), shape.planes, shape.item, shape.channels, out.data(),
                     out.size());
}

void make_tables(RansTables* made, nb::handle freqs, std::int64_t bits) {
    const View given(freqs);
    const std::size_t classes = given.size() / 512;
    if (given.size() % 512 || bits < 1 || bits > kRansBitsMost) {
        refuse("%lld bytes are not 256 uint16 frequencies per class of %lld bits",
               static_cast<Length>(given.size()), Length{bits});
    }
    std::vector<std::uint16_t> copied(classes * 256);
    std::copy_n(given.data(), given.size(), reinterpret_cast<u8*>(copied.data()));
    new (made) RansTables();
    if (!made->build(copied.data(), classes, static_cast<unsigned>(bits)))
        refuse("frequencies of %lld classes do not each sum to 1 << %lld",
               static_cast<Length>(classes), Length{bits});
}

Classes check_classes(const RansTables& tables, const View& classes) {
    if (classes.size() < 1 || classes.size() > (1U << 24))
        refuse("%lld classes repeat", static_cast<Length>(classes.size()));
    for (std::size_t i = 0; i < classes.size(); ++i) {
        if (classes.data()[i] >= tables.classes)
            refuse("class %lld of %lld", static_cast<Length>(classes.data()[i]),
                   static_cast<Length>(tables.classes));
    }
    return {classes.data(), classes.size()};
}

std::size_t py_rans_encode(const RansTables& tables, nb::handle classes, nb::handle symbols,
                           nb::handle into) {
    const View of(classes), in(symbols), out(into, true);
    const Classes groups = check_classes(tables, of);
    const std::size_t most = rans_bound(in.size(), tables.bits);
    check_room(out, most);
    std::size_t made;
    {
        const Unlocked unlocked(in.size());
        made = rans_encode(tables, groups, in.data(), in.size(), out.data(), most);
    }
    if (!made) refuse("a symbol of %lld is not in its table", static_cast<Length>(in.size()));
    return made;
}

bool py_rans_decode(const RansTables& tables, nb::handle classes, nb::handle source,
                    nb::handle into) {
    const View of(classes), in(source), out(into, true);
    const Classes groups = check_classes(tables, of);
    const Unlocked unlocked(out.size());
    return rans_decode(tables, groups, in.data(), in.size(), out.data(), out.size());
}

}  // namespace

void bind_codecs(nb::module_& module) {
    nb::class_<RansTables>(module, "RansTables")
        .def("__init__", make_tables, "freqs"_a, "bits"_a,
             nb::sig("def __init__(self, freqs: Buffer, bits: int) -> None"))
        .def_ro("bits", &RansTables::bits)
        .def_ro("classes", &RansTables::classes);
    module.def(
        "rans_bound",
        [](std::size_t count, unsigned bits) { return rans_bound(count, bits); },
        "count"_a, "bits"_a, nb::sig("def rans_bound(count: int, bits: int) -> int"));
    module.def("rans_encode", py_rans_encode, "tables"_a, "classes"_a, "symbols"_a, "into"_a,
               nb::sig("def rans_encode(tables: RansTables, classes: Buffer, symbols: Buffer, "
                       "into: Buffer) -> int"));
    module.def("rans_decode", py_rans_decode, "tables"_a, "classes"_a, "source"_a, "into"_a,
               nb::sig("def rans_decode(tables: RansTables, classes: Buffer, source: Buffer, "
                       "into: Buffer) -> bool"));
    module.def("x12_encode", py_x12_encode, "source"_a, "into"_a, "planes"_a,
               nb::sig("def x12_encode(source: Buffer, into: Buffer, planes: int) -> int"));
    module.def("x12_decode", py_x12_decode, "source"_a, "into"_a, "planes"_a,
               nb::sig("def x12_decode(source: Buffer, into: Buffer, planes: int) -> bool"));
    module.def("xr_encode", py_xr_encode, "source"_a, "into"_a, "planes"_a, "item"_a, "channels"_a,
               nb::sig("def xr_encode(source: Buffer, into: Buffer, planes: int, item: int, "
                       "channels: int) -> int"));
    module.def("xr_decode", py_xr_decode, "source"_a, "into"_a, "planes"_a, "item"_a, "channels"_a,
               nb::sig("def xr_decode(source: Buffer, into: Buffer, planes: int, item: int, "
                       "channels: int) -> bool"));
}

}  // namespace lmcache
