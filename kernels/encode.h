// A block of binary32 values to codes, a register of them at a time.
#ifndef MXCLI_ENCODE_H
#define MXCLI_ENCODE_H

#include <cstring>

#include "quantize.h"

namespace MXCLI_ISA {
namespace {

// The encoder with what is known when compiling, so that the compiler folds the choices away.
template <bool Divides, bool Plain>
inline __attribute__((always_inline)) MxEncoder known(MxEncoder e) {
  e.divides = Divides;
  e.plain = Plain;
  return e;
}

// `drawn`: a number for each element of a rounding that is random, else null.
template <bool Stats>
inline __attribute__((always_inline)) void encode_block(const float* x, int n, float factor, float decode,
                                                        const MxEncoder& encoder, const float* drawn, float* values,
                                                        uint32_t* codes) {
  const MxLanes factors = mx_fill(MxLanes{}, factor), decodes = mx_fill(MxLanes{}, decode);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    MxLanes lanes;
    std::memcpy(&lanes, x + i, sizeof lanes);
    MxRounded<MxLanes, MxLaneBits> element;
    if (drawn) {
      MxLanes above;
      std::memcpy(&above, drawn + i, sizeof above);
      element = mx_encode_element(lanes, factors, encoder, above);
    } else {
      element = mx_encode_element(lanes, factors, encoder);
    }
    std::memcpy(codes + i, &element.code, sizeof element.code);
    MxLanes value = mx_float(mx_bits(element.value) | (mx_bits(lanes) & 0x80000000u)) * decodes;
    if (Stats) std::memcpy(values + i, &value, sizeof value);
  }
  for (; i < n; ++i) {
    auto element =
        drawn ? mx_encode_element(x[i], factor, encoder, drawn[i]) : mx_encode_element(x[i], factor, encoder);
    codes[i] = element.code;
    if (Stats) values[i] = mx_float(mx_bits(element.value) | (mx_bits(x[i]) & 0x80000000u)) * decode;
  }
}

}  // namespace
}  // namespace MXCLI_ISA

#endif
