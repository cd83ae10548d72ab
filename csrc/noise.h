// Noise of coupled sampling, as defined by kernels/philox.py: Philox4x32-10, an exact log, Gumbel noise.
//
// All functions are `static inline`: files compiled for different instruction sets must not share one copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace headstart {

struct NoiseKey {
    uint32_t low, high;        // halves of the request's seed
    uint32_t position, choice; // words 1 and 2 of the counter; word 3 is the stream, 0 for tokens
};

constexpr uint32_t kPhiloxMultiply0 = 0xD2511F53, kPhiloxMultiply1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9, kPhiloxWeyl1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;
constexpr double kGumbelMax = 22.88; // upper bound: the noise of word 0 is 22.8738..

// The random words of token ids 4 * group .. 4 * group + 3.
static inline void philox(const NoiseKey& key, uint32_t group, uint32_t words[4]) {
    uint32_t c0 = group, c1 = key.position, c2 = key.choice, c3 = 0, k0 = key.low, k1 = key.high;
    for (int round = 0; round < kPhiloxRounds; ++round, k0 += kPhiloxWeyl0, k1 += kPhiloxWeyl1) {
        const uint64_t p0 = uint64_t(c0) * kPhiloxMultiply0, p1 = uint64_t(c2) * kPhiloxMultiply1;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

static inline uint32_t noise_word(const NoiseKey& key, int64_t token) {
    uint32_t words[4];
    philox(key, uint32_t(token >> 2), words);
    return words[token & 3];
}

// Natural logarithm of a positive normal number, in the same steps as philox.log.
static inline double exact_log(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, 8);
    const int64_t exponent = (bits - 0x3FE6A09E667F3BCD) >> 52; // x = m 2^exponent, m in [sqrt(1/2), sqrt(2))
    bits -= exponent * (int64_t(1) << 52);
    double m;
    std::memcpy(&m, &bits, 8);
    const double f = m - 1.0, s = f / (f + 2.0), z = s * s;
    double series = z * (2.0 / 21);
    for (int n = 9; n > 0; --n) series = (series + 2.0 / (2 * n + 1)) * z;
    const double k = double(exponent);
    constexpr double kLn2High = double(0x2C5C85FDF47) / (int64_t(1) << 42), kLn2Low = 5.497923018708371e-14;
    return k * kLn2High + (k * kLn2Low + (f - s * (f - series)));
}

static inline double gumbel(uint32_t word) {
    const double rest = (double(0xFFFFFFFFu - word) + 0.5) * (1.0 / 4294967296.0); // 1 - v, exact
    return -exact_log(-exact_log(rest));
}

} // namespace headstart
