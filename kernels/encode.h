// Encoding of a block of binary32 values, one SIMD register at a time.
#ifndef MXCLI_ENCODE_H
#define MXCLI_ENCODE_H

#include <cstring>

#include "quantize.h"

namespace MXCLI_ISA {
namespace {

// Fix compile-time choices in an encoder, so that the compiler removes their branches. Rare schemes, which are not plain,
// decide at run time whether they divide.
template <bool Divides, bool Plain>
inline __attribute__((always_inline)) MxEncoder known(MxEncoder e) {
  if (Plain) e.divides = Divides;
  e.plain = Plain;
  return e;
}

// Encode n elements; with Stats, also dequantize them. `drawn`: their random numbers, or null if the rounding is not
// random.
template <bool Stats>
inline __attribute__((always_inline)) void encode_block(const float* x, int n, float factor, float decode,
                                                        const MxEncoder& encoder, const float* drawn, float* values,
                                                        uint32_t* codes) {
  const MxLanes factors = mx_broadcast(MxLanes{}, factor), decodes = mx_broadcast(MxLanes{}, decode);
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

// Encode n elements and dequantize them, without their codes; `drawn` as above.
inline __attribute__((always_inline)) void pass_block(const float* x, int n, float factor, float decode,
                                                      const MxEncoder& encoder, const float* drawn, float* values) {
  const MxLanes factors = mx_broadcast(MxLanes{}, factor), decodes = mx_broadcast(MxLanes{}, decode);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    MxLanes lanes, above;
    std::memcpy(&lanes, x + i, sizeof lanes);
    if (drawn) std::memcpy(&above, drawn + i, sizeof above);
    const auto element =
        drawn ? mx_encode_element(lanes, factors, encoder, above) : mx_encode_element(lanes, factors, encoder);
    const MxLanes value = mx_signed_value(element, lanes, encoder) * decodes;
    std::memcpy(values + i, &value, sizeof value);
  }
  for (; i < n; ++i) {
    const auto element =
        drawn ? mx_encode_element(x[i], factor, encoder, drawn[i]) : mx_encode_element(x[i], factor, encoder);
    values[i] = mx_signed_value(element, x[i], encoder) * decode;
  }
}

}  // namespace
}  // namespace MXCLI_ISA

#endif
