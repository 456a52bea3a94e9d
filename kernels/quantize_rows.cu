// Codes and scales, or values (MX_TARGET), of a tensor with blocks of one row, or with one block. Macros, next to those of
// device.h:
//   MX_WIDTH     columns of a block, a power of two; 0: the block is the whole tensor, whose amax is given
//   MX_ELEMENTS  neighbors per thread, a power of two; for values of a rotated tensor at least a group
#include "blocks.h"

#if MX_WIDTH > 0
#define MX_BLOCK MX_WIDTH
#else
#define MX_BLOCK MX_ELEMENTS
#endif

// Quantize blocks of 1 x MX_WIDTH of a tensor [rows, columns], with one, several or a part of a block per thread, or,
// if MX_WIDTH is 0, the elements of a per-tensor block. `tensor_amax`: bits of the largest finite magnitude, for tensor
// scales; `whole_amax`: bits of the largest magnitude of any kind, for a per-tensor block. Random numbers count
// elements from `base` at x. Values are written to `codes`, which may be x.
extern "C" __global__ void __launch_bounds__(256, 2)
    mx_quantize_rows(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_u64 key, mx_i64 base, const mx_u32* tensor_amax,
                     const mx_u32* whole_amax, mx_u8* codes, void* scales) {
  constexpr int elements = MX_ELEMENTS, width = MX_BLOCK;
  constexpr int lanes = width > elements ? width / elements : 1, blocks = width < elements ? elements / width : 1;
  constexpr int each = elements / blocks, group = lanes * elements;
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  const mx_i64 threads_per_row = mx_ceil_div(columns, group) * lanes;
  const mx_i64 thread = (mx_i64)blockIdx.x * blockDim.x + threadIdx.x;
  const mx_i64 row = rows == 1 ? 0 : mx_quotient(thread, threads_per_row);
  const mx_i64 column = (thread - row * threads_per_row) * elements;
  const mx_i64 n = row < rows ? mx_min_i64(elements, columns - column) : 0;  // <= 0: outside the tensor

  float values[elements], drawn[elements];
#if !MX_PASSES
  mx_u32 packed[elements];
#endif
  mx_load_input(x, row * columns + column, n, r, values);
  mx_draw(key, base + row * columns + column, e, drawn);
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    float* block = values + b * each;
    const mx_u32 amax =
        MX_WIDTH ? mx_lanes_max<lanes>(mx_amax_bits<each>(block)) : mx_scale_amax(*tensor_amax, *whole_amax, r);
    auto s = mx_choose_scale(amax, t, r);
    if (r.candidate_count && MX_WIDTH && lanes == 1) mx_choose_candidate<each>(block, amax, t, r, e, s);
#if MX_PASSES
    mx_pass_block<each>(block, s, e, drawn + b * each);
#else
    mx_encode_block<each>(block, s, e, drawn + b * each, packed + b * each);
    if (MX_WIDTH) {
      if (threadIdx.x % lanes == 0 && b * each < n)
        mx_store_scale(scales, row, column / width + b, mx_ceil_div(columns, width), s.stored, r);
    } else if (thread == 0) {
      mx_store_scale(scales, 0, 0, 1, s.stored, r);
    }
#endif
  }
#if MX_PASSES
#if MX_ROTATED
#pragma unroll
  for (int first = 0; first < elements; first += MX_ROTATED) mx_rotate_back(values + first, MX_ROTATION);
#endif
  if (n > 0) mx_store_values(reinterpret_cast<MxTarget*>(codes) + row * columns + column, n, values);
#else
  if (n > 0) mx_store_codes(codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column), n, packed);
#endif
}
