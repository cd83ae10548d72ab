// Configuration of the eight AMX tile registers. Set before every use: other code in the thread (oneDNN) may change it.
#pragma once

#include <cstdint>

namespace headstart {

constexpr int kTileQueries = 16; // maximum queries of an attention task

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
