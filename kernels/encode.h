// A block of binary32 values to codes: how a recipe scales, rounds and signs them.
#ifndef MXCLI_ENCODE_H
#define MXCLI_ENCODE_H

#include <cstring>

#include "quantize.h"

namespace MXCLI_ISA {
namespace {

// What encoding needs to know of a recipe, in registers.
struct Encoder {
  int mantissa_bits, emin, bits, twos_complement, clear_zero_code;
  bool divides, quotient_bf16, guards_zero, plain;  // plain: nearest-even, no rule for the sign of zero
  uint32_t magnitude_mask;                          // a code is zero when these bits are
  float max;
  MxRounding rounding;

  explicit Encoder(const MxRecipe& r)
      : mantissa_bits(r.element.mantissa_bits), emin(r.element.emin), bits(r.element.bits),
        twos_complement(r.element.twos_complement), clear_zero_code(r.clear_zero_code),
        magnitude_mask(r.element.twos_complement ? ~0u : (1u << (r.element.bits - 1)) - 1u), max(r.element.max),
        rounding(r.rounding) {
    const bool mantissa = r.scale_kind != MX_POWER_OF_TWO;
    quotient_bf16 = mantissa && r.element_step == MX_ELEMENT_OVER_PRODUCT_BF16;
    divides = mantissa && (quotient_bf16 || r.element_step == MX_ELEMENT_OVER_PRODUCT ||
                           r.element_step == MX_ELEMENT_OVER_QUOTIENT);
    // Factors of these may be 0 or infinite, and 0 / 0 and 0 * infinity are no numbers: a zero stays a zero.
    guards_zero = divides || (mantissa && r.element_step == MX_ELEMENT_TIMES_RECIPROCAL_ZERO);
    const bool nearest_even = rounding.above == 0.5f && rounding.half_if == 1 && rounding.half_always == 0;
    plain = nearest_even && !quotient_bf16 && !clear_zero_code;
  }

  template <bool Divides, bool Plain, class F>
  inline __attribute__((always_inline)) F argument(F x, F factor) const {
    F scaled = Divides ? x / factor : x * factor;
    if (guards_zero) scaled = x == 0.0f ? x : scaled;
    return !Plain && quotient_bf16 ? mx_round_to_bf16(scaled) : scaled;
  }

  // Code of x with its sign, and the dequantized value.
  template <bool Divides, bool Plain, class F, class U>
  inline __attribute__((always_inline)) void encode(F x, F factor, F decode, U& code, F& value) const {
    F magnitude = mx_float(mx_bits(argument<Divides, Plain>(x, factor)) & 0x7FFFFFFFu);
    U sign_bit = mx_bits(x) & 0x80000000u, negative = sign_bit >> 31;
    auto rounded = [&] {
      if constexpr (Plain) return mx_encode_nearest_even(magnitude, mantissa_bits, emin, max);
      else return mx_encode(magnitude, mantissa_bits, emin, max, rounding);
    }();
    U none = sign_bit & 0u;
    U sign = !Plain && clear_zero_code ? (rounded.code == 0u ? none : negative) : negative;
    code = mx_signed_code(rounded.code, sign, bits, twos_complement);
    value = mx_float(mx_bits(rounded.value) | sign_bit) * decode;
  }
};

template <bool Divides, bool Plain, bool Stats>
inline __attribute__((always_inline)) void encode_block(const float* x, int n, float factor, float decode,
                                                        const Encoder& encoder, float* values, uint32_t* codes) {
  const MxLanes factors = mx_fill(MxLanes{}, factor), decodes = mx_fill(MxLanes{}, decode);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    MxLanes lanes, value;
    MxLaneBits code;
    std::memcpy(&lanes, x + i, sizeof lanes);
    encoder.encode<Divides, Plain>(lanes, factors, decodes, code, value);
    std::memcpy(codes + i, &code, sizeof code);
    if (Stats) std::memcpy(values + i, &value, sizeof value);
  }
  for (; i < n; ++i) {
    float value;
    encoder.encode<Divides, Plain>(x[i], factor, decode, codes[i], value);
    if (Stats) values[i] = value;
  }
}

}  // namespace
}  // namespace MXCLI_ISA

#endif
