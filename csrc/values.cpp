// Dequantizes packed weights, one row at a time.
#include "half.h"
#include "levels.h"
#include "matrix.h"

namespace headstart {
namespace {

uint16_t half_at(const uint8_t* at, int64_t index) {
    uint16_t bits;
    std::memcpy(&bits, at + index * 2, 2);
    return bits;
}

float float_at(const uint8_t* at, int64_t index) {
    float value;
    std::memcpy(&value, at + index * 4, 4);
    return value;
}

float float_from_e4m3(uint8_t code) { // read as float16, it is 2^-8 of its value
    return float_from_half(static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)) * 256.0f;
}

float plain_at(const Matrix& matrix, const uint8_t* block, int64_t lane, int64_t column) {
    switch (matrix.kind) {
    case Kind::F32: return float_at(block, column * kLanes + lane);
    case Kind::F16: return float_from_half(half_at(block, column * kLanes + lane));
    default: return float_from_bfloat(half_at(block, (column / 2 * kLanes + lane) * 2 + column % 2));
    }
}

float scale_at(const Matrix& matrix, const uint8_t* head, int64_t index, float factor) {
    switch (matrix.scales) {
    case Scales::F16: return float_from_half(half_at(head, index));
    case Scales::F32: return float_at(head, index);
    case Scales::BF16: return float_from_bfloat(half_at(head, index));
    case Scales::E8M0: return float_from_bits(head[index] ? static_cast<uint32_t>(head[index]) << 23 : 0x400000u);
    case Scales::E4M3: return float_from_e4m3(head[index]) * factor;
    case Scales::I8: return factor * static_cast<float>(static_cast<int8_t>(head[index]));
    }
    return 0;
}

int nibble_at(const uint8_t* half, int64_t lane, int64_t column) {
    const int byte = half[(column % 16 / 4 * kLanes + lane) * 4 + column % 4];
    return column % 32 < 16 ? byte & 15 : byte >> 4;
}

int code_at(const Matrix& matrix, const uint8_t* codes, int64_t lane, int64_t column) {
    if (matrix.kind == Kind::Q8) return codes[(column / 4 * kLanes + lane) * 4 + column % 4];
    const uint8_t* half = codes + column / 32 * (matrix.kind == Kind::Q6 ? 384 : matrix.kind == Kind::Q5 ? 320 : 256);
    if (matrix.kind == Kind::Q5) {
        const int tops = half[256 + lane * 4 + column % 4];
        const int64_t bit = column % 16 / 4 + (column % 32 < 16 ? 4 : 0);
        return nibble_at(half, lane, column) | (tops >> bit & 1) << 4;
    }
    if (matrix.kind != Kind::Q6) return nibble_at(half, lane, column);
    const int tops = half[256 + (column % 16 / 8 * kLanes + lane) * 4 + column % 4];
    const int64_t shift = column % 8 / 4 * 4 + column % 32 / 16 * 2;
    return nibble_at(half, lane, column) | (tops >> shift & 3) << 4;
}

} // namespace

void read_row(const Matrix& matrix, int64_t row, float* out) {
    const uint8_t* block = matrix.block(row / kLanes);
    const int64_t lane = row % kLanes;
    if (!matrix.grouped()) {
        for (int64_t column = 0; column < matrix.cols; ++column) out[column] = plain_at(matrix, block, lane, column);
        return;
    }
    float factor = matrix.has_factors() ? float_at(block, lane) : 1.0f, of_mins = factor;
    for (int64_t first = 0; first < matrix.cols; first += kPanel) {
        const uint8_t* panel = block + matrix.panel_at(first / kPanel);
        if (matrix.scales == Scales::I8 && first / kPanel % kFactorPanels == 0) {
            factor = float_from_half(half_at(panel - matrix.factor_bytes(), lane));
            of_mins = float_from_half(half_at(panel - matrix.factor_bytes(), kLanes + lane));
        }
        const uint8_t *offsets = panel + matrix.scale_bytes(), *codes = panel + matrix.head_bytes();
        for (int64_t c = 0; c < kPanel && first + c < matrix.cols; ++c) {
            const int64_t index = c / matrix.group * kLanes + lane;
            const float scale = scale_at(matrix, panel, index, factor);
            float& value = out[first + c];
            if (matrix.kind == Kind::F8) {
                value = float_from_e4m3(codes[(c / 2 * kLanes + lane) * 2 + c % 2]) * scale;
                continue;
            }
            int q = code_at(matrix, codes, lane, c);
            if (matrix.kind == Kind::L4) {
                value = float_levels(matrix.levels)[q] * scale;
                continue;
            }
            if (matrix.levels != Levels::NONE) q = byte_levels(matrix.levels)[q];
            const float number = static_cast<float>(q - (matrix.offsets == Offsets::POINTS ? offsets[index] : matrix.zero));
            if (matrix.offsets == Offsets::MINS)
                value = scale * static_cast<float>(q) + scale_at(matrix, offsets, index, of_mins);
            else
                value = scale * (matrix.levels == Levels::E2M1 ? 0.5f * number : number);
        }
    }
}

} // namespace headstart
