// Dequantization. MX_SOURCE is the type of values; device.h lists the other macros.
#include "device.h"

#if MX_ROTATED
#define MX_VALUES MX_ROTATED  // one group, rotated back
#else
#define MX_VALUES 8
#endif

MX_FN float mx_block_factor(const void* scales, mx_i64 at, MxTensorScale t, MxScheme r) {
  return mx_decode_factor(
      r.scale_stored_bits == 32 ? static_cast<const mx_u32*>(scales)[at] : static_cast<const mx_u8*>(scales)[at], t, r);
}

// Dequantize rows first_row to last_row - 1 of a tensor [rows, columns], repeated, with blocks of block_rows x
// block_columns. Each thread writes MX_VALUES values of a row.
extern "C" __global__ void __launch_bounds__(256)
    mx_dequantize(const mx_u8* codes, const void* scales, float encode, float decode, mx_i64 first_row, mx_i64 last_row,
                  mx_i64 rows, mx_i64 columns, mx_i64 block_rows, mx_i64 block_columns, MxSource* out) {
  __shared__ float values[256];
  const MxScheme r = MX_SCHEME;
  const mx_u32 code_mask = (1u << r.element.bits) - 1u;
  for (unsigned c = threadIdx.x; c < 256u; c += blockDim.x) values[c] = mx_decode(c & code_mask, r.element);
  __syncthreads();
  MxTensorScale t;
  t.encode = encode;
  t.decode = decode;
  const mx_i64 per_row = mx_ceil_div(columns, MX_VALUES);
  const mx_i64 thread = (mx_i64)blockIdx.x * blockDim.x + threadIdx.x;
  const mx_i64 down = mx_quotient(thread, per_row), column = (thread - down * per_row) * MX_VALUES;
  const mx_i64 row = first_row + down;
  if (row >= last_row) return;
  const mx_i64 repetition = mx_quotient(row, rows), inside = row - repetition * rows;
  const mx_i64 grid_row = repetition * mx_ceil_div(rows, block_rows) + mx_quotient(inside, block_rows);
  const mx_i64 across = mx_ceil_div(columns, block_columns);
  const mx_u8* const from = codes + row * mx_packed_bytes(columns);
  MxSource* const to = out + row * columns + column;

  mx_i64 block = mx_quotient(column, block_columns), end = (block + 1) * block_columns;
  float back = mx_block_factor(scales, grid_row * across + block, t, r);
  float made[MX_VALUES];
#pragma unroll
  for (int i = 0; i < MX_VALUES; ++i) {
    const mx_i64 at = column + i;
    if (at >= columns) continue;
    if (at >= end) {
      ++block;
      end += block_columns;
      back = mx_block_factor(scales, grid_row * across + block, t, r);
    }
    mx_u32 code;
    if (MX_BITS == 8) {
      code = from[at];
    } else if (MX_BITS == 4) {
      code = from[at / 2] >> 4 * (at & 1) & 0xFu;
    } else {
      const mx_u8* const four = from + at / 4 * 3;
      code = (four[0] | (mx_u32)four[1] << 8 | (mx_u32)four[2] << 16) >> 6 * (at & 3) & 0x3Fu;
    }
    made[i] = values[code] * back;
  }
#if MX_ROTATED
  mx_rotate_back(made, MX_ROTATION);
#endif
#pragma unroll
  for (int i = 0; i < MX_VALUES; ++i)
    if (column + i < columns) to[i] = mx_narrow(made[i]);
}
