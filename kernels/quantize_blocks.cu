// Codes and scales of a tensor with blocks of any shape, or its values (MX_TARGET) without a rotation: one block per
// thread block, in two passes.
// Macros, next to those of device.h:
//   MX_HELD  vectors of 8 elements that each of 256 threads keeps in registers between the passes; 0: read blocks twice
#include "blocks.h"

// Quantize blocks first_block to last_block - 1, of block_rows x block_columns, of a tensor [rows, columns] repeated
// any number of times. Values are written to `codes`, which may be x.
extern "C" __global__ void __launch_bounds__(MX_HELD > 0 ? 256 : 1024)
    mx_quantize_blocks(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 block_rows, mx_i64 block_columns,
                       mx_i64 first_block, mx_i64 last_block, mx_u64 key, const mx_u32* tensor_amax, mx_u8* codes,
                       void* scales) {
  __shared__ mx_u32 scratch_bits[MX_WARP];
  __shared__ double scratch_sums[MX_WARP];
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  for (mx_i64 block = first_block + blockIdx.x; block < last_block; block += gridDim.x) {
    const MxBlockBounds p = mx_block_bounds(block, rows, columns, block_rows, block_columns);
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
        amax = mx_max_u32(amax, mx_amax_bits<MX_VECTOR>(values));
      }
      amax = mx_block_max(amax, scratch_bits);
    } else {
      amax = mx_block_amax(v, r, scratch_bits);
    }
    auto s = mx_choose_scale(amax, t, r);
    if (r.candidate_count) mx_choose_candidate_shared(v, amax, t, r, e, scratch_sums, s);
#if MX_PASSES
    MxTarget* const to = reinterpret_cast<MxTarget*>(codes);
#else
    if (threadIdx.x == 0)
      mx_store_scale(scales, p.grid_row, p.grid_column, mx_ceil_div(columns, block_columns), s.stored, r);

    mx_u8* const to = codes + p.row * mx_packed_bytes(columns) + mx_packed_bytes(p.column);
#endif
    auto store = [&](mx_u32 i, float (&values)[MX_VECTOR]) {
      const MxVector at = mx_vector(v, i);
      float drawn[MX_VECTOR];
      mx_draw(key, mx_element(v, at), e, drawn);
#if MX_PASSES
      mx_pass_block<MX_VECTOR>(values, s, e, drawn);
      mx_store_values(to + mx_element(v, at), at.n, values);
#else
      mx_u32 packed[MX_VECTOR];
      mx_encode_block<MX_VECTOR>(values, s, e, drawn, packed);
      mx_store_codes(to + at.row * mx_packed_bytes(columns) + mx_packed_bytes(at.column), at.n, packed);
#endif
    };
    float values[MX_VECTOR];
    if (MX_HELD > 0) {
#pragma unroll
      for (int k = 0; k < kept; ++k) {
        if (threadIdx.x + k * blockDim.x >= v.count) continue;
        mx_widen_all(held[k], values);
        mx_canonicalize_zeros(values, r);
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
