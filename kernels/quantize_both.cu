// Codes and scales of a tensor along rows and along columns in one read: each thread block keeps a tile of the tensor
// in shared memory and quantizes its blocks along both axes. Macros, next to those of device.h:
//   MX_WIDTH  elements of a block, 16 or 32; a multiple of a transform's group size
//   MX_TILE   rows and columns of a tile, a multiple of MX_WIDTH
#include "blocks.h"

// Elements along a row or a column of the tile.
struct MxLine {
  const MxSource* first;
  int stride;
};

// One axis: the tensor's shape along it, and its codes and scales.
struct MxAxis {
  mx_i64 columns;  // length of the axis along which blocks run
  const mx_u32* tensor_amax;
  mx_u8* codes;
  void* scales;
};

// Quantize a block of `n` elements from (row, column) on, in the coordinates of the axis.
MX_FN void mx_encode_line(const MxLine& line, mx_i64 row, mx_i64 column, mx_i64 n, const MxAxis& axis, mx_u64 key,
                          MxScheme r, MxEncoder e) {
  float values[MX_WIDTH], drawn[MX_WIDTH];
#pragma unroll
  for (int i = 0; i < MX_WIDTH; ++i) values[i] = i < n ? mx_widen(line.first[i * line.stride]) : 0.0f;
#if MX_ROTATED
#pragma unroll
  for (int i = 0; i < MX_WIDTH; i += MX_ROTATED)
    if (i < n) mx_rotate(values + i, MX_ROTATION);
#endif
  mx_canonicalize_zeros(values, r);
  mx_draw(key, row * axis.columns + column, e, drawn);
  const mx_u32 amax = mx_amax_bits<MX_WIDTH>(values);
  const MxTensorScale t = mx_read_tensor_scale(axis.tensor_amax, r);
  auto s = mx_choose_scale(amax, t, r);
  if (r.candidate_count) mx_choose_candidate<MX_WIDTH>(values, amax, t, r, e, s);
  mx_u32 codes[MX_WIDTH];
  mx_encode_block<MX_WIDTH>(values, s, e, drawn, codes);
  mx_store_codes(axis.codes + row * mx_packed_bytes(axis.columns) + mx_packed_bytes(column), n, codes);
  mx_store_scale(axis.scales, row, column / MX_WIDTH, mx_ceil_div(axis.columns, MX_WIDTH), s.stored, r);
}

// Quantize a tensor [rows, columns] repeated `batch` times. Codes and scales along columns are those of the transposed
// tensor.
extern "C" __global__ void __launch_bounds__(256)
    mx_quantize_both(const MxSource* x, mx_i64 batch, mx_i64 rows, mx_i64 columns, mx_u64 key, const mx_u32* row_amax,
                     mx_u8* row_codes, void* row_scales, const mx_u32* column_amax, mx_u8* column_codes,
                     void* column_scales) {
  constexpr int tile = MX_TILE, per_line = tile / MX_WIDTH, vectors = tile / MX_VECTOR;
  // Padded by one element, so that threads on neighboring lines access different banks.
  __shared__ MxSource held[tile][tile + 1];
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxAxis along_rows = {columns, row_amax, row_codes, row_scales};
  const MxAxis along_columns = {rows, column_amax, column_codes, column_scales};
  const mx_i64 down = mx_ceil_div(rows, tile), across = mx_ceil_div(columns, tile);
  for (mx_i64 at = blockIdx.x; at < batch * down * across; at += gridDim.x) {
    const mx_i64 band = mx_quotient(at, across), repetition = mx_quotient(band, down);
    const mx_i64 row = (band - repetition * down) * tile, column = (at - band * across) * tile;
    const mx_i64 height = mx_min_i64(tile, rows - row), width = mx_min_i64(tile, columns - column);
    const mx_i64 first_row = repetition * rows + row;
    __syncthreads();
    for (int i = threadIdx.x; i < tile * vectors; i += blockDim.x) {
      const int line = i / vectors, place = i % vectors * MX_VECTOR;
      if (line >= height || place >= width) continue;
      const MxRaw<MX_VECTOR> raw =
          mx_load_raw<MX_VECTOR>(x + (first_row + line) * columns + column + place, width - place);
#pragma unroll
      for (int k = 0; k < MX_VECTOR; ++k) held[line][place + k] = mx_raw_element(raw, k);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * tile * per_line; i += blockDim.x) {
      const int task = i % (tile * per_line), line = task % tile, begin = task / tile * MX_WIDTH;
      if (i < tile * per_line) {
        if (line < height && begin < width)
          mx_encode_line(MxLine{&held[line][begin], 1}, first_row + line, column + begin,
                         mx_min_i64(MX_WIDTH, width - begin), along_rows, key, r, e);
      } else if (line < width && begin < height) {
        mx_encode_line(MxLine{&held[begin][line], tile + 1}, repetition * columns + column + line, row + begin,
                       mx_min_i64(MX_WIDTH, height - begin), along_columns, key, r, e);
      }
    }
  }
}
