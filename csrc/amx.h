// The shape of the eight tile registers. Whoever multiplies sets it first: other code of the thread (oneDNN) may have set
// another one.
#pragma once

#include <cstdint>

namespace headstart {

constexpr int kTileQueries = 16; // of a task of attention

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int num_rows, int bytes) {
        rows[tile] = (uint8_t)num_rows;
        row_bytes[tile] = (uint16_t)bytes;
    }
};

} // namespace headstart
