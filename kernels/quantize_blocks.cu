// Codes and scales of a tensor in blocks of any shape, without statistics: a block for each block of threads, which looks
// at it twice. See device.h for the definitions it is compiled with; further
//   MX_HELD  groups of 8 elements that each of 256 threads keeps between its two looks; 0: blocks are read twice
#include "blocks.h"

// Blocks of block_rows x block_columns, from first_block to last_block, of a tensor [rows, columns] repeated any number of times.
extern "C" __global__ void __launch_bounds__(MX_HELD > 0 ? 256 : 1024)
    mx_quantize_blocks(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 block_rows, mx_i64 block_columns,
                       mx_i64 first_block, mx_i64 last_block, mx_u64 key, const mx_u32* tensor_amax, mx_u8* codes,
                       void* scales) {
  __shared__ mx_u32 held_bits[MX_WARP];
  __shared__ double held_sums[MX_WARP];
  const MxRecipe r = MX_RECIPE;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  for (mx_i64 block = first_block + blockIdx.x; block < last_block; block += gridDim.x) {
    const MxPlace p = mx_place(block, rows, columns, block_rows, block_columns);
    const MxVectors v = mx_vectors(x, columns, p);

    constexpr int kept = MX_HELD > 0 ? MX_HELD : 1;
    MxRaw<MX_VECTOR> held[kept];
    mx_u32 amax = 0;
    if (MX_HELD > 0) {
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        const mx_u32 i = threadIdx.x + k * blockDim.x;
        if (i >= v.count) continue;
        const MxVector at = mx_vector(v, i);
        held[k] = mx_load_raw<MX_VECTOR>(v.x + mx_element(v, at), at.n);
      }
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        if (threadIdx.x + k * blockDim.x >= v.count) continue;
        float values[MX_VECTOR];
        mx_widen_all(held[k], values);
        amax = mx_larger(amax, mx_amax_bits<MX_VECTOR>(values));
      }
      amax = mx_block_max(amax, held_bits);
    } else {
      amax = mx_shared_amax(v, r, held_bits);
    }
    auto s = mx_choose_scale(amax, t, r);
    if (r.candidate_count) mx_choose_shared(v, amax, r, e, held_sums, s);
    if (threadIdx.x == 0)
      mx_store_scale(scales, p.grid_row, p.grid_column, mx_ceil_div(columns, block_columns), s.stored, r);

    mx_u8* const to = codes + p.row * mx_packed_bytes(columns) + mx_packed_bytes(p.column);
    auto store = [&](mx_u32 i, const float (&values)[MX_VECTOR]) {
      const MxVector at = mx_vector(v, i);
      mx_u32 packed[MX_VECTOR];
      float drawn[MX_VECTOR];
      mx_draw(key, mx_element(v, at), e, drawn);
      mx_encode_block<MX_VECTOR>(values, s, e, drawn, packed);
      mx_store_codes(to + at.row * mx_packed_bytes(columns) + mx_packed_bytes(at.column), at.n, packed);
    };
    float values[MX_VECTOR];
    if (MX_HELD > 0) {
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        if (threadIdx.x + k * blockDim.x >= v.count) continue;
        mx_widen_all(held[k], values);
        mx_one_zero(values, r);
        store(threadIdx.x + k * blockDim.x, values);
      }
    } else {
      for (mx_u32 i = threadIdx.x; i < v.count; i += blockDim.x) {
        mx_load_vector(v, i, r, values);
        store(i, values);
      }
    }
  }
}
