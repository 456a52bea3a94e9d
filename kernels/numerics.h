// Arithmetic shared by all backends, compiled by g++, clang and NVRTC; quantize.cpp and the .cu files only loop, load
// and store. Freestanding: no includes. Every float operation is one IEEE-754 binary32 operation, round to nearest
// even, with subnormals: compile without contraction, reassociation and flush-to-zero.
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
MX_FN float mx_abs(float x) { return fabsf(x); }
MX_FN float mx_min(float a, float b) { return fminf(a, b); }
MX_FN float mx_max(float a, float b) { return fmaxf(a, b); }
// x +- multiple as one FMA of `power` and multiple / power; both are given as bits, `power` is a power of two.
MX_FN float mx_add_steps(float x, mx_u32 power, mx_u32 multiple) {
  return __fmaf_rn(mx_float(power), mx_float(multiple - power + 0x3F800000u), x);
}
MX_FN float mx_subtract_steps(float x, mx_u32 power, mx_u32 multiple) {
  return __fmaf_rn(mx_float(power), -mx_float(multiple - power + 0x3F800000u), x);
}
#else
#define MX_FN static inline __attribute__((always_inline))
MX_FN mx_u32 mx_bits(float x) {
  mx_u32 bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
MX_FN float mx_float(mx_u32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// SIMD registers: the function templates below accept these as well as scalars.
#if defined(__AVX512F__)
#define MX_LANE_BYTES 64
#elif defined(__AVX2__)
#define MX_LANE_BYTES 32
#else
#define MX_LANE_BYTES 16
#endif
typedef float MxLanes __attribute__((vector_size(MX_LANE_BYTES)));
typedef mx_u32 MxLaneBits __attribute__((vector_size(MX_LANE_BYTES)));
typedef mx_i32 MxLaneInts __attribute__((vector_size(MX_LANE_BYTES)));
MX_FN MxLaneBits mx_bits(MxLanes x) { return (MxLaneBits)x; }
MX_FN MxLanes mx_float(MxLaneBits bits) { return (MxLanes)bits; }
MX_FN MxLaneInts mx_whole(MxLanes x) { return __builtin_convertvector(x, MxLaneInts); }
MX_FN MxLanes mx_from_whole(MxLaneInts x) { return __builtin_convertvector(x, MxLanes); }

// |x|, min and max; min and max return b if a is NaN.
template <class F>
MX_FN F mx_abs(F x) {
  return mx_float(mx_bits(x) & 0x7FFFFFFFu);
}
template <class F>
MX_FN F mx_min(F a, F b) {
  return a < b ? a : b;
}
template <class F>
MX_FN F mx_max(F a, F b) {
  return a > b ? a : b;
}
template <class F, class U>
MX_FN F mx_add_steps(F x, U, U multiple) {
  return x + mx_float(multiple);
}
template <class F, class U>
MX_FN F mx_subtract_steps(F x, U, U multiple) {
  return x - mx_float(multiple);
}
#endif
MX_FN mx_i32 mx_whole(float x) { return (mx_i32)x; }
MX_FN float mx_from_whole(mx_i32 x) { return (float)x; }

// Unrolls the short loop that follows.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__clang__)
#define MX_UNROLL _Pragma("unroll")
#else
#define MX_UNROLL _Pragma("GCC unroll 16")
#endif

#define MX_INFINITY_BITS 0x7F800000u
#define MX_FLT_MAX 3.4028234663852886e38f
#define MX_FLT_MIN 1.1754943508222875e-38f

// ---------------------------------------------------------------------------------------------------------- parameters

// A scalar format (mxcli/numerics/floats.py). Codes are at most 8 bits; FP32 scales are never encoded.
struct MxFloat {
  mx_i32 bits;  // code width, sign included
  mx_i32 mantissa_bits;
  mx_i32 emin;      // exponent of the smallest normal
  mx_i32 emax;      // exponent of the largest finite value
  mx_i32 nan_code;  // 0 where the format has no NaN
  mx_i32 twos_complement;
  float max;  // largest finite value
};

// An element rounding (mxcli/numerics/scale_rules.py): fractions above `above` round up; a fraction of exactly one half
// rounds up if the integer part shares a bit with `half_if` (1: odd, 0: never) or if `half_always`. With `is_random`, a
// fraction rounds up if it exceeds a uniform number drawn for its element (mx_uniform); the other fields apply where
// nothing is drawn.
struct MxRounding {
  float above;
  mx_i32 half_if;
  mx_i32 half_always;
  mx_i32 is_random;
};

// Philox key: random numbers depend on it and on an element's index in its tensor.
struct MxKey {
  mx_u32 seed, stream;
};

// A random Hadamard transform of groups of `size` neighbors (a power of two up to 128; 0: none): y = x diag(d) H /
// sqrt(size) with Sylvester's matrix H; d_i is -1 if bit i % 32 of signs[i / 32] is set, else 1.
struct MxRotation {
  mx_i32 size;
  mx_u32 signs[4];
  mx_i32 bf16;  // y is rounded to bfloat16
};
#define MX_LARGEST_ROTATION 128

enum MxScaleKind { MX_POWER_OF_TWO = 0, MX_MINIFLOAT = 1, MX_BINARY32 = 2 };
// Tensor scales (encode, decode) from the tensor's amax T; L = D * scale_reach.
enum MxTensorStep {
  MX_TENSOR_NONE = 0,                // 1, 1
  MX_TENSOR_ENCODE = 1,              // encode = min(L / T, FLT_MAX), 1 if 0; decode = 1 / encode
  MX_TENSOR_DECODE = 2,              // decode = T / L, 1 if 0 (producers compute 0 / 0 there); encode = 1 / decode
  MX_TENSOR_RECIPROCAL_CLAMPED = 3,  // encode = (1 / max(T, FLT_MIN)) * L, 1 if not finite
  MX_TENSOR_RECIPROCAL_ZERO = 4,     // encode = L * (1 / T), 0 if T = 0
  MX_TENSOR_ENCODE_BF16 = 5,         // encode = bfloat16(bfloat16(1 / T) * L), 1 if not finite
  MX_TENSOR_DECODE_OF_BLOCK = 6,     // decode = max(max(T / D, e) / scale max, e), e = zero_scale; encode = 1 / decode
};
// Block scale from the block's amax A (D = element_reach), before the cast to the scale format.
enum MxBlockStep {
  MX_BLOCK_A_TIMES_ENCODE_OVER_D = 0,       // A * (encode * (1 / D))
  MX_BLOCK_A_OVER_D_TIMES_ENCODE = 1,       // (A / D) * encode
  MX_BLOCK_A_OVER_D_OVER_DECODE = 2,        // (A / D) / decode
  MX_BLOCK_A_OVER_D_TIMES_DECODE = 3,       // A / (D * decode)
  MX_BLOCK_ENCODE_TIMES_A_OVER_D = 4,       // encode * (A * (1 / D))
  MX_BLOCK_BF16_A_OVER_D_TIMES_ENCODE = 5,  // bfloat16(A / D) * encode
  MX_BLOCK_RECIPROCAL_OF_D_OVER_A = 6,      // 1 / min(D / A, FLT_MAX), 0 if A = 0
  MX_BLOCK_LEAST_A_OVER_D_OVER_DECODE = 7,  // max(A / D, e) / decode, e = zero_scale
  MX_BLOCK_RECIPROCAL_OF_D_BY_A = 8,        // as 6, D / A being D * (1 / A)
};
// Scaled element (the argument of the rounding) and dequantization factor; S = the block scale as stored.
enum MxElementStep {
  MX_ELEMENT_TIMES_RECIPROCAL = 0,       // x * min(1 / (S * decode), FLT_MAX);  factor: S * decode
  MX_ELEMENT_TIMES_QUOTIENT = 1,         // x * ((1 / decode) / S);              factor: S * decode
  MX_ELEMENT_OVER_PRODUCT = 2,           // x / (S * decode);                    factor: S * decode
  MX_ELEMENT_OVER_QUOTIENT = 3,          // x / (S / encode);                    factor: S / encode
  MX_ELEMENT_TIMES_RECIPROCAL_ZERO = 4,  // x * o, o = 1 / (S * (1 / encode)), 1/0 = 0;  factor: 1 / o
  MX_ELEMENT_OVER_PRODUCT_BF16 = 5,      // bfloat16(x / (S * decode));          factor: S * decode
  MX_ELEMENT_TIMES_RECIPROCAL_ONCE = 6,  // as 0, but x * 0 if S = 0;            factor: S * decode
  MX_ELEMENT_TIMES_D_OVER_A = 7,         // x * min(D / A, FLT_MAX), x if A = 0; factor: S * decode
  MX_ELEMENT_OVER_A_OVER_D = 8,          // x / max(A / D, e), e = zero_scale;   factor: S * decode
};
// What decides between scales that a rule tries: the sum of squared errors, of their magnitudes, or the largest one.
enum MxErrorNorm { MX_SQUARES = 0, MX_MAGNITUDES = 1, MX_LARGEST = 2 };

// Kernel parameters of a quantization scheme; mxcli.numerics resolves names to them.
struct MxScheme {
  MxFloat element;
  MxFloat scale;  // format of MX_MINIFLOAT scales
  MxRounding rounding;
  mx_i32 scale_kind;
  mx_i32 scale_stored_bits;  // 8: a code; 32: a binary32 value
  mx_i32 block_rows;         // 0: all
  mx_i32 block_columns;      // 0: all
  mx_i32 stored_bits;        // packed width of an element code: 4, 6 or 8
  // power-of-two scales
  mx_i32 of_ratio;                // exponent of fl(amax / element max) instead of exponent(amax) - emax
  mx_u32 carry_above;             // the exponent is one more if the 23-bit fraction exceeds this
  mx_i32 candidates[4];           // exponents to try, relative to floor's; the lowest squared error wins
  mx_i32 candidate_count;         // of exponents or of multiples; 0: nothing is tried
  mx_i32 min_exponent;            // lower clamp: -127 in the OCP MX specification
  mx_i32 byte0_exponent;          // elements are divided by 2^byte0_exponent if the stored byte is 0
  mx_i32 flush_subnormal_blocks;  // blocks with a binary32-subnormal amax become zero
  // scales with a mantissa
  mx_i32 tensor_step;
  mx_i32 block_step;
  mx_i32 element_step;
  float element_reach;  // the element value that a block's amax is scaled to
  float scale_reach;    // the scale of the block that has the tensor's amax
  float multiples[4];   // scales to try, relative to the block step's; the lowest error wins, the first of equals
  mx_i32 tries_codes;   // tries every scale code instead; the smallest of equals wins
  mx_i32 error_norm;
  float min_scale;    // lower clamp, 0: none
  float zero_scale;   // replaces a scale of exactly 0, 0: none
  mx_i32 zero_code;   // replaces a scale code of 0, 0: none
  mx_i32 bf16_scale;  // round binary32 scales to bfloat16
  // signs of zero
  mx_i32 clear_zero_input;  // treat -0.0 in the input as +0.0
  mx_i32 clear_zero_code;   // zero codes have no sign
  mx_i32 set_zero_input;    // treat +0.0 in the input as -0.0
  mx_i32 infinity_is_nan;   // an infinity makes its block NaN, like a NaN
  mx_i32 flush_subnormals;  // treat binary32 subnormals in the input as zeros
};

struct MxTensorScale {
  float encode, decode;
};

// A block's scale, chosen from its amax; F is a float or a SIMD register of floats, U the bits of F.
template <class F, class U>
struct MxScale {
  U stored;   // scale code, or binary32 bits
  F factor;   // scaled element = x * factor, or x / factor if the element step divides
  F decode;   // dequantized value = element value * decode
  U is_nan;   // 1: the block becomes NaN
  U is_lost;  // 1: the scale itself underflowed to zero or saturated at the scale format's maximum
};

template <class F, class U>
struct MxRounded {
  U code;   // code without its sign
  F value;  // value of the code, >= 0
};

// ------------------------------------------------------------------------------------------------------------- helpers

// Broadcast `value` to the type of `like`.
template <class F>
MX_FN F mx_broadcast(F like, float value) {
  return mx_float((mx_bits(like) & 0u) + mx_bits(value));
}

MX_FN float mx_power_of_two(mx_i32 exponent) {  // -149 <= exponent <= 127
  return exponent >= -126 ? mx_float((mx_u32)(exponent + 127) << 23) : mx_float(1u << (exponent + 149));
}

// 2^exponent for -127 <= exponent <= 127: a power-of-two scale or its inverse. U holds the exponent's two's complement.
template <class U>
MX_FN auto mx_scale_value(U exponent) {
  U biased = exponent + 127u, lowest = (exponent & 0u) + 0x00400000u;
  return mx_float(biased == 0u ? lowest : biased << 23);
}

template <class F>
MX_FN F mx_round_to_bf16(F x) {  // NaN stays NaN
  auto bits = mx_bits(x);
  F rounded = mx_float((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
  return (bits & 0x7FFFFFFFu) > MX_INFINITY_BITS ? x : rounded;
}

template <class F>
MX_FN F mx_reciprocal_or_zero(F x) {
  return x == 0.0f ? mx_broadcast(x, 0.0f) : 1.0f / x;
}

// ------------------------------------------------------------------------------------------------------ random numbers

struct MxWords {
  mx_u32 of[4];
};

// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011, section 3.3).
MX_FN MxWords mx_philox(MxWords counter, MxKey key) {
  mx_u32 a = counter.of[0], b = counter.of[1], c = counter.of[2], d = counter.of[3];
  MX_UNROLL
  for (int round = 0; round < 10; ++round) {
    const mx_u64 first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
    a = (mx_u32)(second >> 32) ^ b ^ key.seed;
    c = (mx_u32)(first >> 32) ^ d ^ key.stream;
    b = (mx_u32)second;
    d = (mx_u32)first;
    key.seed += 0x9E3779B9u;
    key.stream += 0xBB67AE85u;
  }
  return MxWords{{a, b, c, d}};
}

// Random words of elements 4 * quarter_index to 4 * quarter_index + 3.
MX_FN MxWords mx_random_words(mx_u64 quarter_index, MxKey key) {
  return mx_philox(MxWords{{(mx_u32)quarter_index, (mx_u32)(quarter_index >> 32), 0u, 0u}}, key);
}

// Map a word to a multiple of 2^-24 in [0, 1): a fraction f exceeds it in ceil(2^24 f) of 2^24 cases.
MX_FN float mx_uniform(mx_u32 word) { return (float)(mx_i32)(word >> 8) * mx_float(0x33800000u); }

// ----------------------------------------------------------------------------------------------------------- rotations

// Multiply a group by Sylvester's matrix in place. Strides grow from 1, so every device adds in the same order.
MX_FN void mx_butterflies(float* x, mx_i32 size) {
  MX_UNROLL
  for (mx_i32 half = 1; half < size; half *= 2) {
    MX_UNROLL
    for (mx_i32 i = 0; i < size; ++i) {
      if (i & half) continue;
      const float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
}

// sqrt(size), rounded to nearest.
MX_FN float mx_rotation_factor(mx_i32 size) {
  float factor = 1.0f;
  for (; size >= 4; size /= 4) factor *= 2.0f;
  return size == 2 ? factor * 1.41421356237309505f : factor;
}

MX_FN float mx_flip_sign(float x, mx_i32 i, MxRotation r) {
  return mx_float(mx_bits(x) ^ (r.signs[i / 32] >> (i % 32) & 1u) << 31);
}

// Rotate a group in place. The butterflies add x / size so that no intermediate sum overflows; this division is exact
// except for the smallest subnormals.
MX_FN void mx_rotate(float* x, MxRotation r) {
  const float share = 1.0f / (float)r.size, factor = mx_rotation_factor(r.size);
  MX_UNROLL
  for (mx_i32 i = 0; i < r.size; ++i) x[i] = mx_flip_sign(x[i] * share, i, r);
  mx_butterflies(x, r.size);
  MX_UNROLL
  for (mx_i32 i = 0; i < r.size; ++i) {
    x[i] *= factor;
    if (r.bf16) x[i] = mx_round_to_bf16(x[i]);
  }
}

// Inverse of mx_rotate: H is symmetric and H H = size * I.
MX_FN void mx_rotate_back(float* x, MxRotation r) {
  const float share = 1.0f / (float)r.size, factor = mx_rotation_factor(r.size);
  MX_UNROLL
  for (mx_i32 i = 0; i < r.size; ++i) x[i] *= share;
  mx_butterflies(x, r.size);
  MX_UNROLL
  for (mx_i32 i = 0; i < r.size; ++i) x[i] = mx_flip_sign(x[i] * factor, i, r);
}

// -------------------------------------------------------------------------------------------------------------- encode

// min(magnitude, limit); `limit` for NaN.
template <class F>
MX_FN F mx_at_most(F magnitude, float limit) {
  return mx_min(magnitude, mx_broadcast(magnitude, limit));
}

// The spacing of values (ulp) at a magnitude is 2^(e - mantissa_bits), e = max(exponent(magnitude), emin): subnormals
// have the spacing of emin. Dividing by it is exact, which leaves rounding to an integer.
template <class F>
MX_FN auto mx_grid_exponent(F magnitude, mx_i32 emin) {  // biased by 127
  auto e = mx_bits(magnitude) >> 23;
  auto lowest = (e & 0u) + (mx_u32)(emin + 127);
  return e < lowest ? lowest : e;
}

// Encode to nearest, ties to even; values above the maximum (and NaN) saturate.
template <class F>
MX_FN auto mx_encode_nearest_even(F magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max) {
  F a = mx_at_most(magnitude, max);
  auto e = mx_bits(a) & MX_INFINITY_BITS;  // bits of the binade's power of two
  auto lowest = (e & 0u) + ((mx_u32)(emin + 127) << 23);
  e = e < lowest ? lowest : e;
  // 1.5 * 2^23 ulps of this binade: adding them rounds to a whole number of ulps, ties to even.
  auto many_steps = e + (((mx_u32)(23 - mantissa_bits) << 23) + 0x00400000u);
  F shifted = mx_add_steps(a, e, many_steps);
  MxRounded<F, decltype(e)> r;
  r.code = (e >> (23 - mantissa_bits)) - ((mx_u32)(emin + 127) << mantissa_bits) + mx_bits(shifted) - many_steps;
  r.value = mx_subtract_steps(shifted, e, many_steps);
  return r;
}

// A magnitude in ulps of its binade, split exactly into integer and fraction.
template <class F>
struct MxSteps {
  decltype(mx_bits(F{})) exponent;  // biased by 127
  decltype(mx_whole(F{})) whole;
  F fraction;
};

template <class F>
MX_FN MxSteps<F> mx_steps(F magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max) {
  F a = mx_at_most(magnitude, max);
  MxSteps<F> s;
  s.exponent = mx_grid_exponent(a, emin);
  F steps = a * mx_float((254u + (mx_u32)mantissa_bits - s.exponent) << 23);
  s.whole = mx_whole(steps);
  s.fraction = steps - mx_from_whole(s.whole);
  return s;
}

// Build the code of `whole` ulps; a carry increments the exponent.
template <class F, class I>
MX_FN auto mx_make_code(MxSteps<F> s, I whole, mx_i32 mantissa_bits, mx_i32 emin) {
  MxRounded<F, decltype(s.exponent)> r;
  r.code = ((s.exponent - (mx_u32)(emin + 127)) << mantissa_bits) + (decltype(s.exponent))whole;
  r.value = mx_from_whole(whole) * mx_float((s.exponent - (mx_u32)mantissa_bits) << 23);
  return r;
}

// Like mx_encode_nearest_even, with any rounding that is not random.
template <class F>
MX_FN auto mx_encode(F magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max, MxRounding rounding) {
  auto s = mx_steps(magnitude, mantissa_bits, emin, max);
  auto tie_up = ((s.whole & rounding.half_if) | rounding.half_always) != 0;
  auto up = (s.fraction > rounding.above) | ((s.fraction == 0.5f) & tie_up);
  return mx_make_code(s, up ? s.whole + 1 : s.whole, mantissa_bits, emin);
}

// Like mx_encode, with stochastic rounding: round up if the fraction exceeds the element's random number `above`.
template <class F>
MX_FN auto mx_encode_stochastic(F magnitude, mx_i32 mantissa_bits, mx_i32 emin, float max, F above) {
  auto s = mx_steps(magnitude, mantissa_bits, emin, max);
  return mx_make_code(s, s.fraction > above ? s.whole + 1 : s.whole, mantissa_bits, emin);
}

// Round to binary16, nearest even; overflows become infinity, NaN stays NaN.
MX_FN mx_u16 mx_round_to_f16(float x) {
  mx_u32 bits = mx_bits(x), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  if (magnitude > MX_INFINITY_BITS) return (mx_u16)(sign | 0x7E00u);
  if (mx_float(magnitude) >= 65520.0f) return (mx_u16)(sign | 0x7C00u);
  return (mx_u16)(sign | mx_encode_nearest_even(mx_float(magnitude), 10, -14, 65504.0f).code);
}

// Widen binary16, exactly.
MX_FN float mx_from_f16(mx_u16 half) {
  // Shift exponent and fraction into place; multiplying by 2^112 corrects the bias and normalizes subnormals exactly.
  mx_u32 bits = mx_bits(mx_float((mx_u32)(half & 0x7FFFu) << 13) * mx_float(0x77800000u));
  bits = (half & 0x7C00u) == 0x7C00u ? bits | MX_INFINITY_BITS : bits;
  return mx_float(bits | (mx_u32)(half & 0x8000u) << 16);
}

// Decode a code without its sign.
MX_FN float mx_decode_magnitude(mx_u32 code, mx_i32 mantissa_bits, mx_i32 emin) {
  mx_u32 field = code >> mantissa_bits, fraction = code & ((1u << mantissa_bits) - 1u);
  mx_u32 steps = field == 0 ? fraction : fraction | (1u << mantissa_bits);
  mx_i32 e = emin + (field == 0 ? 0 : (mx_i32)field - 1);
  return (float)steps * mx_power_of_two(e - mantissa_bits);
}

// Decode a code; codes above the largest finite one are NaN or infinity, as their format says.
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

// Add a sign (0 or 1) to a code.
template <class U>
MX_FN U mx_signed_code(U code, U negative, mx_i32 bits, mx_i32 twos_complement) {
  return twos_complement ? ((code ^ (0u - negative)) + negative) & ((1u << bits) - 1u) : code | negative << (bits - 1);
}

// Replace the sign of zero inputs as the scheme says.
template <class F>
MX_FN F mx_zero_input(F x, mx_i32 clear_zero_input, mx_i32 set_zero_input) {
  if (clear_zero_input) return x + 0.0f;
  F negative_zero = mx_broadcast(x, -0.0f);
  return set_zero_input ? (x == 0.0f ? negative_zero : x) : x;
}

// -------------------------------------------------------------------------------------------------------------- scales

// Tensor scales from the largest finite magnitude.
MX_FN MxTensorScale mx_tensor_scale(float amax, MxScheme r) {
  float limit = r.element_reach * r.scale_reach;
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
      s.encode = mx_round_to_bf16(mx_round_to_bf16(1.0f / amax) * limit);
      if (!(s.encode <= MX_FLT_MAX)) s.encode = 1.0f;
      break;
    case MX_TENSOR_DECODE_OF_BLOCK:
      s.decode = amax / r.element_reach;
      s.decode = (s.decode < r.zero_scale ? r.zero_scale : s.decode) / r.scale_reach;
      if (s.decode < r.zero_scale) s.decode = r.zero_scale;
      s.encode = 1.0f / s.decode;
      return s;
  }
  s.decode = 1.0f / s.encode;
  return s;
}

// Exponent of a power-of-two scale (two's complement), clamped to E8M0's range.
template <class U>
MX_FN U mx_scale_exponent(U amax_bits, MxScheme r) {
  U x, zero = amax_bits & 0u;
  if (r.of_ratio) {
    U ratio = mx_bits(mx_float(amax_bits) / r.element.max);
    U carry = (ratio & 0x7FFFFFu) > r.carry_above ? zero + 1u : zero;
    U rounded = (ratio >> 23) + carry;
    x = ratio <= 0x00400000u ? zero : rounded;
  } else {
    U carry = (amax_bits & 0x7FFFFFu) > r.carry_above ? zero + 1u : zero;
    U shifted = (amax_bits >> 23) + carry, least = zero + (mx_u32)r.element.emax;
    x = shifted > least ? shifted - least : zero;
  }
  U lowest = zero + (mx_u32)(r.min_exponent + 127), highest = zero + 254u;  // x is biased here
  x = x < lowest ? lowest : x;
  return (x > highest ? highest : x) - 127u;
}

// Unclamped exponent of scale rule floor: the base of the candidate exponents.
MX_FN mx_i32 mx_floor_exponent(mx_u32 amax_bits, MxScheme r) {
  return (mx_i32)(amax_bits >> 23) - 127 - r.element.emax;
}

// The MxScale of 2^exponent.
template <class U>
MX_FN auto mx_power_of_two_scale(U exponent, MxScheme r) {
  auto value = mx_scale_value(exponent);
  U zero = exponent & 0u, byte0 = zero + (mx_u32)r.byte0_exponent;
  MxScale<decltype(value), U> s;
  s.decode = value;
  s.stored = r.scale_stored_bits == 8 ? exponent + 127u : mx_bits(value);
  s.factor = mx_scale_value(0u - (exponent + 127u == 0u ? byte0 : exponent));
  s.is_nan = zero;
  s.is_lost = zero;
  return s;
}

// Scaling and dequantization factors from the block scale S as stored.
template <class F>
MX_FN void mx_element_factor(F S, MxTensorScale t, mx_i32 element_step, F* factor, F* decode) {
  F f = S * t.decode;
  *decode = f;
  switch (element_step) {
    case MX_ELEMENT_TIMES_RECIPROCAL: f = mx_at_most(1.0f / f, MX_FLT_MAX); break;
    // Capped as above: an infinite factor turns zeros into NaN.
    case MX_ELEMENT_TIMES_QUOTIENT: f = mx_at_most((1.0f / t.decode) / S, MX_FLT_MAX); break;
    case MX_ELEMENT_OVER_PRODUCT:
    case MX_ELEMENT_OVER_PRODUCT_BF16: break;
    case MX_ELEMENT_TIMES_RECIPROCAL_ONCE: f = mx_at_most(mx_reciprocal_or_zero(f), MX_FLT_MAX); break;
    case MX_ELEMENT_OVER_QUOTIENT: *decode = f = S / t.encode; break;
    case MX_ELEMENT_TIMES_RECIPROCAL_ZERO:
      f = mx_reciprocal_or_zero(S * mx_reciprocal_or_zero(t.encode));
      *decode = mx_reciprocal_or_zero(f);
      break;
  }
  *factor = f;
}

// Dequantization factor of a stored scale.
MX_FN float mx_decode_factor(mx_u32 stored, MxTensorScale t, MxScheme r) {
  if (r.scale_kind == MX_POWER_OF_TWO)
    return r.scale_stored_bits == 8 ? (stored == 255u ? mx_float(0x7FC00000u) : mx_power_of_two((mx_i32)stored - 127))
                                    : mx_float(stored);
  float S = r.scale_kind == MX_BINARY32 ? mx_float(stored) : mx_decode(stored, r.scale), factor, decode;
  mx_element_factor(S, t, r.element_step, &factor, &decode);
  return decode;
}

// A block's amax over the element value that it is scaled to, at least zero_scale; and the inverse, at most FLT_MAX.
template <class F>
MX_FN F mx_amax_over_reach(F A, MxScheme r) {
  F v = A / r.element_reach, least = mx_broadcast(A, r.zero_scale);
  return v < least ? least : v;
}
template <class F>
MX_FN F mx_reach_over_amax(F A, MxScheme r) {
  F quotient = r.block_step == MX_BLOCK_RECIPROCAL_OF_D_BY_A ? r.element_reach * (1.0f / A) : r.element_reach / A;
  return mx_at_most(quotient, MX_FLT_MAX);
}

// Scale of a finite block, before the cast to a scale format with a mantissa.
template <class F>
MX_FN F mx_wanted_scale(F A, MxTensorScale t, MxScheme r) {
  const float D = r.element_reach;
  F v = A;
  switch (r.block_step) {
    case MX_BLOCK_A_TIMES_ENCODE_OVER_D: v = A * (t.encode * (1.0f / D)); break;
    case MX_BLOCK_A_OVER_D_TIMES_ENCODE: v = (A / D) * t.encode; break;
    case MX_BLOCK_A_OVER_D_OVER_DECODE: v = (A / D) / t.decode; break;
    case MX_BLOCK_A_OVER_D_TIMES_DECODE: v = A / (D * t.decode); break;
    case MX_BLOCK_ENCODE_TIMES_A_OVER_D: v = t.encode * (A * (1.0f / D)); break;
    case MX_BLOCK_BF16_A_OVER_D_TIMES_ENCODE: v = mx_round_to_bf16(A / D) * t.encode; break;
    case MX_BLOCK_RECIPROCAL_OF_D_OVER_A:
    case MX_BLOCK_RECIPROCAL_OF_D_BY_A: v = A == 0.0f ? A : 1.0f / mx_reach_over_amax(A, r); break;
    case MX_BLOCK_LEAST_A_OVER_D_OVER_DECODE: v = mx_amax_over_reach(A, r) / t.decode; break;
  }
  return v;
}

// Above max + ulp / 2 a format with larger exponents rounds to a value above max.
MX_FN float mx_largest_cast(MxFloat f) { return f.max + mx_power_of_two(f.emax - f.mantissa_bits - 1); }

// Cast a scale `v` to the format of scales with a mantissa; A is the block's amax.
template <class F>
MX_FN auto mx_cast_scale(F v, F A, MxTensorScale t, MxScheme r) {
  using U = decltype(mx_bits(v));
  if (r.bf16_scale) v = mx_round_to_bf16(v);
  F none = mx_broadcast(v, r.zero_scale), least = mx_broadcast(v, r.min_scale);
  const auto underflows = v == 0.0f;
  v = v == 0.0f ? none : v;
  v = v < least ? least : v;

  MxScale<F, U> s;
  U zero = mx_bits(A) & 0u, one = zero + 1u;
  s.is_nan = zero;
  F S = v;
  if (r.scale_kind == MX_BINARY32) {
    s.stored = mx_bits(S);
    s.is_lost = underflows ? one : zero;
  } else {
    auto code = mx_encode_nearest_even(v, r.scale.mantissa_bits, r.scale.emin, r.scale.max);
    float limit = mx_largest_cast(r.scale);
    U substitute = zero + (mx_u32)r.zero_code;
    s.stored = code.code == 0u ? substitute : code.code;
    s.is_lost = s.stored == 0u ? one : zero;
    s.is_lost = v > limit ? one : s.is_lost;
    F substituted = mx_broadcast(v, mx_decode((mx_u32)r.zero_code, r.scale));
    S = code.code == 0u ? substituted : code.value;
  }
  s.is_lost = A == 0.0f ? zero : s.is_lost;
  mx_element_factor(S, t, r.element_step, &s.factor, &s.decode);
  if (r.element_step == MX_ELEMENT_TIMES_D_OVER_A) {
    F unit = mx_broadcast(v, 1.0f);
    s.factor = A == 0.0f ? unit : mx_reach_over_amax(A, r);
  }
  if (r.element_step == MX_ELEMENT_OVER_A_OVER_D) s.factor = mx_amax_over_reach(A, r);
  return s;
}

// Scale of a finite block in a scale format with a mantissa.
template <class U>
MX_FN auto mx_mantissa_scale(U amax_bits, MxTensorScale t, MxScheme r) {
  auto A = mx_float(amax_bits);
  return mx_cast_scale(mx_wanted_scale(A, t, r), A, t, r);
}

// Choose a block's scale from its amax (bits of the largest magnitude, so NaN > infinity > finite). For rules that try
// candidates, the caller, which has the elements, makes the final choice.
template <class U>
MX_FN auto mx_choose_scale(U amax_bits, MxTensorScale t, MxScheme r) {
  U zero = amax_bits & 0u, one = zero + 1u, infinity = zero + MX_INFINITY_BITS, largest = infinity - 1u;
  U seen = amax_bits;
  if (r.flush_subnormal_blocks) seen = amax_bits < 0x00800000u ? zero : amax_bits;
  U finite = seen < infinity ? seen : largest;
  auto s = r.scale_kind == MX_POWER_OF_TWO ? mx_power_of_two_scale(mx_scale_exponent(seen, r), r)
                                           : mx_mantissa_scale(finite, t, r);
  U nan_stored = zero + (r.scale_stored_bits == 32         ? 0x7FC00000u
                         : r.scale_kind == MX_POWER_OF_TWO ? 255u
                                                           : (mx_u32)r.scale.nan_code);
  auto no_factor = mx_broadcast(s.factor, 0.0f);
  if (r.flush_subnormal_blocks) s.factor = seen == 0u ? no_factor : s.factor;  // flushes every element to zero
  s.is_nan = amax_bits > infinity ? one : zero;
  if (r.infinity_is_nan) s.is_nan = amax_bits == infinity ? one : s.is_nan;
  s.stored = s.is_nan != 0u ? nan_stored : s.stored;
  auto nan = mx_broadcast(s.decode, mx_float(0x7FC00000u));
  s.decode = s.is_nan != 0u ? nan : s.decode;
  return s;
}

// ------------------------------------------------------------------------------------------------------------ elements

// The parameters that encoding an element needs.
struct MxEncoder {
  MxFloat element;
  MxRounding rounding;
  mx_i32 divides;        // scales by x / factor, not x * factor
  mx_i32 quotient_bf16;  // rounds the scaled element to bfloat16
  mx_i32 guards_zero;    // keeps 0: the factor may be 0 or infinite, and 0 / 0 and 0 * infinity are NaN
  mx_i32 plain;          // rounds to nearest even and keeps signs of zero
  mx_i32 clear_zero_code;
  mx_i32 flushes;  // treats binary32 subnormals as zeros
};

MX_FN MxEncoder mx_encoder(MxScheme r) {
  const bool mantissa = r.scale_kind != MX_POWER_OF_TWO;
  MxEncoder e;
  e.element = r.element;
  e.rounding = r.rounding;
  e.clear_zero_code = r.clear_zero_code;
  e.flushes = r.flush_subnormals;
  e.quotient_bf16 = mantissa && r.element_step == MX_ELEMENT_OVER_PRODUCT_BF16;
  e.divides =
      mantissa && (r.element_step == MX_ELEMENT_OVER_PRODUCT || r.element_step == MX_ELEMENT_OVER_QUOTIENT ||
                   r.element_step == MX_ELEMENT_OVER_PRODUCT_BF16 || r.element_step == MX_ELEMENT_OVER_A_OVER_D);
  e.guards_zero = e.divides || (mantissa && r.element_step == MX_ELEMENT_TIMES_RECIPROCAL_ZERO);
  e.plain = r.rounding.above == 0.5f && r.rounding.half_if == 1 && r.rounding.half_always == 0 &&
            !r.rounding.is_random && !e.quotient_bf16 && !r.clear_zero_code && !r.flush_subnormals;
  return e;
}

// Scale x: the argument of the rounding.
template <class F>
MX_FN F mx_argument(F x, F factor, MxEncoder e) {
  F scaled = x, none = mx_broadcast(x, 0.0f);
  if (!e.plain && e.flushes) x = mx_abs(x) < MX_FLT_MIN ? none : x;
  if (e.divides) scaled = x / factor;
  else scaled = x * factor;
  if (e.guards_zero) scaled = x == 0.0f ? x : scaled;
  return !e.plain && e.quotient_bf16 ? mx_round_to_bf16(scaled) : scaled;
}

// Give a code the sign of x.
template <class F, class U>
MX_FN MxRounded<F, U> mx_with_sign(MxRounded<F, U> r, F x, MxEncoder e) {
  U negative = mx_bits(x) >> 31, none = negative & 0u;
  if (!e.plain && e.clear_zero_code) negative = r.code == 0u ? none : negative;
  r.code = mx_signed_code(r.code, negative, e.element.bits, e.element.twos_complement);
  return r;
}

// Encode x: the signed code, and the magnitude of its value before the dequantization factor.
template <class F>
MX_FN auto mx_encode_element(F x, F factor, MxEncoder e) {
  const MxFloat f = e.element;
  F magnitude = mx_abs(mx_argument(x, factor, e));
  auto r = e.plain ? mx_encode_nearest_even(magnitude, f.mantissa_bits, f.emin, f.max)
                   : mx_encode(magnitude, f.mantissa_bits, f.emin, f.max, e.rounding);
  return mx_with_sign(r, x, e);
}

// The same with stochastic rounding; `drawn` is the element's random number.
template <class F>
MX_FN auto mx_encode_element(F x, F factor, MxEncoder e, F drawn) {
  const MxFloat f = e.element;
  F magnitude = mx_abs(mx_argument(x, factor, e));
  return mx_with_sign(mx_encode_stochastic(magnitude, f.mantissa_bits, f.emin, f.max, drawn), x, e);
}

// The element value of the code of x, before the dequantization factor. Codes in two's complement have one zero, and so
// have those that are cleared of its sign.
template <class F, class U>
MX_FN F mx_signed_value(MxRounded<F, U> r, F x, MxEncoder e) {
  F value = mx_float(mx_bits(r.value) | (mx_bits(x) & 0x80000000u));
  // -0 + 0 is 0; adding -0 changes no value.
  return value + (e.element.twos_complement || (!e.plain && e.clear_zero_code) ? 0.0f : -0.0f);
}

// Return whether x exceeds the element format's maximum.
template <class F>
MX_FN auto mx_saturates(F x, F factor, MxEncoder e) {
  return mx_abs(mx_argument(x, factor, e)) > e.element.max;
}

// Strip a code's sign.
MX_FN mx_u32 mx_magnitude_code(mx_u32 code, MxFloat f) {
  const mx_u32 sign_bit = 1u << (f.bits - 1);
  if (f.twos_complement) return code & sign_bit ? (sign_bit << 1) - code : code;
  return code & (sign_bit - 1u);
}

// Mask of the bits that are all 0 in a zero code.
MX_FN mx_u32 mx_magnitude_mask(MxFloat f) { return f.twos_complement ? ~0u : (1u << (f.bits - 1)) - 1u; }

// ------------------------------------------------------------------------------------- candidate scales with a mantissa

// Scales with a mantissa that a rule tries for a finite block that is not zero, counted from 0.
struct MxSearch {
  float amax, wanted;  // the block's amax; the scale before its cast
  mx_i32 count;
};

MX_FN MxSearch mx_begin_search(mx_u32 amax_bits, MxTensorScale t, MxScheme r) {
  MxSearch q;
  q.amax = mx_float(amax_bits);
  q.wanted = mx_wanted_scale(q.amax, t, r);
  q.count = r.candidate_count;
  if (r.tries_codes) {
    // A scale of twice the wanted one or more has none of its values below amax to itself: half that scale has them too,
    // except where the half is not a code (of the lowest codes) or its inverse leaves the range of binary32.
    const mx_i32 m = r.scale.mantissa_bits, halved = (2 << m) - 1;
    const mx_i32 last = (mx_i32)mx_encode_nearest_even(r.scale.max, m, r.scale.emin, r.scale.max).code;
    const mx_i32 twice = (mx_i32)mx_encode_nearest_even(2.0f * q.wanted, m, r.scale.emin, r.scale.max).code + 1;
    q.count = twice > last || q.wanted * t.decode < mx_power_of_two(-100) ? last : twice < halved ? halved : twice;
  }
  return q;
}

// Scale k of a search. Codes are tried from the largest to 1.
MX_FN auto mx_tried_scale(const MxSearch& q, mx_i32 k, MxTensorScale t, MxScheme r) {
  if (!r.tries_codes) return mx_cast_scale(q.wanted * r.multiples[k], q.amax, t, r);
  auto s = mx_cast_scale(mx_decode((mx_u32)(q.count - k), r.scale), q.amax, t, r);
  s.is_lost = k == 0 && q.wanted > mx_largest_cast(r.scale);
  return s;
}

// Return whether scale k and all later ones clip the amax by more than the error of the best so far.
MX_FN bool mx_ends_search(const MxSearch& q, const MxScale<float, mx_u32>& s, double best, MxScheme r) {
  const double short_by = (double)q.amax - (double)(r.element.max * s.decode);
  return r.tries_codes && short_by > 0.0 && (r.error_norm == MX_SQUARES ? short_by * short_by : short_by) > best;
}

// Errors of a block are added up in 16 parts, by the column in the block modulo 16, and the parts by halves.
#define MX_ERROR_PARTS 16
MX_FN double mx_add_error(double error, float value, float x, mx_i32 norm) {
  const double difference = (double)value - (double)x, distance = difference < 0.0 ? -difference : difference;
  if (norm == MX_SQUARES) return error + difference * difference;
  if (norm == MX_MAGNITUDES) return error + distance;
  return distance > error ? distance : error;
}
MX_FN double mx_join_errors(double a, double b, mx_i32 norm) { return norm != MX_LARGEST ? a + b : a > b ? a : b; }
MX_FN double mx_total_error(double* parts, mx_i32 norm) {
  MX_UNROLL
  for (int half = MX_ERROR_PARTS / 2; half > 0; half /= 2) {
    MX_UNROLL
    for (int i = 0; i < half; ++i) parts[i] = mx_join_errors(parts[i], parts[i + half], norm);
  }
  return parts[0];
}

// Return whether a scale tried later, with this error, is taken instead of the best so far.
MX_FN bool mx_is_better(double error, double best, MxScheme r) { return r.tries_codes ? error <= best : error < best; }

// ---------------------------------------------------------------------------------------------------------- statistics

// Bins of the histograms that kernels fill (mxcli/numerics/stats.py): biased exponent of the scale, the last bin for
// NaN; code; signal / noise of a block, the last bin for no noise; largest / smallest nonzero magnitude.
#define MX_SCALE_BINS 257
#define MX_CODE_BINS 256
#define MX_SQNR_BINS 1281
#define MX_RANGE_BINS 512
// Resolution of the ratio histograms: fraction bits per bin, and the exponent of the lowest bin.
#define MX_SQNR_BITS 4
#define MX_SQNR_LOWEST (-16)
#define MX_RANGE_BITS 2
#define MX_RANGE_LOWEST 0

// Normalization of a block's sums: 1 / 2^floor(log2(amax)), from the bits of amax.
MX_FN float mx_unit(mx_u32 amax_bits) {
  mx_i32 exponent = (mx_i32)(amax_bits >> 23) - 127;
  return mx_power_of_two(exponent < -126 ? 126 : exponent > 126 ? -126 : -exponent);
}

// Bin of a positive ratio, given as the bits of a float or double (stored_fraction and bias are its format's): the
// binade and the top bits of the fraction.
MX_FN mx_i64 mx_ratio_bin(mx_i64 bits, int stored_fraction, int bias, int fraction_bits, int lowest, int bins) {
  mx_i64 bin = (bits >> (stored_fraction - fraction_bits)) - ((mx_i64)(bias + lowest) * (1 << fraction_bits));
  return bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
}

// Bound below which a relative error cannot exceed `known`, the largest so far, so that its division can be skipped. In
// blocks with elements so small that their product with the bound may be subnormal, which rounds to multiples of
// 2^-149, half of `known` is always low enough. If `known` is 1, the error of every underflowed element, it is the
// bound itself.
MX_FN float mx_relative_bound(float known, float decode, MxFloat element) {
  mx_i32 scale = (mx_i32)(mx_bits(decode) >> 23 & 0xFFu) - 127;
  if (scale + element.emin - element.mantissa_bits - 1 < -100) return known * 0.5f;
  return known == 1.0f ? known : known * 0.999999f;
}

#endif
