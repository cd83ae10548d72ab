// Packed weight matrix [rows, cols]: blocks of 16 output rows, each block one contiguous stream.
//
// Columns are padded with zeros to a multiple of 64 (`padded`), rows to a multiple of 16. Lane l of a block is row
// 16 b + l. A block is a sequence of panels of 64 columns; every panel starts on a 64-byte boundary.
//
//   F32   panel = 64 columns x 16 lanes of float
//   F16   panel = 64 columns x 16 lanes of half
//   BF16  panel = 32 column pairs x 16 lanes x 2: the even column is the low half of a lane's 32 bits
//   Q8    panel = head, quants: 16 column quads x 16 lanes x 4 bytes
//   Q4    panel = head, quants: for each half of 32 columns 4 x 64 bytes; byte i of lane l of vector j holds column
//         4 j + i of the half in its low nibble and column 16 + 4 j + i in its high nibble
//   Q5    panel = head, quants: for each half 4 x 64 bytes as in Q4, then 64 bytes of the fifth bits: byte i of lane l
//         holds that of column 4 j + i in bit 4 + j and that of column 16 + 4 j + i in bit j
//   Q6    panel = head, quants: for each half 4 x 64 bytes as in Q4, then 2 x 64 bytes of the two high bits: byte i of
//         lane l of vector j holds those of columns 8 j + i, 16 + 8 j + i, 8 j + 4 + i and 20 + 8 j + i, two bits each
//   F8    panel = head, codes (FP8 E4M3): 32 column pairs x 16 lanes x 2 bytes
//   L4    panel = head, codes in Q4's order that index a table of 16 floats
//
// Head: scales, then mins or zero points, padded to 64 bytes: (64 / group) x 16 lanes each, group 16, 32 or 64. Mins have
// the scales' type, zero points are bytes. E4M3 scales have a factor per row: 16 floats before the panels of a block. I8
// scales have float16 factors before every fourth panel (64 bytes): 16 for the scales, then 16 for the mins.
// Weight value: with mins scale * q + min; with zero points scale * (q - point); else scale * (q - zero). q is unsigned,
// or the table's level (Q4 with E2M1: twice the value, with half the scale; L4: the float itself).
#pragma once

#include <cstddef>
#include <cstdint>

// For functions shared by files compiled for different instruction sets: an out-of-line copy could be linked into all of
// them, and fail on older CPUs.
#define HEADSTART_INLINE inline __attribute__((always_inline))

#define HEADSTART_QUOTED(x) #x
#define HEADSTART_STRING(x) HEADSTART_QUOTED(x)

namespace headstart {

enum class Kind : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8 = 3, Q4 = 4, F8 = 5, L4 = 6, Q6 = 7, Q5 = 8 };
enum class Scales : int32_t { F16 = 0, F32 = 1, BF16 = 2, E8M0 = 3, E4M3 = 4, I8 = 5 };
enum class Offsets : int32_t { NONE = 0, MINS = 1, POINTS = 2 };
enum class Levels : int32_t { NONE = 0, E2M1 = 1, IQ4 = 2, NF4 = 3, FP4 = 4 };

constexpr int64_t kLanes = 16, kPanel = 64;
constexpr int64_t kFactorPanels = 4; // panels that share the factors of I8 scales

HEADSTART_INLINE int64_t whole_panels(int64_t cols) { return (cols + kPanel - 1) / kPanel * kPanel; }

struct Matrix {
    Kind kind = Kind::F32;
    int64_t rows = 0, cols = 0;
    int32_t group = 32; // columns per scale: 16, 32 or 64
    int32_t zero = 0;   // subtracted from q if there are no offsets
    Scales scales = Scales::F16;
    Offsets offsets = Offsets::NONE;
    Levels levels = Levels::NONE;
    const uint8_t* data = nullptr; // [num_bytes()], 64-byte aligned, not owned

    HEADSTART_INLINE int64_t padded() const { return whole_panels(cols); }
    HEADSTART_INLINE int64_t num_blocks() const { return (rows + kLanes - 1) / kLanes; }
    HEADSTART_INLINE bool quantized() const { // multiplies int8 rows
        return kind == Kind::Q8 || kind == Kind::Q4 || kind == Kind::Q6 || kind == Kind::Q5;
    }
    HEADSTART_INLINE bool grouped() const { return kind >= Kind::Q8; }                       // has scales
    // Whether the kernels support this combination; only combinations that occur in files are compiled.
    HEADSTART_INLINE bool is_supported() const {
        const bool none = offsets == Offsets::NONE, mins = offsets == Offsets::MINS, plain = scales <= Scales::BF16;
        if (!grouped()) return true;
        if (kind == Kind::F8 || kind == Kind::L4) return none && scales == Scales::F32;
        if (kind == Kind::Q6) return none && scales == Scales::I8 && group == 16;
        if (kind == Kind::Q5 && (group != 32 || !(none || mins))) return false;
        if (levels != Levels::NONE) return kind == Kind::Q4 && none && (scales != Scales::I8 || group == 32);
        if (group == 64) return plain && !mins && (kind == Kind::Q8 || !none);
        if (!none && !mins) return kind == Kind::Q4 && group == 32 && plain;
        if (group == 16) return kind == Kind::Q4 && scales == Scales::I8;
        if (kind == Kind::Q8) return none && scales == Scales::F16;
        return scales == Scales::F16 || (mins && scales == Scales::I8);
    }
    HEADSTART_INLINE bool same_format(const Matrix& other) const { // same format: one kernel call can multiply both
        return kind == other.kind && group == other.group && zero == other.zero && scales == other.scales &&
               offsets == other.offsets && levels == other.levels;
    }
    HEADSTART_INLINE int64_t scale_size() const {
        return scales == Scales::F32 ? 4 : scales == Scales::F16 || scales == Scales::BF16 ? 2 : 1;
    }
    // Sizes within one panel. No divisions: these run for every few rows.
    HEADSTART_INLINE int64_t groups() const { return group == 16 ? 4 : group == 32 ? 2 : 1; }
    HEADSTART_INLINE int64_t scale_bytes() const { return groups() * kLanes * scale_size(); }
    HEADSTART_INLINE int64_t head_bytes() const {
        const int64_t more = offsets == Offsets::MINS ? scale_bytes() : offsets == Offsets::POINTS ? groups() * kLanes : 0;
        return (scale_bytes() + more + 63) / 64 * 64;
    }
    HEADSTART_INLINE int64_t panel_bytes() const {
        switch (kind) {
        case Kind::F32: return kPanel * kLanes * 4;
        case Kind::F16:
        case Kind::BF16: return kPanel * kLanes * 2;
        case Kind::Q8:
        case Kind::F8: return head_bytes() + kPanel * kLanes;
        case Kind::Q4:
        case Kind::L4: return head_bytes() + kPanel * kLanes / 2;
        case Kind::Q5: return head_bytes() + kPanel * kLanes / 8 * 5;
        case Kind::Q6: return head_bytes() + kPanel * kLanes / 4 * 3;
        }
        return 0;
    }
    HEADSTART_INLINE bool has_factors() const { return grouped() && scales >= Scales::E4M3; }
    HEADSTART_INLINE int64_t factor_bytes() const { return has_factors() ? kLanes * 4 : 0; }
    HEADSTART_INLINE int64_t factor_panels() const { return scales == Scales::I8 ? kFactorPanels : padded() / kPanel; }
    // Offset of a panel in its block; factors come directly before their first panel.
    HEADSTART_INLINE int64_t panel_at(int64_t panel) const {
        return panel * panel_bytes() + ((scales == Scales::I8 ? panel / kFactorPanels : 0) + 1) * factor_bytes();
    }
    HEADSTART_INLINE int64_t block_bytes() const { return panel_at(padded() / kPanel - 1) + panel_bytes(); }
    HEADSTART_INLINE int64_t num_bytes() const { return num_blocks() * block_bytes(); }
    HEADSTART_INLINE const uint8_t* block(int64_t index) const { return data + index * block_bytes(); }
};

void read_row(const Matrix& matrix, int64_t row, float* out); // out [cols], dequantized; values.cpp

} // namespace headstart
