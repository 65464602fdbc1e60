// Packing vectors, and attention of one token over packed ones, as turboquant.py says. Compiled by compiled.py; called
// by turboquant_cpu.py with plain pointers, so that neither torch's nor Python's headers are needed.
//
// Attention goes over a segment (the entries of one KV head of one row) in blocks that stay in the first cache: packed
// rows are copied slab by slab, 16 bytes of each row beside those of the next. A vector register then holds 4 words of
// W / 4 rows; shifting it brings one code of each word to the lowest bits, and one permutation of the codebook turns it
// into numbers, which all queries of the KV head use. Nothing is unpacked to memory.

#include "vectors.h"

namespace {

constexpr int BLOCK = 128;      // entries
constexpr int SLAB = 16;        // bytes
constexpr int WORDS = 4;        // of a slab
constexpr int MOST_GROUPS = 4;  // query heads that are multiplied at once: their sums have to fit into registers
constexpr int AHEAD = 4;        // registers of codes, or codes of a word, at once: a sum is not waited for
constexpr int TILE = 8;         // vectors that are rotated at once
constexpr int ALONE = 64;       // so few vectors are packed by one thread
constexpr float LARGEST_HALF = 65504.0f;

typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Words words_at(const uint8_t* from) { return *reinterpret_cast<const LooseWords*>(from); }

// The numbers of a codebook for the lowest four bits of each word. Fewer numbers than 16 are repeated.
struct Codebook {
#if defined(__AVX512F__)
    Floats numbers;
    explicit Codebook(const float* all) : numbers(floats_at(all)) {}
    Floats operator()(Words codes) const { return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)numbers); }
#elif defined(__AVX2__)
    Floats low, high;
    explicit Codebook(const float* all) : low(floats_at(all)), high(floats_at(all + 8)) {}
    Floats operator()(Words codes) const {
        __m256 first = _mm256_permutevar8x32_ps((__m256)low, (__m256i)codes);
        __m256 second = _mm256_permutevar8x32_ps((__m256)high, (__m256i)codes);
        return (Floats)_mm256_blendv_ps(first, second, (__m256)(codes << 28));
    }
#else
    const float* numbers;
    explicit Codebook(const float* all) : numbers(all) {}
    Floats operator()(Words codes) const {
        Floats found;
        for (int lane = 0; lane < W; ++lane) found[lane] = numbers[codes[lane] & 15];
        return found;
    }
#endif
};

inline uint16_t to_half(float norm) {
    if (std::isnan(norm)) return 0x7e00;
    norm = std::min(norm, LARGEST_HALF);
    if (norm < 0x1p-14f) return uint16_t(std::nearbyint(norm * 0x1p24f));
    uint32_t bits;
    std::memcpy(&bits, &norm, 4);
    bits += 0xfff + (bits >> 13 & 1);  // to the nearest, ties to even
    return uint16_t((bits >> 13) - (112 << 10));
}

// How vectors of `dim` numbers are packed. Codes of three bits are two strings, of two bits and of one, and become
// nibbles where they are staged.
struct Format {
    int64_t dim;
    int bits;
    int64_t code_bytes() const { return (dim + 7) / 8 * bits; }
    int64_t nbytes() const { return code_bytes() + 2; }
    int staged_bits() const { return bits == 2 ? 2 : 4; }
    int64_t staged_bytes() const { return (dim + 7) / 8 * staged_bits(); }
    int64_t slabs() const { return (staged_bytes() + SLAB - 1) / SLAB; }
    int per_word() const { return 32 / staged_bits(); }
    int64_t numbers() const { return slabs() * WORDS * per_word(); }  // `dim`, and what fills the last slab
};

// The numbers of a byte's codes, each in a nibble: of four codes of two bits, and of eight of one bit, shifted by two.
struct Nibbles {
    uint32_t of_two[256], of_one[256];
    Nibbles() {
        for (uint32_t byte = 0; byte < 256; ++byte) {
            of_two[byte] = of_one[byte] = 0;
            for (int code = 0; code < 4; ++code) of_two[byte] |= (byte >> 2 * code & 3) << 4 * code;
            for (int code = 0; code < 8; ++code) of_one[byte] |= (byte >> code & 1) << (4 * code + 2);
        }
    }
};
const Nibbles nibbles;

// Codes to (slabs, BLOCK, SLAB), norms to (BLOCK,).
void stage(const uint8_t* rows, int count, const Format& format, uint8_t* codes, float* norms) {
    const int64_t nbytes = format.nbytes(), staged = format.staged_bytes();
    std::fill(norms + count, norms + BLOCK, 0.0f);
    for (int entry = 0; entry < count; ++entry, codes += SLAB) {
        const uint8_t* row = rows + entry * nbytes;
        uint16_t half;
        std::memcpy(&half, row + nbytes - 2, 2);
        norms[entry] = from_half(half);
        if (format.bits == 3) {
            const uint8_t* high = row + format.code_bytes() / 3 * 2;
            for (int64_t eight = 0; eight < staged / 4; ++eight) {
                const uint32_t word = nibbles.of_two[row[2 * eight]] | nibbles.of_two[row[2 * eight + 1]] << 16 |
                                      nibbles.of_one[high[eight]];
                std::memcpy(codes + eight / WORDS * BLOCK * SLAB + eight % WORDS * 4, &word, 4);
            }
            continue;
        }
        uint8_t* to = codes;
        int64_t at = 0;
        for (; at + SLAB <= staged; at += SLAB, to += BLOCK * SLAB) std::memcpy(to, row + at, SLAB);
        if (at < staged) std::memcpy(to, row + at, staged - at);
    }
}

// Products of keys with GROUPS queries (slabs, codes of a word, GROUPS, W); to (GROUPS, BLOCK, WORDS): their parts.
template <int SHIFT, int GROUPS>
void multiply(const uint8_t* codes, const float* queries, int64_t slabs, int count, Codebook codebook, float* to) {
    for (int at = 0; at < count * SLAB; at += AHEAD * 4 * W) {
        Floats sums[AHEAD][GROUPS] = {};
        const float* query = queries;
        for (int64_t slab = 0; slab < slabs; ++slab) {
            Words words[AHEAD];
            for (int i = 0; i < AHEAD; ++i) words[i] = words_at(codes + slab * BLOCK * SLAB + at + i * 4 * W);
            for (int code = 0; code < 32 / SHIFT; ++code, query += GROUPS * W)
                for (int i = 0; i < AHEAD; ++i) {
                    Floats numbers = codebook(words[i]);
                    words[i] >>= SHIFT;
                    for (int g = 0; g < GROUPS; ++g) sums[i][g] += floats_at(query + g * W) * numbers;
                }
        }
        for (int i = 0; i < AHEAD; ++i)
            for (int g = 0; g < GROUPS; ++g) put(to + g * BLOCK * WORDS + at / 4 + i * W, sums[i][g]);
    }
}

// Adds the values, times `weights` (GROUPS, BLOCK, WORDS), to `sums` (slabs, codes of a word, GROUPS, W).
template <int SHIFT, int GROUPS>
void accumulate(const uint8_t* codes, const float* weights, int64_t slabs, int count, Codebook codebook, float* sums) {
    for (int64_t slab = 0; slab < slabs; ++slab)
        for (int code = 0; code < 32 / SHIFT; code += AHEAD, sums += AHEAD * GROUPS * W) {
            Floats held[AHEAD][GROUPS];
            for (int i = 0; i < AHEAD; ++i)
                for (int g = 0; g < GROUPS; ++g) held[i][g] = floats_at(sums + (i * GROUPS + g) * W);
            for (int at = 0; at < count * SLAB; at += 4 * W) {
                Words words = words_at(codes + slab * BLOCK * SLAB + at) >> code * SHIFT;
                for (int i = 0; i < AHEAD; ++i) {
                    Floats numbers = codebook(words);
                    words >>= SHIFT;
                    for (int g = 0; g < GROUPS; ++g)
                        held[i][g] += floats_at(weights + g * BLOCK * WORDS + at / 4) * numbers;
                }
            }
            for (int i = 0; i < AHEAD; ++i)
                for (int g = 0; g < GROUPS; ++g) put(sums + (i * GROUPS + g) * W, held[i][g]);
        }
}

using OverBlock = void (*)(const uint8_t*, const float*, int64_t, int, Codebook, float*);

template <int SHIFT>
OverBlock multiply_of(int groups) {
    constexpr OverBlock of[] = {multiply<SHIFT, 1>, multiply<SHIFT, 2>, multiply<SHIFT, 3>, multiply<SHIFT, 4>};
    return of[groups - 1];
}

template <int SHIFT>
OverBlock accumulate_of(int groups) {
    constexpr OverBlock of[] = {accumulate<SHIFT, 1>, accumulate<SHIFT, 2>, accumulate<SHIFT, 3>, accumulate<SHIFT, 4>};
    return of[groups - 1];
}

// `count` vectors times a matrix (dim, columns), row by row; `columns` a multiple of 16.
void turn(const float* vectors, int count, int64_t dim, const float* matrix, int64_t columns, float* to) {
    for (int64_t column = 0; column < columns; column += W) {
        Floats sums[TILE] = {};
        for (int64_t row = 0; row < dim; ++row) {
            Floats numbers = floats_at(matrix + row * columns + column);
            for (int i = 0; i < TILE; ++i) sums[i] += vectors[std::min(i, count - 1) * dim + row] * numbers;
        }
        for (int i = 0; i < count; ++i) put(to + i * columns + column, sums[i]);
    }
}

// Where a number of a query, or of an output, stands in (tiles of groups, slabs, codes of a word, groups, W): in one of
// WORDS lanes, once for each row of a register.
struct Lanes {
    int64_t first, end;
    Lanes(const Format& format, int64_t groups, int64_t group, int64_t number) {
        const int64_t base = group / MOST_GROUPS * MOST_GROUPS, tile = std::min<int64_t>(MOST_GROUPS, groups - base);
        const int64_t word = number / format.per_word(), code = number % format.per_word();
        const int64_t before = base * format.numbers() / WORDS;  // registers
        const int64_t at = before + (word / WORDS * format.per_word() + code) * tile + group - base;
        first = at * W + word % WORDS;
        end = (at + 1) * W;
    }
};

// The entries of one KV head that one task attends to, and up to MOST_GROUPS query heads at a time.
struct Attention {
    Format keys, values;
    Codebook key_codebook, value_codebook;
    float scaling;
    std::vector<Floats> memory;
    uint8_t *key_codes, *value_codes;
    float *key_norms, *value_norms, *logits, *parts;

    Attention(Format keys, Format values, const float* key_codebook, const float* value_codebook, float scaling)
        : keys(keys), values(values), key_codebook(key_codebook), value_codebook(value_codebook), scaling(scaling) {
        const int64_t codes = (keys.slabs() + values.slabs()) * BLOCK * SLAB;
        memory.assign((codes / 4 + 3 * BLOCK + MOST_GROUPS * BLOCK * WORDS) / W, Floats{});
        key_codes = reinterpret_cast<uint8_t*>(memory.data());
        value_codes = key_codes + keys.slabs() * BLOCK * SLAB;
        key_norms = reinterpret_cast<float*>(key_codes + codes);
        value_norms = key_norms + BLOCK;
        logits = value_norms + BLOCK;
        parts = logits + BLOCK;
    }

    // `queries` of all groups lie as `Lanes` says; `sums` are left so.
    void attend(const uint8_t* key_rows, const uint8_t* value_rows, const bool* visible, int64_t length, int64_t groups,
                const float* queries, float* sums, float* maxima, float* totals) {
        for (int64_t first = 0; first < length; first += BLOCK) {
            const int count = int(std::min<int64_t>(BLOCK, length - first));
            stage(key_rows + first * keys.nbytes(), count, keys, key_codes, key_norms);
            stage(value_rows + first * values.nbytes(), count, values, value_codes, value_norms);
            for (int64_t group = 0; group < groups; group += MOST_GROUPS) {
                const int tile = int(std::min<int64_t>(MOST_GROUPS, groups - group));
                const float* asked = queries + group * keys.numbers() / WORDS * W;
                float* summed = sums + group * values.numbers() / WORDS * W;
                auto multiply = keys.bits == 2 ? multiply_of<2>(tile) : multiply_of<4>(tile);
                multiply(key_codes, asked, keys.slabs(), count, key_codebook, parts);
                for (int g = 0; g < tile; ++g)
                    weigh(parts + g * BLOCK * WORDS, visible ? visible + first : nullptr, count, summed + g * W, tile,
                          maxima[group + g], totals[group + g]);
                auto accumulate = values.bits == 2 ? accumulate_of<2>(tile) : accumulate_of<4>(tile);
                accumulate(value_codes, parts, values.slabs(), count, value_codebook, summed);
            }
        }
    }

    // The parts of products become weights of values, each in WORDS places; what was summed shrinks to the new maximum.
    void weigh(float* parts, const bool* visible, int count, float* sums, int tile, float& maximum, float& total) {
        for (int at = 0; at < BLOCK; ++at) {
            float* part = parts + at * WORDS;
            logits[at] = ((part[0] + part[1]) + (part[2] + part[3])) * (key_norms[at] * scaling);
        }
        for (int at = 0; visible && at < count; ++at)
            if (!visible[at]) logits[at] = -INFINITY;
        std::fill(logits + count, logits + BLOCK, -INFINITY);
        const float higher = std::max(maximum, largest_of(logits, BLOCK));
        if (higher > maximum) {
            const float shrink = std::exp(maximum - higher);
            total *= shrink;
            for (int64_t at = 0; at < values.numbers() / WORDS; ++at) {
                float* place = sums + at * tile * W;
                put(place, floats_at(place) * shrink);
            }
            maximum = higher;
        }
        Floats added = {};
        for (int at = 0; at < BLOCK; at += W) {
            Floats weights = exponential(floats_at(logits + at) - maximum);
            added += weights;
            put(logits + at, weights * floats_at(value_norms + at));
        }
        for (int lane = 0; lane < W; ++lane) total += added[lane];
        for (int at = 0; at < BLOCK; ++at)
            for (int word = 0; word < WORDS; ++word) parts[at * WORDS + word] = logits[at];
    }
};

// Packs `new_count` vectors (segments, new_count, dim) behind each segment's end. `rotation` as for queries.
void pack(const float* vectors, const int64_t* ends, int64_t segments, int64_t new_count, int64_t dim, int64_t bits,
          const float* rotation, const float* boundaries, int64_t threads, uint8_t* packed) {
    const int64_t count = segments * new_count;
    const Format format{dim, int(bits)};
    const int64_t columns = (dim + 15) / 16 * 16, boundary_count = (int64_t(1) << bits) - 1;
#pragma omp parallel num_threads(threads) if (count > ALONE)
    {
        std::vector<float> unit(TILE * dim), turned(TILE * columns);
        std::vector<int32_t> codes(columns);
#pragma omp for
        for (int64_t first = 0; first < count; first += TILE) {
            const int tile = int(std::min<int64_t>(TILE, count - first));
            float norms[TILE];
            for (int i = 0; i < tile; ++i) {
                const float* vector = vectors + (first + i) * dim;
                double squares = 0;
                for (int64_t at = 0; at < dim; ++at) squares += double(vector[at]) * vector[at];
                norms[i] = float(std::sqrt(squares));
                const float divisor = std::max(norms[i], 0x1p-126f);
                for (int64_t at = 0; at < dim; ++at) unit[i * dim + at] = vector[at] / divisor;
            }
            turn(unit.data(), tile, dim, rotation, columns, turned.data());
            for (int i = 0; i < tile; ++i) {
                for (int64_t at = 0; at < columns; at += W) {
                    Floats numbers = floats_at(turned.data() + i * columns + at);
                    Ints above = {};
                    for (int64_t each = 0; each < boundary_count; ++each) above -= numbers > boundaries[each];
                    std::memcpy(codes.data() + at, &above, sizeof above);
                }
                std::fill(codes.begin() + dim, codes.end(), 0);
                const int64_t segment = (first + i) / new_count, place = (first + i) % new_count;
                uint8_t* row = packed + (ends[segment] + place) * format.nbytes();
                const int64_t eights = (dim + 7) / 8;
                for (int64_t eight = 0; eight < eights; ++eight) {
                    const int32_t* code = codes.data() + eight * 8;
                    uint32_t low = 0, high = 0;  // strings of the lowest one, two or four bits, and of the third
                    const int width = bits == 3 ? 2 : int(bits);
                    for (int at = 0; at < 8; ++at) {
                        low |= uint32_t(code[at] & ((1 << width) - 1)) << at * width;
                        high |= uint32_t(code[at] >> 2 & 1) << at;
                    }
                    std::memcpy(row + eight * width, &low, width);
                    if (bits == 3) row[eights * 2 + eight] = uint8_t(high);
                }
                const uint16_t half = to_half(norms[i]);
                std::memcpy(row + format.code_bytes(), &half, 2);
            }
        }
    }
}

}  // namespace

extern "C" {

// Attention of one token's queries (segments, groups, key_dim), fp32, over segments of packed rows; `output` (segments,
// groups, value_dim). `visible`: of each segment, or null. Rotations are (dim, columns) as `turn` multiplies by them:
// the queries' transposed, and the values'. Codebooks have 16 numbers.
void kvcompress_attend(const float* query, const uint8_t* keys, const uint8_t* values, const int64_t* starts,
                       const int64_t* lengths, int64_t segments, int64_t longest, int64_t groups, const bool* visible,
                       int64_t visible_stride, int64_t key_dim, int64_t value_dim, int64_t bits,
                       const float* key_rotation, const float* value_rotation, const float* key_codebook,
                       const float* value_codebook, float scaling, int64_t threads, float* output) {
    const Format key_format{key_dim, int(bits)}, value_format{value_dim, int(bits)};
    const int64_t parts = parts_of(segments, longest, threads);
    const int64_t key_columns = (key_dim + 15) / 16 * 16, value_columns = (value_dim + 15) / 16 * 16;
    Parts all_parts(segments, parts, groups, value_columns);

#pragma omp parallel num_threads(threads)
    {
        Attention attention(key_format, value_format, key_codebook, value_codebook, scaling);
        std::vector<float> turned(TILE * std::max(key_columns, value_columns));
        std::vector<Floats> queries(groups * key_format.numbers() / WORDS);
        std::vector<Floats> held(groups * value_format.numbers() / WORDS);
        float* asked = reinterpret_cast<float*>(queries.data());
        float* found = reinterpret_cast<float*>(held.data());
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < segments * parts; ++task) {
            const int64_t segment = task / parts, part = task % parts, length = lengths[segment];
            const int64_t size = ((length + parts - 1) / parts + BLOCK - 1) / BLOCK * BLOCK;
            const int64_t first = std::min(part * size, length), last = std::min(first + size, length);
            std::fill(held.begin(), held.end(), Floats{});
            for (int64_t group = 0; group < groups; ++group) {
                turn(query + (segment * groups + group) * key_dim, 1, key_dim, key_rotation, key_columns, turned.data());
                for (int64_t number = 0; number < key_dim; ++number) {
                    const Lanes lanes(key_format, groups, group, number);
                    for (int64_t lane = lanes.first; lane < lanes.end; lane += WORDS) asked[lane] = turned[number];
                }
            }
            const int64_t row = starts[segment] + first;
            attention.attend(keys + row * key_format.nbytes(), values + row * value_format.nbytes(),
                             visible ? visible + segment * visible_stride + first : nullptr, last - first, groups,
                             asked, found, &all_parts.maxima[task * groups], &all_parts.totals[task * groups]);
            for (int64_t group = 0; group < groups; ++group)
                for (int64_t number = 0; number < value_dim; ++number) {
                    const Lanes lanes(value_format, groups, group, number);
                    float sum = 0;
                    for (int64_t lane = lanes.first; lane < lanes.end; lane += WORDS) sum += found[lane];
                    all_parts.sums[(task * groups + group) * value_columns + number] = sum;
                }
        }
#pragma omp for
        for (int64_t head = 0; head < segments * groups; ++head) {
            std::vector<float> mean(value_columns);
            all_parts.mean(head, mean.data());
            turn(mean.data(), 1, value_dim, value_rotation, value_columns, turned.data());
            std::copy_n(turned.data(), value_dim, output + head * value_dim);
        }
    }
}

// Packs keys and values (segments, new_count, dim), fp32, into the rows from each segment's end on.
void kvcompress_pack(const float* keys, const float* values, const int64_t* ends, int64_t segments, int64_t new_count,
                     int64_t key_dim, int64_t value_dim, int64_t bits, const float* key_rotation,
                     const float* value_rotation, const float* key_boundaries, const float* value_boundaries,
                     int64_t threads, uint8_t* packed_keys, uint8_t* packed_values) {
    pack(keys, ends, segments, new_count, key_dim, bits, key_rotation, key_boundaries, threads, packed_keys);
    pack(values, ends, segments, new_count, value_dim, bits, value_rotation, value_boundaries, threads, packed_values);
}
}
