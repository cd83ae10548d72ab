// A weight matrix [rows, cols] as the kernels read it: blocks of 16 output rows, one contiguous stream per block.
//
// Columns are padded with zeros to a multiple of 64 (`padded`), rows to a multiple of 16. Lane l of a block is row
// 16 b + l. A block is a sequence of panels of 64 columns; every panel starts on a 64-byte boundary.
//
//   F32   panel = 64 columns x 16 lanes of float
//   F16   panel = 64 columns x 16 lanes of half
//   BF16  panel = 32 column pairs x 16 lanes x 2: the even column is the low half of a lane's 32 bits
//   Q8    panel = scales, [mins,] quants: 16 column quads x 16 lanes x 4 bytes
//   Q4    panel = scales, [mins,] quants: for each half of 32 columns 4 x 64 bytes; byte i of lane l of vector j holds
//         column 4 j + i of the half in its low nibble and column 16 + 4 j + i in its high nibble
//
// scales and mins: (64 / group) x 16 lanes, float16 (scale_f32 false) or float32, group 16 or 32.
// Value of a weight: with mins scale * q + min; without scale * (q - zero); q is unsigned.
#pragma once

#include <cstddef>
#include <cstdint>

// For members of types that files compiled for several instruction sets share: none may leave a copy of its own, which
// the linker could choose for all of them.
#define HEADSTART_INLINE inline __attribute__((always_inline))

#define HEADSTART_QUOTED(x) #x
#define HEADSTART_STRING(x) HEADSTART_QUOTED(x)

namespace headstart {

enum class Kind : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8 = 3, Q4 = 4 };

constexpr int64_t kLanes = 16, kPanel = 64;

HEADSTART_INLINE int64_t whole_panels(int64_t cols) { return (cols + kPanel - 1) / kPanel * kPanel; }

struct Matrix {
    Kind kind = Kind::F32;
    int64_t rows = 0, cols = 0;
    int32_t group = 32;     // columns per scale: 16 or 32 (Q8, Q4)
    int32_t zero = 0;       // subtracted from q where there are no mins
    bool scale_f32 = false; // else float16
    bool has_min = false;
    const uint8_t* data = nullptr; // 64-byte aligned, num_bytes() long; owned by somebody else

    HEADSTART_INLINE int64_t padded() const { return whole_panels(cols); }
    HEADSTART_INLINE int64_t num_blocks() const { return (rows + kLanes - 1) / kLanes; }
    HEADSTART_INLINE bool quantized() const { return kind == Kind::Q8 || kind == Kind::Q4; }
    // of one panel
    HEADSTART_INLINE int64_t scale_bytes() const { return kPanel / group * kLanes * (scale_f32 ? 4 : 2); }
    HEADSTART_INLINE int64_t panel_bytes() const {
        switch (kind) {
        case Kind::F32: return kPanel * kLanes * 4;
        case Kind::F16:
        case Kind::BF16: return kPanel * kLanes * 2;
        case Kind::Q8: return scale_bytes() * (has_min ? 2 : 1) + kPanel * kLanes;
        case Kind::Q4: return scale_bytes() * (has_min ? 2 : 1) + kPanel * kLanes / 2;
        }
        return 0;
    }
    HEADSTART_INLINE int64_t block_bytes() const { return padded() / kPanel * panel_bytes(); }
    HEADSTART_INLINE int64_t num_bytes() const { return num_blocks() * block_bytes(); }
    HEADSTART_INLINE const uint8_t* block(int64_t index) const { return data + index * block_bytes(); }
};

} // namespace headstart
