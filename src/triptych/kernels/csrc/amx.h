// bf16 products in the tile registers of AMX: 16 rows x 16 outputs x 32 inputs an instruction.
//
// Rows are laid out for it first: [k / 32, rows, 32], so that 32 inputs of 16 rows are one tile whatever row it begins at,
// with zeros where k ends early. A panel of a weight is two halves of 32 outputs, each [k / 2, 32, 2], k a whole number of
// tiles. Each sum is made by the same instructions in the same order for any number of rows.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "simd.h"

namespace triptych {

constexpr long TILE_ROWS = 16, TILE_INPUTS = 32, TILE_STEPS = TILE_INPUTS / 2;
constexpr long HALF = 32;  // outputs of half a panel: two tiles of them and two of rows make four of sums

// Linux lends the registers to a process that asks for them.
inline bool may_use_tiles() {
    unsigned leaf = 7, features = 0, subleaf = 0, more = 0;
    asm volatile("cpuid" : "+a"(leaf), "=b"(features), "+c"(subleaf), "=d"(more));
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return (more & BF16) && (more & TILE) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

inline bool& uses_tiles() {
    static bool uses = may_use_tiles();
    return uses;
}

// Whether products of T are made in tiles, which their weights are packed for.
template <class T>
inline bool in_tiles() {
    return sizeof(T) == sizeof(bf16) && uses_tiles();
}

// The eight registers, as long as it lives: so many rows of so many bytes each.
class TileRegisters {
  public:
    TileRegisters(const long (&rows)[8], const long (&bytes)[8]) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; ++i) {
            shape.bytes[i] = bytes[i];
            shape.rows[i] = rows[i];
        }
        asm volatile("" : : "r"(&shape) : "memory");  // the intrinsic tells the compiler of its first bytes only
        _tile_loadconfig(&shape);
    }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
    ~TileRegisters() { _tile_release(); }

    // For `multiply_half`: 0 to 3 sums, 4 and 5 rows, 6 and 7 steps of a weight.
    static TileRegisters for_linear(long rows) {
        return {{rows, rows, rows, rows, rows, rows, TILE_STEPS, TILE_STEPS}, {64, 64, 64, 64, 64, 64, 64, 64}};
    }
};

constexpr long LINE = 64 / sizeof(bf16);  // elements

// Registers 0 and 1 from 32 sums of each row of a tile at `top`, 2 and 3 from those at `bottom` if HEIGHT is 2; rows are
// `stride` bytes apart.
template <int HEIGHT>
inline __attribute__((always_inline)) void load_sums(bool are_zero, const float* top, const float* bottom, long stride) {
    if (are_zero) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        return;
    }
    _tile_loadd(0, top, stride);
    if (HEIGHT > 1) _tile_loadd(2, bottom, stride);
    _tile_loadd(1, top + LANES, stride);
    if (HEIGHT > 1) _tile_loadd(3, bottom + LANES, stride);
}

template <int HEIGHT>
inline __attribute__((always_inline)) void store_sums(float* top, float* bottom, long stride) {
    _tile_stored(0, top, stride);
    if (HEIGHT > 1) _tile_stored(2, bottom, stride);
    _tile_stored(1, top + LANES, stride);
    if (HEIGHT > 1) _tile_stored(3, bottom + LANES, stride);
}

// sums (+)= HEIGHT tiles of rows times half a panel, over `count` tiles of inputs. Tile i of rows begins at rows[i], its
// sums [rows of a tile, 64] at sums[i]. With each tile of inputs LINES lines from `ahead` on are fetched into the second
// cache.
template <int HEIGHT, int LINES>
inline __attribute__((always_inline)) void multiply_half(const bf16* const (&rows)[HEIGHT], long row_stride,
                                                         const bf16* half, long count, float* const (&sums)[HEIGHT],
                                                         bool is_first, const bf16* ahead) {
    constexpr long SUMS_STRIDE = 2 * HALF * sizeof(float), STEP_STRIDE = 2 * HALF * sizeof(bf16);
    constexpr long ROW_BYTES = TILE_INPUTS * sizeof(bf16);
    load_sums<HEIGHT>(is_first, sums[0], sums[HEIGHT - 1], SUMS_STRIDE);
    for (long t = 0; t < count; ++t) {
#pragma GCC unroll 32
        for (long line = 0; line < LINES; ++line)
            _mm_prefetch((const char*)(ahead + (t * LINES + line) * LINE), _MM_HINT_T1);
        const bf16* weight = half + t * TILE_STEPS * 2 * HALF;
        _tile_loadd(6, weight, STEP_STRIDE);
        _tile_loadd(4, rows[0] + t * row_stride, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (HEIGHT > 1) {
            _tile_loadd(5, rows[HEIGHT - 1] + t * row_stride, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
        }
        _tile_loadd(7, weight + LINE, STEP_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        if (HEIGHT > 1) _tile_dpbf16ps(3, 5, 7);
    }
    store_sums<HEIGHT>(sums[0], sums[HEIGHT - 1], SUMS_STRIDE);
}

}  // namespace triptych
