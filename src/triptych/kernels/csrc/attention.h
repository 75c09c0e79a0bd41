// Attention of query rows over keys and values that lie in tiles of 16 tokens, in the order that `multiply` reads.
//
// A tile of keys is [head_dim / step, 16, step] and one of values [16 / step, head_dim, step]: the KV cache stores them
// so, and nothing is moved before it is multiplied. The softmax is made online over spans of 256 keys that begin at
// multiples of 256 whatever the chunk is: a row's result is the same bit for bit in a long chunk and in a decode step.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "gemm.h"
#include "simd.h"

namespace triptych {

constexpr long TILE = 16;      // tokens of a tile
constexpr long SPAN = 256;     // keys between two corrections of the running maximum
constexpr long QUERIES = 24;   // query rows that share a pass over the keys
constexpr long TILED_QUERIES = 2 * TILE_ROWS;  // the same, where products are made in tile registers
constexpr int FEW_QUERIES = 3;  // with so few, memory takes longer than the products

template <class T>
void store_key(const T* key, long head_dim, long place, T* tile) {
    constexpr int step = Number<T>::step;
    for (long d = 0; d < head_dim; d += step) std::memcpy(tile + d * TILE + place * step, key + d, step * sizeof(T));
}

inline void store_value_row(const float* value, long head_dim, long place, float* tile) {
    for (long d = 0; d < head_dim; d += LANES) _mm512_storeu_ps(tile + place * head_dim + d, _mm512_loadu_ps(value + d));
}

// Pairs of tokens interleave: the first of a pair comes first, and clears the place of the second.
inline void store_value_row(const bf16* value, long head_dim, long place, bf16* tile) {
    bf16* row = tile + place / 2 * head_dim * 2;
    for (long d = 0; d < head_dim; d += LANES) {
        __m512i* pairs = (__m512i*)(row + d * 2);
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(value + d)));
        if (place % 2 == 0) {
            _mm512_storeu_si512(pairs, wide);
        } else {
            _mm512_storeu_si512(pairs, _mm512_or_si512(_mm512_loadu_si512(pairs), _mm512_slli_epi32(wide, 16)));
        }
    }
}

// Tokens are stored in order. The first of a tile, or of the two tiles of a pair, clears what an earlier owner left, which
// weights of zero would not cancel if it is not finite.
template <class T>
void store_value(const T* value, long head_dim, long token, bool in_pairs, T* tile) {
    const long together = in_pairs ? 2 * TILE : TILE;
    if (token % together == 0) std::memset((void*)tile, 0, together * head_dim * sizeof(T));
    store_value_row(value, head_dim, token % TILE, tile);
}

template <class T>
struct Tiles {
    const T* const* keys;  // one pointer for 16 tokens
    const T* const* values;
    bool in_pairs;  // values of tile 2 i + 1 follow those of tile 2 i, cleared where no token is
    const T* next[2];  // the first keys of what is attended next; of no use where there are many query rows
};

// body(first, std::integral_constant<int, n>()) for blocks of SIZE of `total` and a shorter last one.
template <int SIZE, class Body>
inline void for_blocks(long total, const Body& body) {
    for (long first = 0; first < total; first += SIZE)
        with_count<SIZE>(total - first < SIZE ? total - first : SIZE, [&](auto count) { body(first, count); });
}

template <class T>
class Attention {
  public:
    // `head_dim` is a multiple of 16.
    Attention(long head_dim, float scale, float* scratch)
        : head_dim_(head_dim), scale_(scale * LOG2_E), scores_(scratch), output_(scores_ + TILED_QUERIES * SPAN),
          weights_(reinterpret_cast<T*>(output_ + TILED_QUERIES * head_dim)) {}

    static long scratch_floats(long head_dim) { return TILED_QUERIES * (2 * SPAN + head_dim); }

    // Whether products are made in tile registers, and how many rows `attend` takes then.
    static bool is_tiled(long head_dim) { return in_tiles<T>() && head_dim % TILE_INPUTS == 0; }
    static long most_queries(long head_dim) { return is_tiled(head_dim) ? TILED_QUERIES : QUERIES; }

    // Rows i < num_rows <= most_queries of `query`, head_dim apart; row i sees the first visible(i) tokens, and no earlier
    // row sees more. out(i, d) is where 16 of its head_dim results go, from d on.
    template <class Visible, class Out>
    void attend(const T* query, long num_rows, const Tiles<T>& tiles, const Visible& visible, const Out& out) {
        std::fill_n(maximum_, TILED_QUERIES, -std::numeric_limits<float>::infinity());
        std::fill_n(sum_, TILED_QUERIES, 0.0f);
        const long most = visible(num_rows - 1);
        if constexpr (sizeof(T) == sizeof(bf16)) {
            if (is_tiled(head_dim_)) {
                num_rows > TILE_ROWS ? attend_tiled<2>(query, num_rows, tiles, visible, most)
                                     : attend_tiled<1>(query, num_rows, tiles, visible, most);
                return write(num_rows, out);
            }
        }
        std::memset(output_, 0, num_rows * head_dim_ * sizeof(float));
        for (long first = 0; first < most; first += SPAN) {
            const long count = most - first < SPAN ? most - first : SPAN;
            const long num_tiles = (count + TILE - 1) / TILE;
            const T *const *keys = tiles.keys + first / TILE, *const *values = tiles.values + first / TILE;
            const auto weigh_span = [&] { weigh(num_rows, [&](long i) { return visible(i) - first; }, num_tiles); };
            if (num_rows <= FEW_QUERIES) {
                const long after = (first + SPAN) / TILE, last = (most - 1) / TILE;
                const T* next[2] = {after > last ? tiles.next[0] : tiles.keys[after],
                                    after > last ? tiles.next[1] : tiles.keys[std::min(after + 1, last)]};
                const auto attend_few = [&](auto hint) {
                    score_few<hint.value>(query, num_rows, keys, values, num_tiles);
                    weigh_span();
                    add_values<FEW_QUERIES, 8, hint.value>(num_rows, values, num_tiles, next);
                };
                has_large_first_cache() ? attend_few(Hint<_MM_HINT_T0>()) : attend_few(Hint<_MM_HINT_T1>());
            } else {
                score(query, num_rows, keys, num_tiles);
                weigh_span();
                add_values<ROWS, VECTORS, _MM_HINT_T0>(num_rows, values, num_tiles, nullptr);
            }
        }
        write(num_rows, out);
    }

  private:
    template <class Out>
    void write(long num_rows, const Out& out) const {
        for (long i = 0; i < num_rows; ++i) {
            const __m512 inverse = _mm512_set1_ps(1.0f / sum_[i]);
            for (long d = 0; d < head_dim_; d += LANES)
                Number<T>::store(out(i, d), _mm512_mul_ps(_mm512_loadu_ps(output_ + i * head_dim_ + d), inverse));
        }
    }

    void score(const T* query, long num_rows, const T* const* keys, long num_tiles) {
        for_blocks<VECTORS>(num_tiles, [&](long first, auto vectors) {
            for_blocks<ROWS>(num_rows, [&](long row, auto rows) {
                score_block<rows.value, vectors.value, Prefetch<0>>(query, row, first, keys + first, nullptr);
            });
        });
    }

    // The rows of a decode step: memory is what takes time, so tile by tile, the second next one on its way. A small first
    // cache has too few places for what is on its way to it.
    template <_mm_hint HINT>
    void score_few(const T* query, long num_rows, const T* const* keys, const T* const* values, long num_tiles) {
        for (long t = 0; t < num_tiles; ++t) {
            const T* ahead = t + 2 < num_tiles ? keys[t + 2] : values[t + 2 - num_tiles < num_tiles ? t + 2 - num_tiles : 0];
            for_blocks<FEW_QUERIES>(num_rows, [&](long row, auto rows) {
                score_block<rows.value, 1, Prefetch<1, HINT>>(query, row, t, keys + t, ahead);
            });
        }
    }

    template <int MR, int NR, class Ahead>
    void score_block(const T* query, long row, long first, const T* const* keys, const T* ahead) {
        const T* columns[NR];
        for (int j = 0; j < NR; ++j) columns[j] = keys[j];
        __m512 sums[MR][NR];
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NR; ++j) sums[i][j] = _mm512_setzero_ps();
        multiply<T, MR, NR, Ahead>(sums, query + row * head_dim_, head_dim_, columns, TILE * Number<T>::step,
                                   head_dim_ / Number<T>::step, ahead);
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NR; ++j)
                _mm512_storeu_ps(scores_ + (row + i) * SPAN + (first + j) * TILE, sums[i][j]);
    }

    // Scores, in powers of two, to weights 2^(score - maximum), zero from visible(i) on, for as many tiles; notes by what
    // the sums before have to be corrected.
    template <class Visible>
    void weigh(long num_rows, const Visible& visible, long num_tiles) {
        for (long row = 0; row < num_rows; row += LANES)
            weigh_rows(row, std::min<long>(LANES, num_rows - row), visible, num_tiles);
    }

    // Up to 16 rows: what there is one number a row of is worked on in the lanes of a vector.
    template <class Visible>
    void weigh_rows(long row, long num_rows, const Visible& visible, long num_tiles) {
        alignas(64) float lanes[LANES][LANES];
        for (long i = 0; i < num_rows; ++i) {
            const float* scores = scores_ + (row + i) * SPAN;
            const Seen seen(visible(row + i), num_tiles);
            __m512 highest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
            for (long t = 0; t < seen.full; ++t) highest = _mm512_max_ps(highest, _mm512_loadu_ps(scores + t * TILE));
            if (seen.rest)
                highest = _mm512_mask_max_ps(highest, seen.rest, highest, _mm512_loadu_ps(scores + seen.full * TILE));
            _mm512_store_ps(lanes[i], highest);
        }
        const __m512 before = _mm512_loadu_ps(maximum_ + row);
        const __m512 highest = reduce_rows(lanes, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
        const __m512 maximum = _mm512_max_ps(before, _mm512_mul_ps(highest, _mm512_set1_ps(scale_)));
        // Before the first span the maximum is minus infinity, and there is nothing to correct.
        const __m512 fall = _mm512_max_ps(_mm512_sub_ps(before, maximum), _mm512_set1_ps(-200.0f));
        const __m512 correction = exp2<float>(fall);
        _mm512_storeu_ps(maximum_ + row, maximum);
        _mm512_storeu_ps(correction_ + row, correction);

        for (long i = 0; i < num_rows; ++i) {
            const float* scores = scores_ + (row + i) * SPAN;
            T* weights = weights_ + (row + i) * SPAN;
            const Seen seen(visible(row + i), num_tiles);
            const __m512 scale = _mm512_set1_ps(scale_), shift = _mm512_set1_ps(maximum_[row + i]);
            const auto weight = [&](long t) {
                return exp2<T>(_mm512_fmsub_ps(_mm512_loadu_ps(scores + t * TILE), scale, shift));
            };
            __m512 sum = _mm512_setzero_ps();
            for (long t = 0; t < seen.full; ++t) {
                const __m512 full = weight(t);
                sum = _mm512_add_ps(sum, full);
                Number<T>::store(weights + t * TILE, full);
            }
            if (seen.rest) {
                const __m512 part = _mm512_maskz_mov_ps(seen.rest, weight(seen.full));
                sum = _mm512_add_ps(sum, part);
                Number<T>::store(weights + seen.full * TILE, part);
            }
            for (long t = seen.begun; t < num_tiles; ++t) Number<T>::store(weights + t * TILE, _mm512_setzero_ps());
            _mm512_store_ps(lanes[i], sum);
        }
        const __m512 sums = reduce_rows(lanes, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
        _mm512_storeu_ps(sum_ + row, _mm512_fmadd_ps(_mm512_loadu_ps(sum_ + row), correction, sums));
    }

    // The tiles of a span that a row sees.
    struct Seen {
        long full, begun;
        __mmask16 rest;  // of the one that it sees a part of

        Seen(long visible, long num_tiles) {
            const long count = std::max(0L, std::min(visible, num_tiles * TILE));
            full = count / TILE;
            begun = (count + TILE - 1) / TILE;
            rest = first_lanes(count - full * TILE);
        }
    };

    // With few rows MOST_VECTORS are all that a head has, and each tile is read from start to end, the second next one on
    // its way; after the last ones those of `next`.
    template <int MOST_ROWS, int MOST_VECTORS, _mm_hint HINT>
    void add_values(long num_rows, const T* const* values, long num_tiles, const T* const* next) {
        for_blocks<MOST_VECTORS>(head_dim_ / LANES, [&](long first, auto vectors) {
            for_blocks<MOST_ROWS>(num_rows, [&](long row, auto rows) {
                add_values_block<rows.value, vectors.value, HINT>(row, first, values, num_tiles, next);
            });
        });
    }

    template <int MR, int NR, _mm_hint HINT>
    void add_values_block(long row, long first, const T* const* values, long num_tiles, const T* const* next) {
        constexpr int step = Number<T>::step;
        using Ahead = Prefetch<NR == 8 ? 8 : 0, HINT>;
        float* output = output_ + row * head_dim_ + first * LANES;
        __m512 sums[MR][NR];
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NR; ++j)
                sums[i][j] = _mm512_mul_ps(_mm512_loadu_ps(output + i * head_dim_ + j * LANES),
                                           _mm512_set1_ps(correction_[row + i]));
        for (long t = 0; t < num_tiles; ++t) {
            const T* columns[NR];
            for (int j = 0; j < NR; ++j) columns[j] = values[t] + (first + j) * LANES * step;
            const long later = t + 2 - num_tiles;
            const T* ahead = NR < 8 ? nullptr : later < 0 ? values[t + 2] : next[later];
            multiply<T, MR, NR, Ahead>(sums, weights_ + row * SPAN + t * TILE, SPAN, columns, head_dim_ * step,
                                       TILE / step, ahead);
        }
        for (int i = 0; i < MR; ++i)
            for (int j = 0; j < NR; ++j) _mm512_storeu_ps(output + i * head_dim_ + j * LANES, sums[i][j]);
    }

    // HEIGHT tiles of rows, the last of which is a whole one too and may share rows with the first.
    template <int HEIGHT, class Visible>
    void attend_tiled(const T* query, long num_rows, const Tiles<T>& tiles, const Visible& visible, long most) {
        const long height = std::min(num_rows, TILE_ROWS), second = num_rows - height;
        const long tokens = tiles.in_pairs ? 2 * TILE : TILE;  // that a tile of weights holds
        const TileRegisters registers({height, height, height, height, height, TILE_STEPS, height, tokens / 2},
                                      {64, 64, 64, 64, 64, 64, tokens * 2, 64});
        for (long first = 0; first < most; first += SPAN) {
            const long count = std::min(SPAN, most - first), num_tiles = (count + tokens - 1) / tokens * tokens / TILE;
            score_tiled<HEIGHT>(query, second, tiles.keys + first / TILE, (count + TILE - 1) / TILE);
            weigh(num_rows, [&](long i) { return visible(i) - first; }, num_tiles);
            if (first)
                for (long i = 0; i < num_rows; ++i) correct(i);
            add_values_tiled<HEIGHT>(second, tiles.values + first / TILE, num_tiles, tokens, first == 0);
        }
    }

    // Registers: 0 to 3 scores of two tiles of rows x two of keys, 4 rows, 5 keys.
    template <int HEIGHT>
    void score_tiled(const T* query, long second, const T* const* keys, long num_tiles) {
        const long stride = head_dim_ * sizeof(T);
        for (long t = 0; t < num_tiles; t += 2) {
            const bool is_pair = t + 1 < num_tiles;
            load_sums<HEIGHT>(true, nullptr, nullptr, 0);
            for (long d = 0; d < head_dim_; d += TILE_INPUTS) {
                _tile_loadd(5, keys[t] + d * TILE, 64);
                _tile_loadd(4, query + d, stride);
                _tile_dpbf16ps(0, 4, 5);
                if (is_pair) {
                    _tile_loadd(5, keys[t + 1] + d * TILE, 64);
                    _tile_dpbf16ps(1, 4, 5);
                }
                if (HEIGHT == 1) continue;
                _tile_loadd(4, query + second * head_dim_ + d, stride);
                if (is_pair) _tile_dpbf16ps(3, 4, 5);
                if (is_pair) _tile_loadd(5, keys[t] + d * TILE, 64);
                _tile_dpbf16ps(2, 4, 5);
            }
            float* place = scores_ + t * TILE;
            _tile_stored(0, place, SPAN * sizeof(float));
            if (is_pair) _tile_stored(1, place + TILE, SPAN * sizeof(float));
            if (HEIGHT == 1) continue;
            _tile_stored(2, place + second * SPAN, SPAN * sizeof(float));
            if (is_pair) _tile_stored(3, place + second * SPAN + TILE, SPAN * sizeof(float));
        }
    }

    void correct(long i) {
        if (correction_[i] == 1.0f) return;
        float* row = output_ + i * head_dim_;
        const __m512 factor = _mm512_set1_ps(correction_[i]);
        for (long d = 0; d < head_dim_; d += LANES)
            _mm512_storeu_ps(row + d, _mm512_mul_ps(_mm512_loadu_ps(row + d), factor));
    }

    // Registers: 0 to 3 sums of two tiles of rows x two of outputs, 6 weights, 7 values.
    template <int HEIGHT>
    void add_values_tiled(long second, const T* const* values, long num_tiles, long tokens, bool is_first) {
        const long stride = head_dim_ * sizeof(float), step_stride = head_dim_ * 2 * sizeof(T);
        for (long d = 0; d < head_dim_; d += 2 * LANES) {
            float *top = output_ + d, *bottom = top + second * head_dim_;
            load_sums<HEIGHT>(is_first, top, bottom, stride);
            for (long t = 0; t < num_tiles; t += tokens / TILE) {
                const T *weights = weights_ + t * TILE, *place = values[t] + d * 2;
                _tile_loadd(7, place, step_stride);
                _tile_loadd(6, weights, SPAN * sizeof(T));
                _tile_dpbf16ps(0, 6, 7);
                _tile_loadd(7, place + 2 * LANES, step_stride);
                _tile_dpbf16ps(1, 6, 7);
                if (HEIGHT == 1) continue;
                _tile_loadd(6, weights + second * SPAN, SPAN * sizeof(T));
                _tile_dpbf16ps(3, 6, 7);
                _tile_loadd(7, place, step_stride);
                _tile_dpbf16ps(2, 6, 7);
            }
            store_sums<HEIGHT>(top, bottom, stride);
        }
    }

    const long head_dim_;
    const float scale_;  // of scores, and from e to 2
    float* scores_;   // [TILED_QUERIES, SPAN]
    float* output_;   // [TILED_QUERIES, head_dim]
    T* weights_;      // [TILED_QUERIES, SPAN]
    float maximum_[TILED_QUERIES], sum_[TILED_QUERIES], correction_[TILED_QUERIES];
};

}  // namespace triptych
