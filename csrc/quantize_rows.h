// Quantizes activation rows to int8, 32 columns at a time (QuantLayout in kernels.h).
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace headstart::HEADSTART_PATH {

INLINE void quantize_group(const float* x, int64_t group, const QuantLayout& layout, uint8_t* row) {
    const f32 a = load(x), b = load(x + 16);
    // compared as integers: NaN is then the maximum and is not lost
    const i32 absolute = splat_int(0x7fffffff);
    const int32_t peak_bits = max_lanes(max(as_int(a) & absolute, as_int(b) & absolute));
    float peak;
    std::memcpy(&peak, &peak_bits, 4);
    const bool finite = peak_bits < 0x7f800000, tiny = peak < 1e-30f;
    const f32 inverse = splat(finite && !tiny ? 127.0f / peak : 0.0f);
    const i32 qa = round_to_int(a * inverse), qb = round_to_int(b * inverse);
    int8_t* q = reinterpret_cast<int8_t*>(row) + group * 32;
    const int32_t first = store_low_bytes(q, qa), second = store_low_bytes(q + 16, qb);
    const float scale = !finite ? std::nanf("") : tiny ? 0.0f : peak * (1.0f / 127.0f);
    layout.scales(row)[group] = scale;
    layout.sums(row)[group] = first + second;
    layout.scaled_sums(row)[group] = scale * (float)(first + second);
    layout.half_sums(row)[2 * group] = first;
    layout.half_sums(row)[2 * group + 1] = second;
    layout.scaled_half_sums(row)[2 * group] = scale * (float)first;
    layout.scaled_half_sums(row)[2 * group + 1] = scale * (float)second;
}

} // namespace headstart::HEADSTART_PATH
