// Codes and scales of a tensor whose blocks lie in rows, or that is one block, without statistics. See device.h for the
// definitions it is compiled with; further
//   MX_WIDTH     columns of a block of one row, a power of two; 0: the block is the whole tensor, its amax given
//   MX_ELEMENTS  neighbours that one thread takes, a power of two
#include "blocks.h"

#if MX_WIDTH > 0
#define MX_BLOCK MX_WIDTH
#else
#define MX_BLOCK MX_ELEMENTS
#endif

// Blocks of 1 x MX_WIDTH of a tensor [rows, columns], of which a thread takes one, several or a part; or, MX_WIDTH 0,
// elements of a tensor that is one block. `tensor_amax`: bits of the tensor's largest finite magnitude, where the recipe
// scales the tensor; `whole_amax`: bits of its largest magnitude of any kind, where the tensor is the block. x is element
// `base` of all that draws count.
extern "C" __global__ void __launch_bounds__(256, 2)
    mx_quantize_rows(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_u64 key, mx_i64 base, const mx_u32* tensor_amax,
                     const mx_u32* whole_amax, mx_u8* codes, void* scales) {
  constexpr int elements = MX_ELEMENTS, width = MX_BLOCK;
  constexpr int lanes = width > elements ? width / elements : 1, blocks = width < elements ? elements / width : 1;
  constexpr int each = elements / blocks, group = lanes * elements;
  const MxRecipe r = MX_RECIPE;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  const mx_i64 threads_per_row = mx_ceil_div(columns, group) * lanes;
  const mx_i64 thread = (mx_i64)blockIdx.x * blockDim.x + threadIdx.x;
  const mx_i64 row = rows == 1 ? 0 : mx_quotient(thread, threads_per_row);
  const mx_i64 column = (thread - row * threads_per_row) * elements;
  const mx_i64 n = row < rows ? mx_least(elements, columns - column) : 0;  // none or fewer: outside the tensor

  float values[elements], drawn[elements];
  mx_u32 packed[elements];
  mx_load_input(x, row * columns + column, n, r, values);
  mx_draw(key, base + row * columns + column, e, drawn);
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    const float* block = values + b * each;
    const mx_u32 amax =
        MX_WIDTH ? mx_lanes_max<lanes>(mx_amax_bits<each>(block)) : mx_scaled_as(*tensor_amax, *whole_amax, r);
    auto s = mx_choose_scale(amax, t, r);
    if (r.candidate_count && MX_WIDTH && lanes == 1) mx_choose_candidate<each>(block, amax, r, e, s);
    mx_encode_block<each>(block, s, e, drawn + b * each, packed + b * each);
    if (MX_WIDTH) {
      if (threadIdx.x % lanes == 0 && b * each < n)
        mx_store_scale(scales, row, column / width + b, mx_ceil_div(columns, width), s.stored, r);
    } else if (thread == 0) {
      mx_store_scale(scales, 0, 0, 1, s.stored, r);
    }
  }
  if (n > 0) mx_store_codes(codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column), n, packed);
}
