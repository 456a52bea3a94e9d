// Codes and scales of a tensor along rows and along columns, in one read: a tile of the tensor for each block of threads,
// which holds it while its threads take blocks of either way. See device.h for the definitions it is compiled with; further
//   MX_WIDTH  elements of a block, 16 or 32; a transform's group divides it
//   MX_TILE   rows and columns of a tile, a multiple of it
#include "blocks.h"

// Elements of the tile beside one another: of a row, or of a column.
struct MxLine {
  const MxSource* first;
  int apart;
};

// What either way needs to know: the tensor as that way sees it, and where its codes and scales go.
struct MxWay {
  mx_i64 columns;  // the length that blocks lie along
  const mx_u32* tensor_amax;
  mx_u8* codes;
  void* scales;
};

// A block of `n` elements, the first of them element (row, column) of the tensor as its way sees it.
MX_FN void mx_encode_line(const MxLine& line, mx_i64 row, mx_i64 column, mx_i64 n, const MxWay& way, mx_u64 key,
                          MxRecipe r, MxEncoder e) {
  float values[MX_WIDTH], drawn[MX_WIDTH];
#pragma unroll
  for (int i = 0; i < MX_WIDTH; ++i) values[i] = i < n ? mx_widen(line.first[i * line.apart]) : 0.0f;
#if MX_ROTATED
#pragma unroll
  for (int i = 0; i < MX_WIDTH; i += MX_ROTATED)
    if (i < n) mx_rotate(values + i, MX_ROTATION);
#endif
  mx_one_zero(values, r);
  mx_draw(key, row * way.columns + column, e, drawn);
  const mx_u32 amax = mx_amax_bits<MX_WIDTH>(values);
  auto s = mx_choose_scale(amax, mx_read_tensor_scale(way.tensor_amax, r), r);
  if (r.candidate_count) mx_choose_candidate<MX_WIDTH>(values, amax, r, e, s);
  mx_u32 codes[MX_WIDTH];
  mx_encode_block<MX_WIDTH>(values, s, e, drawn, codes);
  mx_store_codes(way.codes + row * mx_packed_bytes(way.columns) + mx_packed_bytes(column), n, codes);
  mx_store_scale(way.scales, row, column / MX_WIDTH, mx_ceil_div(way.columns, MX_WIDTH), s.stored, r);
}

// A tensor [rows, columns] repeated `batch` times. Codes and scales along columns are those of [columns, rows] repeated.
extern "C" __global__ void __launch_bounds__(256)
    mx_quantize_both(const MxSource* x, mx_i64 batch, mx_i64 rows, mx_i64 columns, mx_u64 key, const mx_u32* row_amax,
                     mx_u8* row_codes, void* row_scales, const mx_u32* column_amax, mx_u8* column_codes,
                     void* column_scales) {
  constexpr int tile = MX_TILE, per_line = tile / MX_WIDTH, vectors = tile / MX_VECTOR;
  // One element more to a line, so that threads on neighbouring lines do not wait for the same bank.
  __shared__ MxSource held[tile][tile + 1];
  const MxRecipe r = MX_RECIPE;
  const MxEncoder e = mx_encoder(r);
  const MxWay along_rows = {columns, row_amax, row_codes, row_scales};
  const MxWay along_columns = {rows, column_amax, column_codes, column_scales};
  const mx_i64 down = mx_ceil_div(rows, tile), across = mx_ceil_div(columns, tile);
  for (mx_i64 at = blockIdx.x; at < batch * down * across; at += gridDim.x) {
    const mx_i64 band = mx_quotient(at, across), repetition = mx_quotient(band, down);
    const mx_i64 row = (band - repetition * down) * tile, column = (at - band * across) * tile;
    const mx_i64 height = mx_least(tile, rows - row), width = mx_least(tile, columns - column);
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
                         mx_least(MX_WIDTH, width - begin), along_rows, key, r, e);
      } else if (line < width && begin < height) {
        mx_encode_line(MxLine{&held[begin][line], tile + 1}, repetition * columns + column + line, row + begin,
                       mx_least(MX_WIDTH, height - begin), along_columns, key, r, e);
      }
    }
  }
}
