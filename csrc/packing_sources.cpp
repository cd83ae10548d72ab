// Table of source types, and how their rows are read. Packing keeps the file's values exactly: the same numbers, combined in
// the order of the format's definition.
#include <cstring>

#include "half.h"
#include "packing.h"

namespace headstart {
namespace {

template <int bytes> uint32_t load_bits(const uint8_t* at) {
    uint32_t bits = 0;
    std::memcpy(&bits, at, bytes); // all supported machines are little-endian
    return bits;
}
uint32_t load16(const uint8_t* at) { return load_bits<2>(at); }

template <int bytes> void fill_plain(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    std::memcpy(strip.body, row + column * bytes, static_cast<size_t>(count * bytes));
}

// ggml's 4-bit blocks of 32 columns have the panel's order: column i shares a byte with column 16 + i.
template <bool with_min> void fill_q4(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    constexpr int head = with_min ? 4 : 2;
    const uint8_t* block = row + column / 32 * (head + 16);
    for (int64_t half = 0; half < count / 32; ++half, block += head + 16) {
        strip.scales[half] = load16(block);
        if (with_min) strip.offsets[half] = load16(block + 2);
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

// The fifth bits of a half of 32 columns (bit i: column i) in the panel's order.
void pack_fifth_bits(uint32_t bits, uint8_t* tops) {
    for (int i = 0; i < 4; ++i) {
        tops[i] = 0;
        for (int quad = 0; quad < 4; ++quad) {
            const uint32_t both = bits >> (quad * 4 + i);
            tops[i] |= static_cast<uint8_t>((both & 1) << (4 + quad) | (both >> 16 & 1) << quad);
        }
    }
}

// Q5_0 and Q5_1: 4-bit blocks with a 32-bit word of fifth bits before the nibbles.
template <bool with_min> void fill_q5(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    constexpr int head = with_min ? 4 : 2, bytes = head + 4 + 16;
    const uint8_t* block = row + column / 32 * bytes;
    for (int64_t half = 0; half < count / 32; ++half, block += bytes) {
        strip.scales[half] = load16(block);
        if (with_min) strip.offsets[half] = load16(block + 2);
        std::memcpy(strip.body + half * 20, block + head + 4, 16);
        pack_fifth_bits(load_bits<4>(block + head), strip.body + half * 20 + 16);
    }
}

void fill_mxfp4(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    const uint8_t* block = row + column / 32 * 17;
    for (int64_t half = 0; half < count / 32; ++half, block += 17) {
        strip.scales[half] = block[0];
        std::memcpy(strip.body + half * 16, block + 1, 16);
    }
}

// --- K-quants: blocks of 256 columns; a strip is a quarter of a block, and count is always 64. ---

constexpr int kBlock = 256;

// One byte per column -> the panel's order of nibbles.
void pack_nibbles(const uint8_t* quants, uint8_t* body) {
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 16; ++i)
            body[half * 16 + i] = static_cast<uint8_t>(quants[half * 32 + i] | quants[half * 32 + 16 + i] << 4);
}

// One 6-bit code per byte -> the panel's order: nibbles of a half, then the high bits.
void pack_sixes(const uint8_t* quants, uint8_t* body) {
    for (int half = 0; half < 2; ++half, quants += 32, body += 24)
        for (int i = 0; i < 16; ++i) {
            body[i] = static_cast<uint8_t>((quants[i] & 15) | quants[16 + i] << 4);
            const int tops = quants[i] >> 4 | quants[16 + i] >> 4 << 2;
            uint8_t& top = body[16 + i / 8 * 4 + i % 4];
            top = static_cast<uint8_t>(i % 8 < 4 ? tops : top | tops << 4);
        }
}

// A scale or min as the bits of a signed byte.
uint32_t small(int value) { return static_cast<uint8_t>(static_cast<int8_t>(value)); }

// Unpacks the 6-bit scale and min of one of 8 groups from 12 bytes: 4 scales, 4 mins, 4 bytes of low nibbles of groups
// 4 .. 7, whose high 2 bits are in the first 8 bytes.
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

// Factors of scales and mins. The min's factor is negated: x - m and x + -m are the same float.
void fill_k_factors(const uint8_t* at, Strip& strip) {
    strip.factors[0] = load16(at);
    strip.factors[1] = load16(at + 2) ^ 0x8000;
}

// Q4_K and Q5_K: scales and mins of groups of 32 columns, from d, dmin and 12 bytes.
void fill_k_scales(const uint8_t* block, int quarter, Strip& strip) {
    fill_k_factors(block, strip);
    for (int half = 0; half < 2; ++half) {
        int scale, min;
        scale_and_min(block + 4, quarter * 2 + half, scale, min);
        strip.scales[half] = small(scale);
        strip.offsets[half] = small(min);
    }
}

void fill_q4_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 144;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    fill_k_scales(block, quarter, strip);
    const uint8_t* low = block + 16 + quarter * 32; // low nibbles are the first 32 columns
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
    const uint8_t *high = block + 16, *low = high + 32 + quarter * 32; // bit g of high[i] belongs to column i of group g
    for (int half = 0; half < 2; ++half) {
        uint32_t bits = 0;
        for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(high[i] >> (quarter * 2 + half) & 1) << i;
        uint8_t* body = strip.body + half * 20;
        for (int i = 0; i < 16; ++i) {
            const int first = low[i] >> half * 4 & 15, second = low[16 + i] >> half * 4 & 15;
            body[i] = static_cast<uint8_t>(first | second << 4);
        }
        pack_fifth_bits(bits, body + 16);
    }
}

void fill_q6_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 210;
    const int quarter = static_cast<int>(column % kBlock / kPanel), half = quarter / 2, odd = quarter % 2;
    const uint8_t *low = block + half * 64, *high = block + 128 + half * 32, *scales = block + 192 + quarter * 4;
    uint8_t quants[kPanel];
    for (int i = 0; i < kPanel; ++i) {
        const int nibble = odd ? low[i] >> 4 : low[i] & 15, top = high[i % 32] >> (odd * 4 + i / 32 * 2) & 3;
        quants[i] = static_cast<uint8_t>(nibble | top << 4);
    }
    pack_sixes(quants, strip.body);
    strip.factors[0] = load16(block + 208);
    for (int group = 0; group < 4; ++group) strip.scales[group] = scales[group];
}

// The 2-bit part of Q2_K and Q3_K: half a block has 32 bytes, and a quarter has two bit pairs of each.
void fill_bit_pairs(const uint8_t* pairs, int quarter, uint8_t* quants) {
    for (int i = 0; i < kPanel; ++i)
        quants[i] = pairs[quarter / 2 * 32 + i % 32] >> (quarter % 2 * 4 + i / 32 * 2) & 3;
}

void fill_q3_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t *block = row + column / kBlock * 110, *scales = block + 96;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    strip.factors[0] = load16(block + 108);
    uint8_t quants[kPanel];
    fill_bit_pairs(block + 32, quarter, quants);
    for (int i = 0; i < kPanel; ++i) quants[i] |= (block[i % 32] >> (quarter * 2 + i / 32) & 1) << 2;
    pack_nibbles(quants, strip.body);
    for (int i = 0; i < 4; ++i) { // 6-bit scales: low nibbles in 8 bytes, high bits in 4
        const int group = quarter * 4 + i, nibble = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
        const int top = scales[8 + group % 4] >> group / 4 * 2 & 3;
        strip.scales[i] = small((nibble | top << 4) - 32);
    }
}

void fill_q2_k(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 84;
    const int quarter = static_cast<int>(column % kBlock / kPanel);
    fill_k_factors(block + 80, strip);
    uint8_t quants[kPanel];
    fill_bit_pairs(block + 16, quarter, quants);
    pack_nibbles(quants, strip.body);
    for (int i = 0; i < 4; ++i) {
        const int both = block[quarter * 4 + i];
        strip.scales[i] = small(both & 15);
        strip.offsets[i] = small(both >> 4);
    }
}

void fill_iq4_xs(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* block = row + column / kBlock * 136;
    strip.factors[0] = load16(block);
    for (int half = 0; half < 2; ++half) { // 6-bit scales: high bits in a 16-bit word, low nibbles in 4 bytes
        const int group = static_cast<int>(column % kBlock / 32) + half, top = load16(block + 2) >> group * 2 & 3;
        const int nibble = block[4 + group / 2] >> group % 2 * 4 & 15;
        strip.scales[half] = small((nibble | top << 4) - 32);
        std::memcpy(strip.body + half * 16, block + 8 + group * 16, 16);
    }
}

// --- Rows of headstart/formats/grouped.py: each unit has a scale, an optional zero point, and the codes of a group. ---

// E4M3 codes with a scale per group; a NaN code makes its whole group NaN.
template <int group> void fill_e4m3(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    const uint8_t* unit = row + column / group * (4 + group);
    for (int64_t begin = 0; begin < count; begin += group, unit += 4 + group) {
        bool numbers = true;
        for (int i = 0; i < group; ++i) numbers &= (unit[4 + i] & 0x7f) != 0x7f;
        strip.scales[begin / group] = numbers ? load_bits<4>(unit) : 0x7fc00000u;
        std::memcpy(strip.body + begin, unit + 4, group);
    }
}

// Unsigned 8-bit codes.
template <int scale, int point> void fill_bytes(const uint8_t* row, int64_t column, int64_t, Strip& strip) {
    const uint8_t* unit = row + column / kPanel * (scale + point + kPanel);
    strip.scales[0] = load_bits<scale>(unit);
    strip.offsets[0] = point ? unit[scale] : 0;
    std::memcpy(strip.body, unit + scale + point, kPanel);
}

// Two codes per byte, the even column in the low nibble.
template <int group, int scale, int point> void fill_pairs(const uint8_t* row, int64_t column, int64_t count, Strip& strip) {
    constexpr int bytes = scale + point + group / 2;
    const uint8_t* unit = row + column / group * bytes;
    uint8_t codes[kPanel] = {};
    for (int64_t begin = 0; begin < count; begin += group, unit += bytes) {
        strip.scales[begin / group] = load_bits<scale>(unit);
        strip.offsets[begin / group] = point ? unit[scale] : 0;
        for (int i = 0; i < group / 2; ++i) {
            codes[begin + 2 * i] = unit[scale + point + i] & 15;
            codes[begin + 2 * i + 1] = unit[scale + point + i] >> 4;
        }
    }
    pack_nibbles(codes, strip.body);
}

constexpr Source kSources[] = {
    // name, kind, group, zero, scales, offsets, levels, unit columns, unit bytes, fill
    {"F32", Kind::F32, 32, 0, Scales::F16, Offsets::NONE, Levels::NONE, 1, 4, fill_plain<4>},
    {"F16", Kind::F16, 32, 0, Scales::F16, Offsets::NONE, Levels::NONE, 1, 2, fill_plain<2>},
    {"BF16", Kind::BF16, 32, 0, Scales::F16, Offsets::NONE, Levels::NONE, 1, 2, fill_plain<2>},
    {"Q4_0", Kind::Q4, 32, 8, Scales::F16, Offsets::NONE, Levels::NONE, 32, 18, fill_q4<false>},
    {"Q4_1", Kind::Q4, 32, 0, Scales::F16, Offsets::MINS, Levels::NONE, 32, 20, fill_q4<true>},
    {"Q5_0", Kind::Q5, 32, 16, Scales::F16, Offsets::NONE, Levels::NONE, 32, 22, fill_q5<false>},
    {"Q5_1", Kind::Q5, 32, 0, Scales::F16, Offsets::MINS, Levels::NONE, 32, 24, fill_q5<true>},
    {"Q8_0", Kind::Q8, 32, 128, Scales::F16, Offsets::NONE, Levels::NONE, 32, 34, fill_q8_0},
    {"IQ4_NL", Kind::Q4, 32, 128, Scales::F16, Offsets::NONE, Levels::IQ4, 32, 18, fill_q4<false>},
    {"MXFP4", Kind::Q4, 32, 128, Scales::E8M0, Offsets::NONE, Levels::E2M1, 32, 17, fill_mxfp4},
    {"IQ4_XS", Kind::Q4, 32, 128, Scales::I8, Offsets::NONE, Levels::IQ4, kBlock, 136, fill_iq4_xs},
    {"Q2_K", Kind::Q4, 16, 0, Scales::I8, Offsets::MINS, Levels::NONE, kBlock, 84, fill_q2_k},
    {"Q3_K", Kind::Q4, 16, 4, Scales::I8, Offsets::NONE, Levels::NONE, kBlock, 110, fill_q3_k},
    {"Q4_K", Kind::Q4, 32, 0, Scales::I8, Offsets::MINS, Levels::NONE, kBlock, 144, fill_q4_k},
    {"Q5_K", Kind::Q5, 32, 0, Scales::I8, Offsets::MINS, Levels::NONE, kBlock, 176, fill_q5_k},
    {"Q6_K", Kind::Q6, 16, 32, Scales::I8, Offsets::NONE, Levels::NONE, kBlock, 210, fill_q6_k},
    {"int8", Kind::Q8, 32, 128, Scales::F16, Offsets::NONE, Levels::NONE, 1, 4, fill_int8},
    {"int4", Kind::Q4, 32, 0, Scales::F16, Offsets::MINS, Levels::NONE, 1, 4, fill_int4},
    {"E4M3:16:F32", Kind::F8, 16, 0, Scales::F32, Offsets::NONE, Levels::NONE, 16, 20, fill_e4m3<16>},
    {"E4M3:32:F32", Kind::F8, 32, 0, Scales::F32, Offsets::NONE, Levels::NONE, 32, 36, fill_e4m3<32>},
    {"E4M3:64:F32", Kind::F8, 64, 0, Scales::F32, Offsets::NONE, Levels::NONE, 64, 68, fill_e4m3<64>},
    {"E2M1:16:E4M3", Kind::Q4, 16, 128, Scales::E4M3, Offsets::NONE, Levels::E2M1, 16, 9, fill_pairs<16, 1, 0>},
    {"NF4:32:F32", Kind::L4, 32, 0, Scales::F32, Offsets::NONE, Levels::NF4, 32, 20, fill_pairs<32, 4, 0>},
    {"NF4:64:F32", Kind::L4, 64, 0, Scales::F32, Offsets::NONE, Levels::NF4, 64, 36, fill_pairs<64, 4, 0>},
    {"FP4:32:F32", Kind::L4, 32, 0, Scales::F32, Offsets::NONE, Levels::FP4, 32, 20, fill_pairs<32, 4, 0>},
    {"FP4:64:F32", Kind::L4, 64, 0, Scales::F32, Offsets::NONE, Levels::FP4, 64, 36, fill_pairs<64, 4, 0>},
    {"U4:32:F16", Kind::Q4, 32, 0, Scales::F16, Offsets::POINTS, Levels::NONE, 32, 19, fill_pairs<32, 2, 1>},
    {"U4:32:BF16", Kind::Q4, 32, 0, Scales::BF16, Offsets::POINTS, Levels::NONE, 32, 19, fill_pairs<32, 2, 1>},
    {"U4:32:F32", Kind::Q4, 32, 0, Scales::F32, Offsets::POINTS, Levels::NONE, 32, 21, fill_pairs<32, 4, 1>},
    {"U4:64:F16", Kind::Q4, 64, 0, Scales::F16, Offsets::POINTS, Levels::NONE, 64, 35, fill_pairs<64, 2, 1>},
    {"U4:64:BF16", Kind::Q4, 64, 0, Scales::BF16, Offsets::POINTS, Levels::NONE, 64, 35, fill_pairs<64, 2, 1>},
    {"U4:64:F32", Kind::Q4, 64, 0, Scales::F32, Offsets::POINTS, Levels::NONE, 64, 37, fill_pairs<64, 4, 1>},
    {"U8:64:F16", Kind::Q8, 64, 0, Scales::F16, Offsets::POINTS, Levels::NONE, 64, 67, fill_bytes<2, 1>},
    {"U8:64:BF16", Kind::Q8, 64, 0, Scales::BF16, Offsets::POINTS, Levels::NONE, 64, 67, fill_bytes<2, 1>},
    {"U8:64:F32", Kind::Q8, 64, 0, Scales::F32, Offsets::POINTS, Levels::NONE, 64, 69, fill_bytes<4, 1>},
    {"I8:64:BF16", Kind::Q8, 64, 128, Scales::BF16, Offsets::NONE, Levels::NONE, 64, 66, fill_bytes<2, 0>},
    {"I8:64:F32", Kind::Q8, 64, 128, Scales::F32, Offsets::NONE, Levels::NONE, 64, 68, fill_bytes<4, 0>},
};

} // namespace

const Source* find_source(std::string_view name) {
    for (const Source& source : kSources)
        if (source.name == name) return &source;
    return nullptr;
}

} // namespace headstart
