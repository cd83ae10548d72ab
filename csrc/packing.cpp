#include "packing.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"
#include "half.h"

namespace nb = nanobind;

namespace headstart {
namespace {

constexpr int64_t kWorthThreads = 2 << 20; // bytes: copying fewer takes less time than waking threads may

// Adds nothing to any product: scale 0 and min 0.
Strip blank_strip(const Matrix& form) {
    Strip strip{};
    const int byte = form.kind == Kind::Q8 ? form.zero : form.kind == Kind::Q4 ? form.zero * 0x11 : 0;
    std::memset(strip.body, byte, sizeof strip.body);
    return strip;
}

template <class Bits> uint8_t* write_scales(const Strip* strips, uint32_t (Strip::*values)[4], int groups, uint8_t* out) {
    for (int group = 0; group < groups; ++group)
        for (int64_t lane = 0; lane < kLanes; ++lane, out += sizeof(Bits)) {
            const Bits bits = static_cast<Bits>((strips[lane].*values)[group]);
            std::memcpy(out, &bits, sizeof bits);
        }
    return out;
}

// Unit by unit across the 16 rows; the units (halves, else 32-bit words) are what a lane reads at once.
template <class Unit> void interleave(const Strip* strips, int64_t bytes, uint8_t* out) {
    for (int64_t unit = 0; unit < bytes / kLanes; unit += sizeof(Unit))
        for (int64_t lane = 0; lane < kLanes; ++lane, out += sizeof(Unit))
            std::memcpy(out, strips[lane].body + unit, sizeof(Unit));
}

void write_panel(const Matrix& form, const Strip* strips, uint8_t* out) {
    const uint8_t* begin = out;
    if (form.quantized()) {
        const auto write = form.scale_f32 ? write_scales<uint32_t> : write_scales<uint16_t>;
        const int groups = static_cast<int>(kPanel / form.group);
        out = write(strips, &Strip::scales, groups, out);
        if (form.has_min) out = write(strips, &Strip::mins, groups, out);
    }
    const int64_t rest = form.panel_bytes() - (out - begin);
    if (form.kind == Kind::F16)
        interleave<uint16_t>(strips, rest, out);
    else
        interleave<uint32_t>(strips, rest, out);
}

struct Parts {
    const uint8_t *scales, *mins, *quants;
};

// The parts of one panel of a quantized matrix.
Parts parts_of(const Matrix& matrix, const uint8_t* panel) {
    const uint8_t* mins = panel + matrix.scale_bytes();
    return {panel, mins, mins + (matrix.has_min ? matrix.scale_bytes() : 0)};
}

float scale_at(const Matrix& matrix, const uint8_t* scales, int64_t index) {
    uint32_t wide;
    uint16_t half;
    if (matrix.scale_f32) {
        std::memcpy(&wide, scales + index * 4, 4);
        return float_from_bits(wide);
    }
    std::memcpy(&half, scales + index * 2, 2);
    return float_from_half(half);
}

float value_at(const Matrix& matrix, const uint8_t* panel, int64_t lane, int64_t column) {
    uint32_t word;
    uint16_t half;
    switch (matrix.kind) {
    case Kind::F32: std::memcpy(&word, panel + (column * kLanes + lane) * 4, 4); return float_from_bits(word);
    case Kind::F16: std::memcpy(&half, panel + (column * kLanes + lane) * 2, 2); return float_from_half(half);
    case Kind::BF16:
        std::memcpy(&half, panel + (column / 2 * kLanes + lane) * 4 + column % 2 * 2, 2);
        return float_from_bfloat(half);
    default: break;
    }
    const Parts parts = parts_of(matrix, panel);
    const int64_t index = column / matrix.group * kLanes + lane;
    int quant;
    if (matrix.kind == Kind::Q8) {
        quant = parts.quants[(column / 4 * kLanes + lane) * 4 + column % 4];
    } else {
        const int64_t vector = column / 32 * 4 + column % 16 / 4;
        const int byte = parts.quants[(vector * kLanes + lane) * 4 + column % 4];
        quant = column % 32 < 16 ? byte & 15 : byte >> 4;
    }
    const float scale = scale_at(matrix, parts.scales, index);
    if (matrix.has_min) return scale * static_cast<float>(quant) + scale_at(matrix, parts.mins, index);
    return scale * static_cast<float>(quant - matrix.zero);
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
        uint8_t* panel = out + block * form.block_bytes();
        for (int64_t column = 0; column < cols; column += kPanel, panel += form.panel_bytes()) {
            const int64_t count = std::min(kPanel, cols - column);
            if (count < kPanel) std::fill_n(strips, kLanes, blank);
            for (int64_t lane = 0; lane < lanes; ++lane)
                source.fill(raw + (first + lane) * row_bytes, column, count, strips[lane]);
            write_panel(form, strips, panel);
        }
    };
    const bool quantizes = source.fill == fill_int8 || source.fill == fill_int4;
    if (quantizes || form.num_bytes() >= kWorthThreads)
        ThreadPool::Turn(pool).for_each(form.num_blocks(), pack_block);
    else
        for (int64_t block = 0; block < form.num_blocks(); ++block) pack_block(block);
}

void dequantize(ThreadPool& pool, const Matrix& matrix, float* out) {
    ThreadPool::Turn(pool).for_each(matrix.rows, [&](int64_t row) {
        const uint8_t* block = matrix.block(row / kLanes);
        for (int64_t column = 0; column < matrix.cols; ++column) {
            const uint8_t* panel = block + column / kPanel * matrix.panel_bytes();
            out[row * matrix.cols + column] = value_at(matrix, panel, row % kLanes, column % kPanel);
        }
    });
}

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;

void check(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

void check_form(const Matrix& form) {
    check(form.kind >= Kind::F32 && form.kind <= Kind::Q4, "unknown kind");
    check(form.rows > 0 && form.cols > 0, "an empty matrix");
    check(!form.quantized() || form.group == 16 || form.group == 32, "groups have 16 or 32 columns");
}

void init_matrix(OwnedMatrix* self, int32_t kind, int64_t rows, int64_t cols, int32_t group, int32_t zero,
                 bool scale_f32, bool has_min, nb::object data) {
    Bytes bytes;
    check(nb::try_cast(data, bytes), "data is not a contiguous array of uint8");
    const Matrix form{static_cast<Kind>(kind), rows, cols, group, zero, scale_f32, has_min, bytes.data()};
    check_form(form);
    check(static_cast<int64_t>(bytes.size()) == form.num_bytes(), "data has the wrong size");
    check(reinterpret_cast<uintptr_t>(bytes.data()) % 64 == 0, "data is not aligned to 64 bytes");
    new (self) OwnedMatrix{form, std::move(data)};
}

const Source& source_named(const std::string& name) {
    const Source* source = find_source(name);
    if (!source) throw std::invalid_argument("no such source: " + name);
    return *source;
}

void pack_rows(ThreadPool& pool, const std::string& name, Bytes raw, int64_t cols,
               nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
    const Source& source = source_named(name);
    check(raw.ndim() == 2 && raw.shape(0) > 0 && cols > 0, "raw must be [rows, bytes of a row]");
    const int64_t rows = static_cast<int64_t>(raw.shape(0)), row_bytes = static_cast<int64_t>(raw.shape(1));
    check(cols % source.unit_columns == 0 && row_bytes == cols / source.unit_columns * source.unit_bytes,
          "raw has the wrong row size");
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
    return nb::make_tuple(static_cast<int>(source->kind), source->group, source->zero, source->scale_f32,
                          source->has_min);
}

int64_t matrix_bytes(int32_t kind, int64_t rows, int64_t cols, int32_t group, bool scale_f32, bool has_min) {
    const Matrix form{static_cast<Kind>(kind), rows, cols, group, 0, scale_f32, has_min, nullptr};
    check_form(form);
    return form.num_bytes();
}

} // namespace

void bind_packing(nb::module_& m) {
    nb::class_<Matrix>(m, "_MatrixView") // so that functions may take a Matrix&
        .def_prop_ro("kind", [](const Matrix& self) { return static_cast<int>(self.kind); })
        .def_ro("rows", &Matrix::rows)
        .def_ro("cols", &Matrix::cols)
        .def_ro("group", &Matrix::group)
        .def_ro("zero", &Matrix::zero)
        .def_ro("scale_f32", &Matrix::scale_f32)
        .def_ro("has_min", &Matrix::has_min)
        .def_prop_ro("num_bytes", &Matrix::num_bytes);
    nb::class_<OwnedMatrix, Matrix>(m, "Matrix")
        .def("__init__", init_matrix, nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"),
             nb::arg("zero"), nb::arg("scale_f32"), nb::arg("has_min"), nb::arg("data"))
        .def_ro("data", &OwnedMatrix::owner);
    m.def("source_form", source_form, nb::arg("source"));
    m.def("matrix_bytes", matrix_bytes, nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("group"),
          nb::arg("scale_f32"), nb::arg("has_min"));
    m.def("pack_rows", pack_rows, nb::arg("pool"), nb::arg("source"), nb::arg("raw"), nb::arg("cols"), nb::arg("out"));
    m.def("dequantize_into", dequantize_into, nb::arg("pool"), nb::arg("matrix"), nb::arg("out"));
}

} // namespace headstart
