// Counts the codes that differ between the GPU's conversion instruction and numerics.h, for all binary32 except NaN.
#define MX_SOURCE 0
#define MX_BITS 8
#define MX_SWIZZLED 0
#include "device.h"

extern "C" __global__ void mx_conversions(mx_u64* differing) {
  const MxEncoder e = mx_encoder(MX_SCHEME);
  const MxConversion to = mx_conversion(e);
  const mx_u64 stride = (mx_u64)gridDim.x * blockDim.x;
  mx_u64 count = to == MX_SOFTWARE;  // 1 if no instruction converts this format
  for (mx_u64 bits = (mx_u64)blockIdx.x * blockDim.x + threadIdx.x; bits < 0x100000000ull; bits += stride) {
    const float x = mx_float((mx_u32)bits);
    if ((bits & 0x7FFFFFFFull) > MX_INFINITY_BITS) continue;
    const float both[2] = {x, -x};
    const float drawn[2] = {};  // unused: the rounding is not random
    mx_u32 codes[2];
    mx_encode_all<2>(both, 1.0f, e, drawn, codes);
    count += codes[0] != mx_encode_element(x, 1.0f, e).code;
    count += codes[1] != mx_encode_element(-x, 1.0f, e).code;
  }
  if (count) atomicAdd(differing, count);
}
