// What the kernels of a CPU share: vector registers, exponentials, halves, and a softmax that was computed in parts.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // numbers of a vector register
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int LEAST_PART = 256;       // entries that are worth a task of their own
constexpr float NO_MAXIMUM = -1e30f;  // of logits

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef float LooseFloats __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Floats floats_at(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
inline void put(float* to, Floats numbers) { *reinterpret_cast<LooseFloats*>(to) = numbers; }
inline Floats all(float number) { return Floats{} + number; }

inline float from_half(uint16_t half) {
    const uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float number;
    std::memcpy(&number, &bits, 4);
    number = (half & 0x7c00) == 0x7c00 ? NAN : number * 0x1p112f;  // also where it is subnormal; none is infinite
    return half & 0x8000 ? -number : number;
}

// e^x for x <= 0, within two units of the last place; 0 below -87.
inline Floats exponential(Floats x) {
    const Floats shift = all(0x1.8p23f);  // adding it rounds
    Floats rounded = x * 0x1.715476p0f + shift;
    Ints power = (Ints)rounded - (Ints)shift;
    Floats whole = rounded - shift;
    Floats rest = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;  // ln 2 in two parts
    Floats sum = all(1.0f / 5040);
    for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + factor;
    Ints result = (Ints)sum + (power << 23);
    return (Floats)(result & (x > all(-87.0f)));
}

inline float largest_of(const float* numbers, int count) {
    Floats most = floats_at(numbers);
    for (int at = W; at < count; at += W) {
        Floats next = floats_at(numbers + at);
        most = next > most ? next : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < W; ++lane) largest = std::max(largest, most[lane]);
    return largest;
}

// Parts of each segment that are tasks of their own: some for each thread.
inline int64_t parts_of(int64_t segments, int64_t longest, int64_t threads) {
    if (threads == 1) return 1;
    const int64_t wanted = (4 * threads + segments - 1) / segments;
    return std::max<int64_t>(1, std::min(wanted, longest / LEAST_PART));
}

// The sums, maxima and totals of all tasks, of which a segment has `parts`, each with `groups` query heads.
struct Parts {
    int64_t parts, groups, columns;
    std::vector<float> sums, maxima, totals;

    Parts(int64_t segments, int64_t parts, int64_t groups, int64_t columns)
        : parts(parts), groups(groups), columns(columns), sums(segments * parts * groups * columns),
          maxima(segments * parts * groups, NO_MAXIMUM), totals(segments * parts * groups) {}

    // The mean of a query head's values, to (columns,).
    void mean(int64_t head, float* to) const {
        const int64_t first = head / groups * parts * groups + head % groups, end = first + parts * groups;
        float maximum = NO_MAXIMUM, total = 0;
        for (int64_t place = first; place < end; place += groups) maximum = std::max(maximum, maxima[place]);
        std::fill_n(to, columns, 0.0f);
        for (int64_t place = first; place < end; place += groups) {
            const float weight = std::exp(maxima[place] - maximum);
            total += weight * totals[place];
            for (int64_t at = 0; at < columns; ++at) to[at] += weight * sums[place * columns + at];
        }
        for (int64_t at = 0; at < columns; ++at) to[at] /= total;
    }
};

}  // namespace
