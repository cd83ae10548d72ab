// How each type of rows is read. Every type keeps the file's values exactly: the same numbers, combined in the same
// order as the format's own definition.
#include <cstring>

#include "half.h"
#include "packing.h"

namespace headstart {
namespace {

uint16_t load16(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return bits;
}

template <int bytes> void fill_plain(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    std::memcpy(strip.body, row + column * bytes, static_cast<size_t>(count * bytes));
}

// ggml's 4-bit blocks of 32 columns have the panel's own order: column i beside column 16 + i.
template <bool with_min> void fill_q4(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    constexpr int head = with_min ? 4 : 2;
    const uint8_t* block = row + column / 32 * (head + 16);
    for (int64_t half = 0; half < count / 32; ++half, block += head + 16) {
        strip.scales[half] = load16(block);
        if (with_min) strip.mins[half] = load16(block + 2);
        std::memcpy(strip.body + half * 16, block + head, 16);
    }
}

void fill_q8_0(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    const uint8_t* block = row + column / 32 * 34;
    for (int64_t half = 0; half < count / 32; ++half, block += 34) {
        strip.scales[half] = load16(block);
        for (int i = 0; i < 32; ++i) strip.body[half * 32 + i] = block[2 + i] ^ 0x80; // signed q -> q + 128
    }
}

// Q5: the fifth bit of column i is bit i of a 32-bit word before the nibbles.
template <bool with_min> void fill_q5(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    constexpr int head = with_min ? 4 : 2, bytes = head + 4 + 16;
    const uint8_t* block = row + column / 32 * bytes;
    for (int64_t half = 0; half < count / 32; ++half, block += bytes) {
        strip.scales[half] = load16(block);
        if (with_min) strip.mins[half] = load16(block + 2);
        const uint8_t *high = block + head, *low = high + 4;
        for (int i = 0; i < 32; ++i) {
            const int nibble = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
            strip.body[half * 32 + i] = static_cast<uint8_t>(nibble | (high[i / 8] >> i % 8 & 1) << 4);
        }
    }
}

// IQ4: nibbles that stand for 16 uneven levels; as bytes (+ 128) they are exact.
constexpr uint8_t kLevels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

void fill_levels(const uint8_t* nibbles, uint8_t* body) {
    for (int i = 0; i < 16; ++i) {
        body[i] = kLevels[nibbles[i] & 15];
        body[16 + i] = kLevels[nibbles[i] >> 4];
    }
}

void fill_iq4_nl(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    const uint8_t* block = row + column / 32 * 18;
    for (int64_t half = 0; half < count / 32; ++half, block += 18) {
        strip.scales[half] = load16(block);
        fill_levels(block + 2, strip.body + half * 32);
    }
}

// Twice the sixteen values of E2M1, plus 128; the scale is half of the block's power of two.
constexpr uint8_t kE2M1[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

void fill_mxfp4(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    const uint8_t* block = row + column / 32 * 17;
    for (int64_t half = 0; half < count / 32; ++half, block += 17) {
        const uint32_t power = block[0]; // 2^(power - 128), below the smallest normal number a denormal
        strip.scales[half] = power > 1 ? (power - 1) << 23 : 0x200000u << power;
        for (int i = 0; i < 16; ++i) {
            strip.body[half * 32 + i] = kE2M1[block[1 + i] & 15];
            strip.body[half * 32 + 16 + i] = kE2M1[block[1 + i] >> 4];
        }
    }
}

// --- K-quants: blocks of 256 columns, so 64 columns are a quarter of a block and count is always 64. ---

constexpr int kBlock = 256;

// One byte a column -> the panel's order of nibbles.
void pack_nibbles(const uint8_t* quants, uint8_t* body) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 16; ++i)
            body[half * 16 + i] = static_cast<uint8_t>(quants[half * 32 + i] | quants[half * 32 + 16 + i] << 4);
}

// The 6-bit scale and minimum of one of 8 groups, out of 12 bytes: 4 scales, 4 minima, each with 2 bits on top that
// belong to the other four, whose lower nibbles share 4 bytes.
void scale_and_min(const uint8_t* packed, int group, int& scale, int& min) {
    const int i = group % 4;
    if (group < 4) {
        scale = packed[i] & 63;
        min = packed[4 + i] & 63;
    } else {
        scale = (packed[8 + i] & 15) | (packed[i] >> 6) << 4;
        min = packed[8 + i] >> 4 | (packed[4 + i] >> 6) << 4;
    }
}

// Scales and minima of Q4_K's and Q5_K's groups of 32: d, dmin, 12 bytes.
void fill_k_scales(const uint8_t* block, int quarter, Strip& strip) {
    const float d = float_from_half(load16(block)), dmin = float_from_half(load16(block + 2));
    for (int half = 0; half < 2; ++half) {
        int scale, min;
        scale_and_min(block + 4, quarter * 2 + half, scale, min);
        strip.scales[half] = bits_of_float(d * static_cast<float>(scale));
        strip.mins[half] = bits_of_float(-(dmin * static_cast<float>(min))); // x - m and x + -m are the same float
    }
}

void fill_q4_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 144;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    fill_k_scales(block, quarter, strip);
    const uint8_t* low = block + 16 + quarter * 32; // low nibbles: the first 32 columns
    uint8_t quants[kPanel];
    for (int i = 0; i < 32; ++i) {
        quants[i] = low[i] & 15;
        quants[32 + i] = low[i] >> 4;
    }
    pack_nibbles(quants, strip.body);
}

void fill_q5_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 176;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    fill_k_scales(block, quarter, strip);
    const uint8_t *high = block + 16, *low = high + 32 + quarter * 32; // bit g of high[i]: column i of group g
    for (int i = 0; i < 32; ++i) {
        const int bits = high[i] >> quarter * 2;
        strip.body[i] = static_cast<uint8_t>((low[i] & 15) | (bits & 1) << 4);
        strip.body[32 + i] = static_cast<uint8_t>(low[i] >> 4 | (bits >> 1 & 1) << 4);
    }
}

void fill_q6_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 210;
    const int quarter = static_cast<int>(column % kBlock / kPanel), half = quarter / 2, odd = quarter % 2;
    const uint8_t *low = block + half * 64, *high = block + 128 + half * 32, *scales = block + 192 + quarter * 4;
    const float d = float_from_half(load16(block + 208));
    for (int i = 0; i < kPanel; ++i) {
        const int nibble = odd ? low[i] >> 4 : low[i] & 15, top = high[i % 32] >> (odd * 4 + i / 32 * 2) & 3;
        strip.body[i] = static_cast<uint8_t>(nibble | top << 4);
    }
    for (int group = 0; group < 4; ++group)
        strip.scales[group] = bits_of_float(d * static_cast<float>(static_cast<int8_t>(scales[group])));
}

// The 2-bit part of Q2_K and Q3_K: each half of the block has 32 bytes, each quarter two of their bit pairs.
void fill_bit_pairs(const uint8_t* pairs, int quarter, uint8_t* quants) {
    for (int i = 0; i < kPanel; ++i)
        quants[i] = pairs[quarter / 2 * 32 + i % 32] >> (quarter % 2 * 4 + i / 32 * 2) & 3;
}

void fill_q3_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t *block = row + column / kBlock * 110, *scales = block + 96;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    const float d = float_from_half(load16(block + 108));
    uint8_t quants[kPanel];
    fill_bit_pairs(block + 32, quarter, quants);
    for (int i = 0; i < kPanel; ++i) quants[i] |= (block[i % 32] >> (quarter * 2 + i / 32) & 1) << 2;
    pack_nibbles(quants, strip.body);
    for (int i = 0; i < 4; ++i) { // 6-bit scales: nibbles in 8 bytes, top bits in 4
        const int group = quarter * 4 + i, nibble = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
        const int top = scales[8 + group % 4] >> group / 4 * 2 & 3;
        strip.scales[i] = bits_of_float(d * static_cast<float>((nibble | top << 4) - 32));
    }
}

void fill_q2_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 84;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    const float d = float_from_half(load16(block + 80)), dmin = float_from_half(load16(block + 82));
    uint8_t quants[kPanel];
    fill_bit_pairs(block + 16, quarter, quants);
    pack_nibbles(quants, strip.body);
    for (int i = 0; i < 4; ++i) {
        const int both = block[quarter * 4 + i];
        strip.scales[i] = bits_of_float(d * static_cast<float>(both & 15));
        strip.mins[i] = bits_of_float(-(dmin * static_cast<float>(both >> 4)));
    }
}

void fill_iq4_xs(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 136;
    const float d = float_from_half(load16(block));
    for (int half = 0; half < 2; ++half) { // 6-bit scales: two bits of a word, a nibble of 4 bytes
        const int group = static_cast<int>(column % kBlock / 32) + half, top = load16(block + 2) >> group * 2 & 3;
        const int nibble = block[4 + group / 2] >> group % 2 * 4 & 15;
        strip.scales[half] = bits_of_float(d * static_cast<float>((nibble | top << 4) - 32));
        fill_levels(block + 8 + group * 16, strip.body + half * 32);
    }
}

constexpr Source kSources[] = {
    // name, kind, group, zero, scale_f32, has_min, unit columns, unit bytes, fill
    {"F32", Kind::F32, 32, 0, false, false, 1, 4, fill_plain<4>},
    {"F16", Kind::F16, 32, 0, false, false, 1, 2, fill_plain<2>},
    {"BF16", Kind::BF16, 32, 0, false, false, 1, 2, fill_plain<2>},
    {"Q4_0", Kind::Q4, 32, 8, false, false, 32, 18, fill_q4<false>},
    {"Q4_1", Kind::Q4, 32, 0, false, true, 32, 20, fill_q4<true>},
    {"Q5_0", Kind::Q8, 32, 16, false, false, 32, 22, fill_q5<false>},
    {"Q5_1", Kind::Q8, 32, 0, false, true, 32, 24, fill_q5<true>},
    {"Q8_0", Kind::Q8, 32, 128, false, false, 32, 34, fill_q8_0},
    {"IQ4_NL", Kind::Q8, 32, 128, false, false, 32, 18, fill_iq4_nl},
    {"MXFP4", Kind::Q8, 32, 128, true, false, 32, 17, fill_mxfp4},
    {"IQ4_XS", Kind::Q8, 32, 128, true, false, kBlock, 136, fill_iq4_xs},
    {"Q2_K", Kind::Q4, 16, 0, true, true, kBlock, 84, fill_q2_k},
    {"Q3_K", Kind::Q4, 16, 4, true, false, kBlock, 110, fill_q3_k},
    {"Q4_K", Kind::Q4, 32, 0, true, true, kBlock, 144, fill_q4_k},
    {"Q5_K", Kind::Q8, 32, 0, true, true, kBlock, 176, fill_q5_k},
    {"Q6_K", Kind::Q8, 16, 32, true, false, kBlock, 210, fill_q6_k},
    {"int8", Kind::Q8, 32, 128, false, false, 1, 4, fill_int8},
    {"int4", Kind::Q4, 32, 0, false, true, 1, 4, fill_int4},
};

} // namespace

const Source* find_source(std::string_view name) {
    for (const Source& source : kSources)
        if (source.name == name) return &source;
    return nullptr;
}

} // namespace headstart
