// Rows times a packed weight, with what follows the product done while its sums are in registers.
//
// A weight [n, k] is packed into panels of 64 outputs: [n / 64, k / step, 64, step], zeros where n or k ends early. One
// panel is read from start to end, which is the order that memory is fastest in when there are few rows; with many
// rows a slice of it stays in the first cache. Where bf16 is multiplied in tile registers (amx.h), a panel is two halves,
// one after the other. A row's result is the same bit for bit however many rows there are.

#pragma once

#include <unistd.h>

#include "amx.h"
#include "parallel.h"
#include "scratch.h"
#include "simd.h"

namespace triptych {

constexpr long PANEL = 64;     // outputs of a panel
constexpr int VECTORS = 4;     // of a panel
constexpr int ROWS = 6;        // of a tile: 6 x 4 sums in 24 of the 32 registers
// k steps of a panel that all rows are multiplied by before the next ones, which are fetched meanwhile. With many rows a
// slice lies in the second cache (128 KiB), which saves partial sums. With few rows it and the next one lie in the first
// cache (2 x 16 KiB), if that has room for them and rows.
constexpr long FEW_ROWS = 48, SHORT_SLICE = 64, LONG_SLICE = 512;
constexpr long STREAM_DISTANCE = 32;  // k steps ahead of a single tile, which reads a panel once

inline bool has_large_first_cache() {
    static const bool is_large = sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;  // 32 KiB up to Zen 4, 48 from Zen 5 on
    return is_large;
}

template <class T>
struct Weight {
    const T* panels;
    long num_outputs;
    long num_inputs;

    long num_panels() const { return (num_outputs + PANEL - 1) / PANEL; }
    long num_steps() const {
        const long steps = (num_inputs + Number<T>::step - 1) / Number<T>::step;
        return in_tiles<T>() ? num_tiles() * TILE_STEPS : steps;
    }
    long num_tiles() const { return (num_inputs + TILE_INPUTS - 1) / TILE_INPUTS; }
    const T* panel(long p) const { return panels + p * num_steps() * PANEL * Number<T>::step; }

    // Where output c of a panel keeps input k.
    long place(long c, long k) const {
        constexpr long step = Number<T>::step;
        const long width = in_tiles<T>() ? HALF : PANEL;
        return ((c / width * num_steps() + k / step) * width + c % width) * step + k % step;
    }
};

constexpr long STREAMED_BYTES = 1 << 20;  // more than this would push what is multiplied next out of the second cache

// What a product takes: rows of `width` elements, one after the other. For tile registers they lie in tiles instead: the
// next 32 elements of a row are `stride` rows further, zeros where `width` ends early. That is an odd number of blocks of
// 32 rows: after an even one, neighbouring blocks would share the same few lines of the first cache.
//
// Rows that are written past the caches, because they would not stay there, are `streamed`: in whole lines only.
template <class T>
struct Rows {
    T* data;
    long width;
    long stride;            // 0: one after the other
    bool streamed = false;  // then `data` and rows begin at a line

    static long stride_of(long num_rows) { return in_tiles<T>() ? ((num_rows + 31) / 32 | 1) * 32 : 0; }

    // Uninitialised, in the order that products want.
    static Rows make(Scratch& scratch, long num_rows, long width) {
        const long stride = stride_of(num_rows), num_tiles = (width + TILE_INPUTS - 1) / TILE_INPUTS;
        const long count = stride ? num_tiles * stride * TILE_INPUTS : num_rows * width;
        Rows rows{scratch.take<T>(count), width, stride, stride && is_streamed(count)};
        if (stride && width % TILE_INPUTS)
            std::memset((void*)rows.at(0, width / TILE_INPUTS * TILE_INPUTS), 0, stride * TILE_INPUTS * sizeof(T));
        return rows;
    }

    static Rows make_plain(Scratch& scratch, long num_rows, long width) {
        const long count = num_rows * width;
        return {scratch.take<T>(count), width, 0, width % LINE_ELEMENTS == 0 && is_streamed(count)};
    }

    static constexpr long LINE_ELEMENTS = 64 / sizeof(T);

    static bool is_streamed(long count) { return in_tiles<T>() && count * (long)sizeof(T) > STREAMED_BYTES; }

    // A vector from `column` on, a multiple of 16, is in one piece.
    T* at(long row, long column) const {
        if (!stride) return data + row * width + column;
        return data + (column / TILE_INPUTS * stride + row) * TILE_INPUTS + column % TILE_INPUTS;
    }
};

template <class T>
inline long packed_elements(long num_outputs, long num_inputs) {
    const Weight<T> weight{nullptr, num_outputs, num_inputs};
    return weight.num_panels() * weight.num_steps() * PANEL * Number<T>::step;
}

// `weight` row-major [n, k]; row `order(i)` of it becomes output i.
template <class T, class Order>
void pack_weight(const T* weight, long num_outputs, long num_inputs, Order order, T* panels) {
    const Weight<T> shape{panels, num_outputs, num_inputs};
    constexpr int step = Number<T>::step;
    std::memset((void*)panels, 0, packed_elements<T>(num_outputs, num_inputs) * sizeof(T));
#pragma omp parallel for num_threads(num_threads())
    for (long p = 0; p < shape.num_panels(); ++p) {
        T* panel = panels + p * shape.num_steps() * PANEL * step;
        for (long c = 0; c < PANEL && p * PANEL + c < num_outputs; ++c) {
            const T* row = weight + order(p * PANEL + c) * num_inputs;
            for (long k = 0; k < num_inputs; ++k) panel[shape.place(c, k)] = row[k];
        }
    }
}

template <class T, int MR, class Ahead, class Expect, class Finish>
inline void tile(const T* x, long ldx, long first_row, const T* panel, long k, long steps, long p, float* partial,
                 bool is_first, bool is_last, const T* ahead, const Expect& expect, const Finish& finish) {
    __m512 sums[MR][VECTORS];
    if (is_last)
        for (int i = 0; i < MR; ++i) expect(first_row + i, p);
    for (int i = 0; i < MR; ++i)
        for (int j = 0; j < VECTORS; ++j)
            sums[i][j] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(partial + (first_row + i) * PANEL + j * LANES);
    const T* columns[VECTORS];
    constexpr long ldb = PANEL * Number<T>::step;
    for (int j = 0; j < VECTORS; ++j) columns[j] = panel + k * ldb + j * LANES * Number<T>::step;
    multiply<T, MR, VECTORS, Ahead>(sums, x + first_row * ldx + k * Number<T>::step, ldx, columns, ldb, steps, ahead);
    for (int i = 0; i < MR; ++i) {
        if (is_last) {
            finish(first_row + i, p, sums[i]);
        } else {
            for (int j = 0; j < VECTORS; ++j)
                _mm512_storeu_ps(partial + (first_row + i) * PANEL + j * LANES, sums[i][j]);
        }
    }
}

// finish(row, panel, sums[VECTORS]) is called once for each row and panel in [first_panel, end_panel); expect(row, panel)
// before the last of the products, so that what `finish` reads and writes can be on its way meanwhile.
template <class T, class Expect, class Finish>
void multiply_panels(const Rows<T>& x, long num_rows, const Weight<T>& weight, long first_panel, long end_panel,
                     float* partial, const Expect& expect, const Finish& finish) {
    constexpr long ldb = PANEL * Number<T>::step;
    const long num_steps = weight.num_steps(), num_tiles = (num_rows + ROWS - 1) / ROWS;
    const bool is_short = num_rows <= FEW_ROWS && has_large_first_cache();
    const long slice = num_tiles == 1 ? num_steps : is_short ? SHORT_SLICE : LONG_SLICE;
    for (long p = first_panel; p < end_panel; ++p) {
        const T* panel = weight.panel(p);
        for (long k = 0; k < num_steps; k += slice) {
            const long steps = num_steps - k < slice ? num_steps - k : slice;
            const T* next = panel + (k + (num_tiles == 1 ? STREAM_DISTANCE : steps)) * ldb;
            for (long t = 0; t < num_tiles; ++t) {
                const long row = num_rows * t / num_tiles, rows = num_rows * (t + 1) / num_tiles - row;
                // The tiles share the fetching of the next slice, each a piece of it from start to end: the processor sees
                // where that leads. What only some tiles fetch lines of, or what is fetched too far ahead, it does not.
                const long line = t * VECTORS / num_tiles, lines = (t + 1) * VECTORS / num_tiles - line;
                const auto run = [&](auto count, auto ahead) {
                    tile<T, decltype(count)::value, decltype(ahead)>(
                        x.data, x.width, row, panel, k, steps, p, partial, k == 0, k + steps == num_steps,
                        next + line * steps * (64 / sizeof(T)), expect, finish);
                };
                with_count<ROWS>(rows, [&](auto count) {
                    if (lines == 0) {
                        run(count, Prefetch<0>());
                    } else if (num_tiles == 1) {  // by itself the processor fetches what one tile reads
                        is_short ? run(count, Prefetch<4>()) : run(count, Prefetch<0>());
                    } else if (is_short) {
                        lines == 1 ? run(count, Prefetch<1>()) : run(count, Prefetch<2>());
                    } else {
                        lines == 1 ? run(count, Prefetch<1, _MM_HINT_T1>()) : run(count, Prefetch<2, _MM_HINT_T1>());
                    }
                });
            }
        }
    }
}

// As multiply_panels, in tile registers. Rows of up to 32 tiles of inputs are multiplied from end to end, all rows by a
// panel before the next panel: both come from the second cache. Longer ones are multiplied in slices of 256 inputs, by four
// panels at once: a block of 32 rows comes from the first cache then. What few rows are multiplied by comes from memory.
constexpr long TILED_WHOLE = 32, TILED_SLICE = 8, TILED_PANELS = 4;
constexpr long TILED_FEW_ROWS = 2 * TILE_ROWS;
constexpr long TILED_ROWS = 1024, TILED_BYTES = 3 << 19;  // that pass together
constexpr long TILED_STREAM_DISTANCE = 16;                // tiles of inputs

template <long COUNT>
using Lines = std::integral_constant<int, COUNT>;

// Floats that `multiply_tiled` needs for the sums of as many rows.
inline long tiled_sums(long num_rows) {
    return TILED_PANELS * PANEL * ((std::min(num_rows, TILED_ROWS) + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS);
}

template <class Finish>
void multiply_tiled(const Rows<bf16>& x, long first_row, long num_rows, const Weight<bf16>& weight, long first_panel,
                    long num_panels, long slice, float* sums, const Finish& finish) {
    const long height = std::min(num_rows, TILE_ROWS), num_row_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const long num_tiles = weight.num_tiles(), row_stride = x.stride * TILE_INPUTS;
    constexpr long tile_elements = TILE_STEPS * 2 * HALF;
    const bool is_whole = slice == num_tiles;  // then the sums of a block are wanted only until it is finished
    // The last tile of rows is a whole one too, and shares rows with the one before; each has its own sums.
    const auto begin = [&](long tile) { return std::min(tile * TILE_ROWS, num_rows - height); };
    const auto place = [&](long p, long tile) {
        return sums + (is_whole ? tile % 2 : p * num_row_tiles + tile) * TILE_ROWS * PANEL;
    };
    for (long k = 0; k < num_tiles; k += slice) {
        const long count = std::min(slice, num_tiles - k);
        const bool is_last = k + count == num_tiles;
        for (long tile = 0; tile < num_row_tiles; tile += 2) {
            const bool is_pair = tile + 1 < num_row_tiles;
            const bf16* const rows[2] = {x.at(first_row + begin(tile), k * TILE_INPUTS),
                                         x.at(first_row + begin(tile + 1), k * TILE_INPUTS)};
            for (long p = 0; p < num_panels; ++p) {
                float* const places[2] = {place(p, tile), place(p, tile + 1)};
                for (long h = 0; h < 2; ++h) {
                    const bf16* half = weight.panel(first_panel + p) + (h * num_tiles + k) * tile_elements;
                    float* const from[2] = {places[0] + h * HALF, places[1] + h * HALF};
                    const auto run = [&](auto lines, const bf16* ahead) {
                        if (is_pair) {
                            multiply_half<2, lines.value>(rows, row_stride, half, count, from, k == 0, ahead);
                        } else {
                            multiply_half<1, lines.value>({rows[0]}, row_stride, half, count, {from[0]}, k == 0, ahead);
                        }
                    };
                    if (num_rows <= TILED_FEW_ROWS) {
                        run(Lines<tile_elements / LINE>(), half + TILED_STREAM_DISTANCE * tile_elements);
                        continue;
                    }
                    // Each block of rows fetches its share of the next slice, or of the first of the next panels: 32 lines
                    // go with each tile of inputs, and every two tiles of rows are a block.
                    const bf16* next = half + (is_last ? 2 * num_panels * num_tiles - k : count) * tile_elements;
                    const auto share = [&](auto lines) { run(lines, next + tile / 2 * count * lines.value * LINE); };
                    if (num_row_tiles > 30) {
                        share(Lines<2>());
                    } else if (num_row_tiles > 14) {
                        share(Lines<4>());
                    } else {
                        num_row_tiles > 6 ? share(Lines<8>()) : share(Lines<16>());
                    }
                }
                if (!is_last) continue;
                for (long row = tile * TILE_ROWS; row < std::min(num_rows, (tile + 2) * TILE_ROWS); ++row) {
                    const long t = row / TILE_ROWS;
                    const float* from = places[t - tile] + (row - begin(t)) * PANEL;
                    __m512 values[VECTORS];
                    for (int j = 0; j < VECTORS; ++j) values[j] = _mm512_loadu_ps(from + j * LANES);
                    finish(first_row + row, first_panel + p, values);
                }
            }
        }
    }
}

// All panels in [first_panel, end_panel). Rows in parts of equal size, so that none is shorter than a tile.
template <class Finish>
void multiply_panels_tiled(const Rows<bf16>& x, long num_rows, const Weight<bf16>& weight, long first_panel,
                           long end_panel, float* sums, const Finish& finish) {
    const long num_tiles = weight.num_tiles(), row_bytes = num_tiles * TILE_INPUTS * sizeof(bf16);
    const bool is_whole = num_rows <= TILED_FEW_ROWS || num_tiles <= TILED_WHOLE;
    const long most = is_whole ? std::max(TILED_FEW_ROWS, std::min(TILED_ROWS, TILED_BYTES / row_bytes)) : TILED_ROWS;
    const long slice = is_whole ? num_tiles : TILED_SLICE, together = is_whole ? 1 : TILED_PANELS;
    const long parts = (num_rows + most - 1) / most;
    for (long part = 0; part < parts; ++part) {
        const long first = num_rows * part / parts, count = num_rows * (part + 1) / parts - first;
        const auto registers = TileRegisters::for_linear(std::min(count, TILE_ROWS));
        for (long p = first_panel; p < end_panel; p += together)
            multiply_tiled(x, first, count, weight, p, std::min(together, end_panel - p), slice, sums, finish);
    }
}

}  // namespace triptych
