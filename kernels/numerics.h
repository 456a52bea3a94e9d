// The arithmetic of mxcli, once: g++, clang and NVRTC read this text; quantize.cpp and the .cu files hold loops, loads
// and stores only. Freestanding: no includes. Every float operation is one IEEE-754 binary32 operation, round to nearest
// even, subnormals kept: compile without contraction, reassociation and flush-to-zero.
#ifndef MXCLI_NUMERICS_H
#define MXCLI_NUMERICS_H

typedef unsigned char mx_u8;
typedef unsigned short mx_u16;
typedef unsigned int mx_u32;
typedef unsigned long long mx_u64;
typedef int mx_i32;
typedef long long mx_i64;

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MX_FN static __device__ __forceinline__
MX_FN mx_u32 mx_bits(float x) { return __float_as_uint(x); }
MX_FN float mx_float(mx_u32 bits) { return __uint_as_float(bits); }
#else
#define MX_FN static inline __attribute__((always_inline))
MX_FN mx_u32 mx_bits(float x) { mx_u32 bits; __builtin_memcpy(&bits, &x, 4); return bits; }
MX_FN float mx_float(mx_u32 bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
#endif

#define MX_INFINITY_BITS 0x7F800000u
#define MX_FLT_MAX 3.4028234663852886e38f
#define MX_FLT_MIN 1.1754943508222875e-38f

// ---------------------------------------------------------------------------------------------------- rows as numbers

// A scalar format (mxcli/numerics/floats.py). Codes are at most 8 bits; FP32 scales are never encoded.
struct MxFloat {
  mx_i32 bits;           // width of a code with its sign
  mx_i32 mantissa_bits;
  mx_i32 emin;           // exponent of the smallest normal
  mx_i32 emax;           // exponent of the largest finite value
  mx_i32 nan_code;       // 0 where the format has no NaN
  mx_i32 twos_complement;
  float max;             // largest finite value
};

// An element rounding (rounding.py): a fraction above `above` goes up; a fraction of exactly one half goes up when the
// integer part has a bit in common with `half_if` (1: odd, 0: never) or when `half_always`.
struct MxRounding {
  float above;
  mx_i32 half_if;
  mx_i32 half_always;
};

enum MxScaleKind { MX_POWER_OF_TWO = 0, MX_MINIFLOAT = 1, MX_BINARY32 = 2 };
// How the tensor's scales (encode, decode) follow from its amax T; L = element max * scale max.
enum MxTensorStep {
  MX_TENSOR_NONE = 0,            // 1, 1
  MX_TENSOR_ENCODE = 1,          // encode = min(L / T, FLT_MAX), 1 if that is 0; decode = 1 / encode
  MX_TENSOR_DECODE = 2,          // decode = T / L, 1 if that is 0 (the producers' 0 / 0); encode = 1 / decode
  MX_TENSOR_RECIPROCAL_CLAMPED = 3,  // encode = (1 / max(T, FLT_MIN)) * L, 1 if not finite
  MX_TENSOR_RECIPROCAL_ZERO = 4,     // encode = L * (1 / T), 0 if T is 0
  MX_TENSOR_ENCODE_BF16 = 5,     // encode = bfloat16(L / T), 1 if not finite
};
// How a block's scale follows from its amax A (D = element max), before the cast to the scale format.
enum MxBlockStep {
  MX_BLOCK_A_TIMES_ENCODE_OVER_D = 0,    // A * (encode * (1 / D))
  MX_BLOCK_A_OVER_D_TIMES_ENCODE = 1,    // (A / D) * encode
  MX_BLOCK_A_OVER_D_OVER_DECODE = 2,     // (A / D) / decode
  MX_BLOCK_A_OVER_D_TIMES_DECODE = 3,    // A / (D * decode)
  MX_BLOCK_ENCODE_TIMES_A_OVER_D = 4,    // encode * (A * (1 / D))
  MX_BLOCK_BF16_A_OVER_D_TIMES_ENCODE = 5,  // bfloat16(A / D) * encode
};
// How an element is scaled (the argument of its rounding) and scaled back; S = the block scale as stored.
enum MxElementStep {
  MX_ELEMENT_TIMES_RECIPROCAL = 0,   // x * min(1 / (S * decode), FLT_MAX);  back: S * decode
  MX_ELEMENT_TIMES_QUOTIENT = 1,     // x * ((1 / decode) / S);              back: S * decode
  MX_ELEMENT_OVER_PRODUCT = 2,       // x / (S * decode);                    back: S * decode
  MX_ELEMENT_OVER_QUOTIENT = 3,      // x / (S / encode);                    back: S / encode
  MX_ELEMENT_TIMES_RECIPROCAL_ZERO = 4,  // x * o, o = 1 / (S * (1 / encode)), 1/0 = 0;  back: 1 / o
  MX_ELEMENT_OVER_PRODUCT_BF16 = 5,  // bfloat16(x / (S * decode));          back: S * decode
};

// One way to quantize, every choice a number (mxcli/numerics/recipe.py resolves names to this).
struct MxRecipe {
  MxFloat element;
  MxFloat scale;              // of MX_MINIFLOAT scales
  MxRounding rounding;
  mx_i32 scale_kind;
  mx_i32 scale_stored_bits;   // 8: a code; 32: a binary32 value
  mx_i32 block_rows;          // 0: all
  mx_i32 block_columns;       // 0: all
  mx_i32 stored_bits;         // packed width of an element code: 4, 6 or 8
  // power-of-two scales
  mx_i32 of_ratio;            // exponent of fl(amax / element max) instead of exponent(amax) - emax
  mx_u32 carry_above;         // plus one when the 23-bit fraction is above this
  mx_i32 candidates[4];       // exponents to try, relative to the rule's; the lowest squared error wins
  mx_i32 candidate_count;
  mx_i32 min_exponent;        // clamp from below: -127 in the standard
  mx_i32 byte0_exponent;      // what elements are divided by, as a power of two, when the stored byte is 0
  mx_i32 flush_subnormal_blocks;  // a block whose amax is a binary32 subnormal becomes zero
  // scales with a mantissa
  mx_i32 tensor_step;
  mx_i32 block_step;
  mx_i32 element_step;
  float min_scale;            // clamp from below, 0: none
  float zero_scale;           // replaces a scale of exactly 0, 0: none
  mx_i32 zero_code;           // replaces a scale code of 0, 0: none
  mx_i32 bf16_scale;          // binary32 scales are rounded to bfloat16
  // signs of zero
  mx_i32 clear_zero_input;    // -0.0 in the input counts as +0.0
  mx_i32 clear_zero_code;     // a zero code never carries a sign
  mx_i32 set_zero_code;       // a zero code always carries a sign
  mx_i32 infinity_is_nan;     // an infinity makes its block NaN, as a NaN does
};

struct MxTensorScale { float encode, decode; };

// What a block's amax decides.
struct MxScale {
  mx_u32 stored;       // scale code, or binary32 bits
  float factor;        // element argument = x * factor, or x / factor when the element step divides
  float decode;        // dequantized value = element value * decode
  mx_i32 is_nan;       // the block becomes NaN
  mx_i32 is_lost;      // the scale itself was rounded to zero or clamped at the scale format's largest value
};

struct MxRounded {
  mx_u32 code;         // magnitude code
  float value;         // its value, not negative
};

// ------------------------------------------------------------------------------------------------------------ helpers

MX_FN float mx_power_of_two(mx_i32 exponent) {  // -149 <= exponent <= 127
  return exponent >= -126 ? mx_float((mx_u32)(exponent + 127) << 23) : mx_float(1u << (exponent + 149));
}

MX_FN float mx_round_to_bf16(float x) {  // NaN is kept a NaN
  mx_u32 bits = mx_bits(x);
  if ((bits & 0x7FFFFFFFu) > MX_INFINITY_BITS) return x;
  return mx_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
}

MX_FN float mx_reciprocal_or_zero(float x) { return x == 0.0f ? 0.0f : 1.0f / x; }

// ------------------------------------------------------------------------------------------------------------ encode

// The grid's step at a magnitude is 2^(e - mantissa_bits), e = max(exponent(magnitude), emin): below emin the same step
// goes on, which is what subnormals are. Scaling by it is exact, so what is left is rounding to an integer.
MX_FN mx_u32 mx_grid_exponent(float magnitude, mx_i32 emin) {  // biased by 127
  mx_u32 e = mx_bits(magnitude) >> 23, lowest = (mx_u32)(emin + 127);
  return e < lowest ? lowest : e;
}

// Nearest code, ties to even; above the largest value (and for NaN) the largest code.
MX_FN MxRounded mx_encode_nearest_even(float magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits, and addition rounds to even
  float a = magnitude < max ? magnitude : max;
  mx_u32 e = mx_grid_exponent(a, emin);
  float shifted = a * mx_float((254u + mantissa_bits - e) << 23) + magic;
  MxRounded r;
  r.code = ((e - (mx_u32)(emin + 127)) << mantissa_bits) + (mx_bits(shifted) - mx_bits(magic));
  r.value = (shifted - magic) * mx_float((e - mantissa_bits) << 23);
  return r;
}

// The same under any rounding of the magnitude.
MX_FN MxRounded mx_encode(float magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max, MxRounding rounding) {
  float a = magnitude < max ? magnitude : max;
  mx_u32 e = mx_grid_exponent(a, emin);
  float steps = a * mx_float((254u + mantissa_bits - e) << 23);
  mx_i32 whole = (mx_i32)steps;
  float fraction = steps - (float)whole;
  mx_i32 up = (fraction > rounding.above) |
              ((fraction == 0.5f) & ((whole & rounding.half_if) | rounding.half_always));
  MxRounded r;
  r.code = ((e - (mx_u32)(emin + 127)) << mantissa_bits) + (mx_u32)(whole + up);
  r.value = (float)(whole + up) * mx_float((e - mantissa_bits) << 23);
  return r;
}

// Value of a magnitude code.
MX_FN float mx_decode_magnitude(mx_u32 code, mx_i32 mantissa_bits, mx_i32 emin) {
  mx_u32 field = code >> mantissa_bits, fraction = code & ((1u << mantissa_bits) - 1u);
  mx_u32 steps = field == 0 ? fraction : fraction | (1u << mantissa_bits);
  mx_i32 e = emin + (field == 0 ? 0 : (mx_i32)field - 1);
  return (float)steps * mx_power_of_two(e - mantissa_bits);
}

// Value of a code; a code above the largest finite one is NaN or an infinity of its format.
MX_FN float mx_decode(mx_u32 code, MxFloat f) {
  mx_u32 sign_bit = 1u << (f.bits - 1);
  if (f.twos_complement) {
    mx_i32 value = code & sign_bit ? (mx_i32)code - (mx_i32)(sign_bit << 1) : (mx_i32)code;
    return (float)value * mx_power_of_two(f.emin - f.mantissa_bits);
  }
  mx_u32 magnitude = code & (sign_bit - 1u);
  mx_u32 sign = code & sign_bit ? 0x80000000u : 0u;
  if (f.nan_code && magnitude > 0) {
    float value = mx_decode_magnitude(magnitude, f.mantissa_bits, f.emin);
    if (value > f.max) {
      mx_i32 first_special = magnitude == (mx_u32)f.nan_code || (magnitude & ((1u << f.mantissa_bits) - 1u)) != 0;
      return mx_float(sign | (first_special ? 0x7FC00000u : MX_INFINITY_BITS));
    }
  }
  return mx_float(sign | mx_bits(mx_decode_magnitude(magnitude, f.mantissa_bits, f.emin)));
}

// A magnitude code with its sign (0 or 1) written.
MX_FN mx_u32 mx_signed_code(mx_u32 code, mx_u32 negative, mx_i32 bits, mx_i32 twos_complement) {
  return twos_complement ? ((code ^ (0u - negative)) + negative) & ((1u << bits) - 1u) : code | negative << (bits - 1);
}

// The sign of a code whose row has a rule for zeros.
MX_FN mx_u32 mx_sign_of_zero(mx_u32 code, mx_u32 negative, mx_i32 clear_zero_code, mx_i32 set_zero_code) {
  return code == 0 ? (negative & (mx_u32)!clear_zero_code) | (mx_u32)set_zero_code : negative;
}

// ------------------------------------------------------------------------------------------------------------- scales

// The tensor's scales from its largest finite magnitude.
MX_FN MxTensorScale mx_tensor_scale(float amax, MxRecipe r) {
  float limit = r.element.max * r.scale.max;
  MxTensorScale s;
  s.encode = 1.0f;
  s.decode = 1.0f;
  switch (r.tensor_step) {
    case MX_TENSOR_NONE: return s;
    case MX_TENSOR_ENCODE:
      s.encode = limit / amax;
      if (!(s.encode < MX_FLT_MAX)) s.encode = MX_FLT_MAX;
      if (s.encode == 0.0f) s.encode = 1.0f;
      break;
    case MX_TENSOR_DECODE:
      s.decode = amax / limit;
      if (s.decode == 0.0f) s.decode = 1.0f;
      s.encode = 1.0f / s.decode;
      return s;
    case MX_TENSOR_RECIPROCAL_CLAMPED:
      s.encode = (1.0f / (amax > MX_FLT_MIN ? amax : MX_FLT_MIN)) * limit;
      if (!(s.encode <= MX_FLT_MAX)) s.encode = 1.0f;
      break;
    case MX_TENSOR_RECIPROCAL_ZERO:
      s.encode = limit * mx_reciprocal_or_zero(amax);
      s.decode = mx_reciprocal_or_zero(s.encode);
      return s;
    case MX_TENSOR_ENCODE_BF16:
      s.encode = mx_round_to_bf16(limit / amax);
      if (!(s.encode <= MX_FLT_MAX)) s.encode = 1.0f;
      break;
  }
  s.decode = 1.0f / s.encode;
  return s;
}

// Exponent of a power-of-two scale, clamped to what E8M0 can hold.
MX_FN mx_i32 mx_scale_exponent(mx_u32 amax_bits, MxRecipe r) {
  mx_i32 x;
  if (r.of_ratio) {
    mx_u32 ratio = mx_bits(mx_float(amax_bits) / r.element.max);
    x = ratio <= 0x00400000u ? -127 : (mx_i32)(ratio >> 23) - 127 + ((ratio & 0x7FFFFFu) > r.carry_above);
  } else {
    x = (mx_i32)(amax_bits >> 23) - 127 - r.element.emax + ((amax_bits & 0x7FFFFFu) > r.carry_above);
  }
  x = x < r.min_exponent ? r.min_exponent : x;
  return x > 127 ? 127 : x;
}

// The scale 2^exponent, complete.
MX_FN MxScale mx_power_of_two_scale(mx_i32 exponent, MxRecipe r) {
  MxScale s;
  s.decode = mx_power_of_two(exponent);
  s.stored = r.scale_stored_bits == 8 ? (mx_u32)(exponent + 127) : mx_bits(s.decode);
  s.factor = mx_power_of_two(-(exponent == -127 ? r.byte0_exponent : exponent));
  s.is_nan = 0;
  s.is_lost = 0;
  return s;
}

// What scales elements, given the block scale S as stored; `decode` is what scales back.
MX_FN void mx_element_factor(float S, MxTensorScale t, mx_i32 element_step, float* factor, float* decode) {
  float product = S * t.decode, quotient = S / t.encode, f = product, d = product;
  switch (element_step) {
    case MX_ELEMENT_TIMES_RECIPROCAL: f = 1.0f / product; break;
    case MX_ELEMENT_TIMES_QUOTIENT: f = (1.0f / t.decode) / S; break;
    case MX_ELEMENT_OVER_PRODUCT:
    case MX_ELEMENT_OVER_PRODUCT_BF16: break;
    case MX_ELEMENT_OVER_QUOTIENT: f = d = quotient; break;
    case MX_ELEMENT_TIMES_RECIPROCAL_ZERO:
      f = mx_reciprocal_or_zero(S * mx_reciprocal_or_zero(t.encode));
      d = mx_reciprocal_or_zero(f);
      break;
  }
  if (element_step == MX_ELEMENT_TIMES_RECIPROCAL || element_step == MX_ELEMENT_TIMES_QUOTIENT)
    f = f < MX_FLT_MAX ? f : MX_FLT_MAX;  // an infinite factor would turn zeros into NaN
  *factor = f;
  *decode = d;
}

// What scales back, given a stored scale.
MX_FN float mx_decode_factor(mx_u32 stored, MxTensorScale t, MxRecipe r) {
  if (r.scale_kind == MX_POWER_OF_TWO)
    return r.scale_stored_bits == 8 ? (stored == 255u ? mx_float(0x7FC00000u) : mx_power_of_two((mx_i32)stored - 127))
                                    : mx_float(stored);
  float S = r.scale_kind == MX_BINARY32 ? mx_float(stored) : mx_decode(stored, r.scale), factor, decode;
  mx_element_factor(S, t, r.element_step, &factor, &decode);
  return decode;
}

MX_FN MxScale mx_nan_scale(MxRecipe r) {
  MxScale s;
  s.stored = r.scale_stored_bits == 32 ? 0x7FC00000u : r.scale_kind == MX_POWER_OF_TWO ? 255u : (mx_u32)r.scale.nan_code;
  s.factor = 0.0f;
  s.decode = mx_float(0x7FC00000u);
  s.is_nan = 1;
  s.is_lost = 0;
  return s;
}

// A block's scale from its amax (bits of the largest magnitude, so NaN > infinity > finite). Rules that try several
// candidates are completed by the caller, who has the elements.
MX_FN MxScale mx_choose_scale(mx_u32 amax_bits, MxTensorScale t, MxRecipe r) {
  if (amax_bits > MX_INFINITY_BITS || (amax_bits == MX_INFINITY_BITS && r.infinity_is_nan)) return mx_nan_scale(r);
  if (r.scale_kind == MX_POWER_OF_TWO) return mx_power_of_two_scale(mx_scale_exponent(amax_bits, r), r);

  float A = mx_float(amax_bits < MX_INFINITY_BITS ? amax_bits : MX_INFINITY_BITS - 1u), D = r.element.max, v = 0.0f;
  switch (r.block_step) {
    case MX_BLOCK_A_TIMES_ENCODE_OVER_D: v = A * (t.encode * (1.0f / D)); break;
    case MX_BLOCK_A_OVER_D_TIMES_ENCODE: v = (A / D) * t.encode; break;
    case MX_BLOCK_A_OVER_D_OVER_DECODE: v = (A / D) / t.decode; break;
    case MX_BLOCK_A_OVER_D_TIMES_DECODE: v = A / (D * t.decode); break;
    case MX_BLOCK_ENCODE_TIMES_A_OVER_D: v = t.encode * (A * (1.0f / D)); break;
    case MX_BLOCK_BF16_A_OVER_D_TIMES_ENCODE: v = mx_round_to_bf16(A / D) * t.encode; break;
  }
  if (v == 0.0f) v = r.zero_scale;
  if (v < r.min_scale) v = r.min_scale;

  MxScale s;
  s.is_nan = 0;
  float S;
  if (r.scale_kind == MX_BINARY32) {
    S = r.bf16_scale ? mx_round_to_bf16(v) : v;
    s.stored = mx_bits(S);
    s.is_lost = A > 0.0f && S == 0.0f;
  } else {
    MxRounded code = mx_encode_nearest_even(v, r.scale.mantissa_bits, r.scale.emin, r.scale.max);
    // Half a step above the largest value is where an unbounded format would have rounded up, away from it.
    float limit = r.scale.max + mx_power_of_two(r.scale.emax - r.scale.mantissa_bits - 1);
    s.is_lost = A > 0.0f && (code.code == 0 || v > limit);
    s.stored = code.code == 0 ? (mx_u32)r.zero_code : code.code;
    S = code.code == 0 ? mx_decode(s.stored, r.scale) : code.value;
  }
  mx_element_factor(S, t, r.element_step, &s.factor, &s.decode);
  return s;
}

#endif
