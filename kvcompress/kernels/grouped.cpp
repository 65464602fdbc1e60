// Attention of one token over entries whose numbers share a scale and a zero in groups, as pieces.py says, and over
// those that wait in full precision. Compiled by compiled.py; called by grouped_cpu.py with plain pointers.
//
// A task goes over entries of one KV head of one row in blocks that stay in the first two caches. Both keys (channel by
// channel) and values (entry by entry) are runs of groups, which are unpacked run by run, once for all queries of the KV
// head.

#include "vectors.h"

namespace {

constexpr int BLOCK = 256;    // entries
constexpr int CHANNELS = 4;   // of keys that are multiplied at once
constexpr int ENTRIES = 32;   // of values that are summed at once
constexpr int FIELDS = 9;     // of a row's piece in the table
enum Kind { FLOAT32, BFLOAT16, FLOAT16 };

inline int64_t columns_of(int64_t dim) { return (dim + W - 1) / W * W; }

// Numbers of any kind in fp32.
void widen(const void* numbers, int64_t first, int64_t count, int kind, float* to) {
    if (kind == FLOAT32) {
        std::memcpy(to, static_cast<const float*>(numbers) + first, 4 * count);
        return;
    }
    const uint16_t* from = static_cast<const uint16_t*>(numbers) + first;
    if (kind == FLOAT16) {
        for (int64_t at = 0; at < count; ++at) to[at] = from_half(from[at]);
        return;
    }
    for (int64_t at = 0; at < count; ++at) {
        const uint32_t bits = uint32_t(from[at]) << 16;
        std::memcpy(to + at, &bits, 4);
    }
}

inline float number_at(const void* numbers, int64_t at, int kind) {
    float number;
    widen(numbers, at, 1, kind, &number);
    return number;
}

// How groups are packed: a byte holds the codes of `per_byte` groups that lie `packed_rows` apart.
struct Coding {
    int bits;
    int64_t group_size;
    bool first_is_high;  // the first of these groups has the highest bits
    bool zero_is_code;   // a number is (code - zero) * scale, not code * scale - zero
    int kind;            // of scales and zeros
    int per_byte() const { return 8 / bits; }
};

struct Groups {
    const uint8_t* packed;  // (packed_rows, group_size)
    const void *scales, *zeros;
    int64_t packed_rows;

    explicit Groups(const int64_t* fields)
        : packed(reinterpret_cast<const uint8_t*>(fields[0])), scales(reinterpret_cast<const void*>(fields[1])),
          zeros(reinterpret_cast<const void*>(fields[2])), packed_rows(fields[3]) {}

    // The numbers from `first` on.
    void unpack(const Coding& coding, int64_t first, int64_t count, float* to) const {
        const int mask = (1 << coding.bits) - 1;
        int64_t group = first / coding.group_size, at = first % coding.group_size;
        for (; count > 0; ++group, at = 0) {
            const int64_t run = std::min(coding.group_size - at, count), place = group / packed_rows;
            const int shift = coding.bits * int(coding.first_is_high ? coding.per_byte() - 1 - place : place);
            const float scale = number_at(scales, group, coding.kind), zero = number_at(zeros, group, coding.kind);
            const float offset = coding.zero_is_code ? -zero * scale : -zero;
            const uint8_t* from = packed + (group - place * packed_rows) * coding.group_size + at;
            for (int64_t i = 0; i < run; ++i) to[i] = float(from[i] >> shift & mask) * scale + offset;
            to += run;
            count -= run;
        }
    }
};

// What a task remembers; all that is read in whole registers has zeros or finite numbers behind it.
struct Attention {
    int64_t groups, key_dim, value_dim, key_columns, value_columns;
    float scaling;
    const float* query;  // (groups, key_dim)
    float *sums, *maxima, *totals;
    std::vector<float> logits, channels, rows, asked;

    Attention(int64_t groups, int64_t key_dim, int64_t value_dim, float scaling)
        : groups(groups), key_dim(key_dim), value_dim(value_dim), key_columns(columns_of(key_dim)),
          value_columns(columns_of(value_dim)), scaling(scaling), logits(groups * BLOCK), channels(CHANNELS * BLOCK),
          rows(ENTRIES * std::max(key_dim, value_dim) + W), asked(groups * key_columns) {}

    void begin(const float* query_rows, float* to_sums, float* to_maxima, float* to_totals) {
        query = query_rows, sums = to_sums, maxima = to_maxima, totals = to_totals;
        for (int64_t g = 0; g < groups; ++g) std::copy_n(query + g * key_dim, key_dim, &asked[g * key_columns]);
    }

    // Over `length` packed entries of a row's piece, which has `entries` in all, from `first` on.
    void attend(const Groups& keys, const Groups& values, const Coding& coding, int64_t entries, int64_t first,
                int64_t length) {
        for (int64_t end = first + length; first < end; first += BLOCK) {
            const int count = int(std::min<int64_t>(BLOCK, end - first));
            std::fill(logits.begin(), logits.end(), 0.0f);
            for (int64_t dim = 0; dim < key_dim; dim += CHANNELS) {
                const int some = int(std::min<int64_t>(CHANNELS, key_dim - dim));
                for (int i = 0; i < some; ++i)
                    keys.unpack(coding, (dim + i) * entries + first, count, &channels[i * BLOCK]);
                for (int64_t g = 0; g < groups; ++g) multiply(query + g * key_dim + dim, some, count, &logits[g * BLOCK]);
            }
            weigh(count);
            for (int at = 0; at < count; at += ENTRIES) {
                const int some = std::min(ENTRIES, count - at);
                values.unpack(coding, (first + at) * value_dim, some * value_dim, rows.data());
                accumulate(at, some);
            }
        }
    }

    // Over entries in full precision, (length, dim).
    void attend(const void* keys, const void* values, int kind, int64_t first, int64_t length) {
        for (int64_t end = first + length; first < end; first += BLOCK) {
            const int count = int(std::min<int64_t>(BLOCK, end - first));
            for (int at = 0; at < count; at += ENTRIES) {
                const int some = std::min(ENTRIES, count - at);
                widen(keys, (first + at) * key_dim, some * key_dim, kind, rows.data());
                for (int i = 0; i < some; ++i)
                    for (int64_t g = 0; g < groups; ++g) {
                        Floats product = {};
                        for (int64_t dim = 0; dim < key_dim; dim += W)
                            product += floats_at(&asked[g * key_columns + dim]) * floats_at(&rows[i * key_dim + dim]);
                        float sum = 0;
                        for (int lane = 0; lane < W; ++lane) sum += product[lane];
                        logits[g * BLOCK + at + i] = sum;
                    }
            }
            weigh(count);
            for (int at = 0; at < count; at += ENTRIES) {
                const int some = std::min(ENTRIES, count - at);
                widen(values, (first + at) * value_dim, some * value_dim, kind, rows.data());
                accumulate(at, some);
            }
        }
    }

  private:
    // Adds what `some` channels are in a query's logits.
    void multiply(const float* of_query, int some, int count, float* to) const {
        float factors[CHANNELS] = {};
        std::copy_n(of_query, some, factors);
        for (int at = 0; at < count; at += W) {
            Floats sum = floats_at(to + at);
            for (int i = 0; i < CHANNELS; ++i) sum += factors[i] * floats_at(&channels[i * BLOCK + at]);
            put(to + at, sum);
        }
    }

    // Logits become weights, zero behind `count`; what was summed shrinks to the new maximum.
    void weigh(int count) {
        for (int64_t g = 0; g < groups; ++g) {
            float* row = &logits[g * BLOCK];
            for (int at = 0; at < count; ++at) row[at] *= scaling;
            std::fill(row + count, row + BLOCK, -INFINITY);
            const float higher = std::max(maxima[g], largest_of(row, BLOCK));
            if (higher > maxima[g]) {
                const float shrink = std::exp(maxima[g] - higher);
                totals[g] *= shrink;
                for (int64_t at = 0; at < value_columns; ++at) sums[g * value_columns + at] *= shrink;
                maxima[g] = higher;
            }
            Floats added = {};
            for (int at = 0; at < BLOCK; at += W) {
                Floats weights = exponential(floats_at(row + at) - higher);
                added += weights;
                put(row + at, weights);
            }
            for (int lane = 0; lane < W; ++lane) totals[g] += added[lane];
        }
    }

    // Adds `some` values, which lie in `rows`, times the weights from `at` on, some query heads at a time.
    void accumulate(int at, int some) {
        for (int64_t dim = 0; dim < value_dim; dim += W) {
            int64_t g = 0;
            for (; g + 4 <= groups; g += 4) accumulate_for<4>(g, dim, at, some);
            for (; g < groups; ++g) accumulate_for<1>(g, dim, at, some);
        }
    }

    template <int HEADS>
    void accumulate_for(int64_t g, int64_t dim, int at, int some) {
        Floats held[HEADS];
        for (int i = 0; i < HEADS; ++i) held[i] = floats_at(sums + (g + i) * value_columns + dim);
        for (int entry = 0; entry < some; ++entry) {
            const Floats numbers = floats_at(&rows[entry * value_dim + dim]);
            for (int i = 0; i < HEADS; ++i) held[i] += logits[(g + i) * BLOCK + at + entry] * numbers;
        }
        for (int i = 0; i < HEADS; ++i) put(sums + (g + i) * value_columns + dim, held[i]);
    }
};

// The part of `length` entries, in whole blocks.
struct Part {
    int64_t first, length;
    Part(int64_t all, int64_t part, int64_t parts) {
        const int64_t size = ((all + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
        first = std::min(part * size, all);
        length = std::min(first + size, all) - first;
    }
};

}  // namespace

// Attention of one token's queries (batch, kv_heads, groups, key_dim), fp32; `output` (batch, kv_heads, groups,
// value_dim). `table` (blocks, batch, FIELDS): of a row's piece its keys' and values' codes, scales, zeros and packed rows,
// and its entries; `ends` (blocks, batch, kv_heads): where each head's end among them. `recent_keys` (batch, kv_heads,
// capacity, key_dim) and `recent_values`: the first `recent` of each head are there.
extern "C" void kvcompress_attend_groups(const float* query, const int64_t* table, const int64_t* ends, int64_t blocks,
                                         int64_t batch, int64_t kv_heads, int64_t groups, int64_t longest,
                                         int64_t key_dim, int64_t value_dim, int64_t bits, int64_t group_size,
                                         int64_t is_hqq, int64_t scale_kind, const void* recent_keys,
                                         const void* recent_values, int64_t recent, int64_t capacity,
                                         int64_t recent_kind, float scaling, int64_t threads, float* output) {
    const Coding coding{int(bits), group_size, bool(is_hqq), bool(is_hqq), int(scale_kind)};
    const int64_t segments = batch * kv_heads, parts = parts_of(segments, longest, threads);
    Parts all_parts(segments, parts, groups, columns_of(value_dim));

#pragma omp parallel num_threads(threads)
    {
        Attention attention(groups, key_dim, value_dim, scaling);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < segments * parts; ++task) {
            const int64_t segment = task / parts, part = task % parts, place = task * groups;
            attention.begin(query + segment * groups * key_dim, &all_parts.sums[place * all_parts.columns],
                            &all_parts.maxima[place], &all_parts.totals[place]);
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t piece = block * batch + segment / kv_heads, head = segment % kv_heads;
                const int64_t* fields = table + piece * FIELDS;
                const int64_t begin = head ? ends[piece * kv_heads + head - 1] : 0;
                const Part own(ends[piece * kv_heads + head] - begin, part, parts);
                attention.attend(Groups(fields), Groups(fields + 4), coding, fields[8], begin + own.first, own.length);
            }
            const Part own(recent, part, parts);
            attention.attend(recent_keys, recent_values, int(recent_kind), segment * capacity + own.first, own.length);
        }
#pragma omp for
        for (int64_t head = 0; head < segments * groups; ++head) {
            std::vector<float> mean(all_parts.columns);
            all_parts.mean(head, mean.data());
            std::copy_n(mean.data(), value_dim, output + head * value_dim);
        }
    }
}
