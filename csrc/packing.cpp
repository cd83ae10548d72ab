#include "packing.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"

namespace nb = nanobind;

namespace headstart {
namespace {

constexpr int64_t kWorthThreads = 2 << 20; // bytes: copying less takes less time than waking threads

// Padding that adds 0 to every product: scale 0, min 0.
Strip blank_strip(const Matrix& form) {
    Strip strip{};
    const bool coded = !form.quantized() || form.levels != Levels::NONE;
    const int byte = coded ? 0 : form.kind == Kind::Q8 ? form.zero : form.zero * 0x11;
    std::memset(strip.body, byte, sizeof strip.body);
    return strip;
}

// Writes one number of `size` bytes per group and lane.
uint8_t* write_numbers(const Strip* strips, uint32_t (Strip::*values)[4], int groups, int64_t size, uint8_t* out) {
    for (int group = 0; group < groups; ++group)
        for (int64_t lane = 0; lane < kLanes; ++lane, out += size) std::memcpy(out, &(strips[lane].*values)[group], size);
    return out; // all supported machines are little-endian
}

// Interleaves the bodies of 16 rows by units that a lane reads at once (16 or 32 bits).
template <class Unit> void interleave(const Strip* strips, int64_t bytes, uint8_t* out) {
    for (int64_t unit = 0; unit < bytes / kLanes; unit += sizeof(Unit))
        for (int64_t lane = 0; lane < kLanes; ++lane, out += sizeof(Unit))
            std::memcpy(out, strips[lane].body + unit, sizeof(Unit));
}

// E4M3: float32 factors; I8: float16 factors of scales, then of mins.
void write_factors(const Matrix& form, const Strip* strips, uint8_t* out) {
    const int64_t size = form.scales == Scales::E4M3 ? 4 : 2;
    for (int64_t which = 0; which < 4 / size; ++which)
        for (int64_t lane = 0; lane < kLanes; ++lane, out += size) std::memcpy(out, &strips[lane].factors[which], size);
}

void write_panel(const Matrix& form, const Strip* strips, uint8_t* out) {
    uint8_t* body = out;
    if (form.grouped()) {
        const int groups = static_cast<int>(kPanel / form.group);
        uint8_t* end = write_numbers(strips, &Strip::scales, groups, form.scale_size(), out);
        if (form.offsets == Offsets::MINS) end = write_numbers(strips, &Strip::offsets, groups, form.scale_size(), end);
        if (form.offsets == Offsets::POINTS) end = write_numbers(strips, &Strip::offsets, groups, 1, end);
        body = out + form.head_bytes();
        std::fill(end, body, uint8_t(0));
    }
    const int64_t rest = form.panel_bytes() - (body - out);
    if (form.kind == Kind::F16 || form.kind == Kind::F8)
        interleave<uint16_t>(strips, rest, body);
    else
        interleave<uint32_t>(strips, rest, body);
}

} // namespace

void pack(ThreadPool& pool, const Source& source, const uint8_t* raw, int64_t row_bytes, int64_t rows, int64_t cols,
          uint8_t* out) {
    const Matrix form = source.form(rows, cols);
    const Strip blank = blank_strip(form);
    const auto pack_block = [&](int64_t block) {
        Strip strips[kLanes];
        std::fill_n(strips, kLanes, blank);
        const int64_t first = block * kLanes, lanes = std::min(kLanes, rows - first);
        for (int64_t panel = 0; panel * kPanel < cols; ++panel) {
            const int64_t column = panel * kPanel, count = std::min(kPanel, cols - column);
            if (count < kPanel) std::fill_n(strips, kLanes, blank);
            for (int64_t lane = 0; lane < lanes; ++lane) {
                const uint8_t* row = raw + (first + lane) * row_bytes;
                if (source.head_bytes()) std::memcpy(strips[lane].factors, row, source.head_bytes());
                source.fill(row + source.head_bytes(), column, count, strips[lane]);
            }
            uint8_t* at = out + block * form.block_bytes() + form.panel_at(panel);
            if (form.has_factors() && panel % form.factor_panels() == 0)
                write_factors(form, strips, at - form.factor_bytes());
            write_panel(form, strips, at);
        }
    };
    const bool quantizes = source.fill == fill_int8 || source.fill == fill_int4;
    if (quantizes || form.num_bytes() >= kWorthThreads)
        ThreadPool::Turn(pool).for_each(form.num_blocks(), pack_block);
    else
        for (int64_t block = 0; block < form.num_blocks(); ++block) pack_block(block);
}

void dequantize(ThreadPool& pool, const Matrix& matrix, float* out) {
    ThreadPool::Turn(pool).for_each(matrix.rows, [&](int64_t row) { read_row(matrix, row, out + row * matrix.cols); });
}

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

void check(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

void check_form(const Matrix& form) {
    check(form.kind >= Kind::F32 && form.kind <= Kind::Q5, "unknown kind");
    check(form.scales >= Scales::F16 && form.scales <= Scales::I8, "unknown scale type");
    check(form.offsets >= Offsets::NONE && form.offsets <= Offsets::POINTS, "unknown offsets");
    check(form.levels >= Levels::NONE && form.levels <= Levels::FP4, "unknown levels");
    check(form.rows > 0 && form.cols > 0, "a matrix needs rows and columns");
    check(!form.grouped() || form.group == 16 || form.group == 32 || form.group == 64,
          "a group must have 16, 32 or 64 columns");
}

Matrix form_of(int32_t kind, int64_t rows, int64_t cols, int32_t group, int32_t zero, int32_t scales, int32_t offsets,
               int32_t levels) {
    const Matrix form{static_cast<Kind>(kind), rows, cols, group, zero, static_cast<Scales>(scales),
                      static_cast<Offsets>(offsets), static_cast<Levels>(levels), nullptr};
    check_form(form);
    return form;
}

void init_matrix(OwnedMatrix* self, int32_t kind, int64_t rows, int64_t cols, int32_t group, int32_t zero,
                 int32_t scales, int32_t offsets, nb::object data, int32_t levels) {
    Bytes bytes;
    check(nb::try_cast(data, bytes), "data is not a contiguous array of uint8");
    Matrix form = form_of(kind, rows, cols, group, zero, scales, offsets, levels);
    check(form.is_supported(), "no kernel supports this matrix format");
    form.data = bytes.data();
    check(static_cast<int64_t>(bytes.size()) == form.num_bytes(), "data has the wrong size");
    check(reinterpret_cast<uintptr_t>(bytes.data()) % 64 == 0, "data is not aligned to 64 bytes");
    new (self) OwnedMatrix{form, std::move(data), {}};
}

const Source& source_named(const std::string& name) {
    const Source* source = find_source(name);
    if (!source) throw std::invalid_argument("unknown source type: " + name);
    return *source;
}

void pack_rows(ThreadPool& pool, const std::string& name, Bytes raw, int64_t cols,
               nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
    const Source& source = source_named(name);
    check(raw.ndim() == 2 && raw.shape(0) > 0 && cols > 0, "raw must be [rows, bytes of a row]");
    const int64_t rows = static_cast<int64_t>(raw.shape(0)), row_bytes = static_cast<int64_t>(raw.shape(1));
    check(row_bytes == source.row_bytes(cols), "raw has the wrong row size");
    check(static_cast<int64_t>(out.size()) == source.form(rows, cols).num_bytes(), "out has the wrong size");
    nb::gil_scoped_release release;
    pack(pool, source, raw.data(), row_bytes, rows, cols, out.data());
}

void dequantize_into(ThreadPool& pool, const Matrix& matrix,
                     nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
    check(static_cast<int64_t>(out.shape(0)) == matrix.rows && static_cast<int64_t>(out.shape(1)) == matrix.cols,
          "out has the wrong shape");
    nb::gil_scoped_release release;
    dequantize(pool, matrix, out.data());
}

nb::object source_form(const std::string& name) {
    const Source* source = find_source(name);
    if (!source) return nb::none();
    return nb::make_tuple(static_cast<int>(source->kind), source->group, source->zero, static_cast<int>(source->scales),
                          static_cast<int>(source->offsets), static_cast<int>(source->levels));
}

int64_t matrix_bytes(int32_t kind, int64_t rows, int64_t cols, int32_t group, int32_t scales, int32_t offsets) {
    return form_of(kind, rows, cols, group, 0, scales, offsets, 0).num_bytes();
}

} // namespace

void bind_packing(nb::module_& m) {
    nb::class_<Matrix>(m, "_MatrixView") // base class, for functions that take a Matrix&
        .def_prop_ro("kind", [](const Matrix& self) { return static_cast<int>(self.kind); })
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols)
        .def_ro("group", &Matrix::group)
        .def_ro("zero", &Matrix::zero)
        .def_prop_ro("scales", [](const Matrix& self) { return static_cast<int>(self.scales); })
        .def_prop_ro("offsets", [](const Matrix& self) { return static_cast<int>(self.offsets); })
        .def_prop_ro("levels", [](const Matrix& self) { return static_cast<int>(self.levels); })
        .def_prop_ro("num_bytes", &Matrix::num_bytes);
    nb::class_<OwnedMatrix, Matrix>(m, "Matrix")
        .def("__init__", init_matrix, nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"),
             nb::arg("zero"), nb::arg("scales"), nb::arg("offsets"), nb::arg("data"), nb::arg("levels") = 0)
        .def_ro("data", &OwnedMatrix::owner);
    m.def("source_form", source_form, nb::arg("source"));
    m.def("matrix_bytes", matrix_bytes, nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"),
          nb::arg("scales"), nb::arg("offsets"));
    m.def("pack_rows", pack_rows, nb::arg("pool"), nb::arg("source"), nb::arg("raw"), nb::arg("cols"), nb::arg("out"));
    m.def("dequantize_into", dequantize_into, nb::arg("pool"), nb::arg("matrix"), nb::arg("out"));
}

} // namespace headstart
