// Loads, stores and packing: elements widened to binary32, codes packed and unpacked.
#ifndef MXCLI_TENSORS_H
#define MXCLI_TENSORS_H

#include <algorithm>
#include <cstring>

#include "quantize.h"

namespace MXCLI_ISA {
namespace {

inline void load_bf16(const uint16_t* __restrict source, int n, float* __restrict x) {
  for (int i = 0; i < n; ++i) x[i] = mx_float(uint32_t(source[i]) << 16);
}

inline void load_f16(const uint16_t* __restrict source, int n, float* __restrict x) {
  for (int i = 0; i < n; ++i) x[i] = mx_from_f16(source[i]);
}

inline void load_f64(const double* __restrict source, int n, float* __restrict x) {
  for (int i = 0; i < n; ++i) x[i] = float(source[i]);
}

// Load elements at..at+n as binary32: exact, except that binary64 is rounded to nearest even.
inline void load_plain(const MxTensor& t, int64_t at, int n, float* x) {
  switch (t.type) {
    case MX_F32: std::memcpy(x, static_cast<const float*>(t.data) + at, size_t(n) * 4); break;
    case MX_BF16: load_bf16(static_cast<const uint16_t*>(t.data) + at, n, x); break;
    case MX_F16: load_f16(static_cast<const uint16_t*>(t.data) + at, n, x); break;
    case MX_F64: load_f64(static_cast<const double*>(t.data) + at, n, x); break;
  }
}

template <int Size>
inline void rotate(float* x, MxRotation rotation) {
  rotation.size = Size;
  mx_rotate(x, rotation);
}

// Load and rotate a group.
MX_NOINLINE void load_group(const MxTensor& t, int64_t at, float* x) {
  load_plain(t, at, t.rotation.size, x);
  switch (t.rotation.size) {
    case 16: rotate<16>(x, t.rotation); break;
    case 32: rotate<32>(x, t.rotation); break;
    case 64: rotate<64>(x, t.rotation); break;
    case 128: rotate<128>(x, t.rotation); break;
  }
}

// Load elements at..at+n, rotated if the tensor is. Rows consist of whole groups.
MX_NOINLINE void load(const MxTensor& t, int64_t at, int n, float* x) {
  const int size = t.rotation.size;
  if (size == 0) return load_plain(t, at, n, x);
  const int64_t end = at + n;
  alignas(64) float group[MX_LARGEST_ROTATION];
  for (int64_t first = at / size * size; first < end; first += size) {
    if (first >= at && first + size <= end) {
      load_group(t, first, x + (first - at));
    } else {
      load_group(t, first, group);
      const int64_t from = std::max(first, at), to = std::min(first + size, end);
      std::memcpy(x + (from - at), group + (from - first), size_t(to - from) * 4);
    }
  }
}

// Draw the random numbers of elements first..first+n.
MX_NOINLINE void draw(MxKey key, int64_t first, int n, float* drawn) {
  constexpr int kQuarter = 64;
  const int64_t end = first + n;
  alignas(64) float four[4][kQuarter], in_order[4 * kQuarter];
  for (int64_t at = first / 4; at * 4 < end; at += kQuarter) {
    for (int k = 0; k < kQuarter; ++k) {
      const MxWords words = mx_random_words(uint64_t(at + k), key);
      for (int j = 0; j < 4; ++j) four[j][k] = mx_uniform(words.of[j]);
    }
    for (int k = 0; k < kQuarter; ++k)
      for (int j = 0; j < 4; ++j) in_order[4 * k + j] = four[j][k];
    const int64_t from = std::max(first, at * 4), to = std::min(end, (at + kQuarter) * 4);
    std::memcpy(drawn + (from - first), in_order + (from - at * 4), size_t(to - from) * 4);
  }
}

MX_NOINLINE void canonicalize_zeros(float* x, int n, const MxScheme& r) {
  const int clear = r.clear_zero_input, set = r.set_zero_input;
  for (int i = 0; i < n; ++i) x[i] = mx_zero_input(x[i], clear, set);
}

template <int Size>
inline void rotate_back(float* x, MxRotation rotation) {
  rotation.size = Size;
  mx_rotate_back(x, rotation);
}

// Rotate n elements back, which are whole groups.
MX_NOINLINE void rotate_groups_back(float* x, int64_t n, const MxRotation& rotation) {
  for (int64_t at = 0; at < n; at += rotation.size) switch (rotation.size) {
      case 16: rotate_back<16>(x + at, rotation); break;
      case 32: rotate_back<32>(x + at, rotation); break;
      case 64: rotate_back<64>(x + at, rotation); break;
      case 128: rotate_back<128>(x + at, rotation); break;
    }
}

inline void store_value(const MxTensor& t, int64_t at, float y) {
  void* data = const_cast<void*>(t.data);
  switch (t.type) {
    case MX_F32: static_cast<float*>(data)[at] = y; break;
    case MX_BF16: static_cast<uint16_t*>(data)[at] = uint16_t(mx_bits(mx_round_to_bf16(y)) >> 16); break;
    case MX_F16: static_cast<uint16_t*>(data)[at] = mx_round_to_f16(y); break;
    case MX_F64: static_cast<double*>(data)[at] = y; break;
  }
}

inline void store_bf16(const float* __restrict y, int n, uint16_t* __restrict to) {
  for (int i = 0; i < n; ++i) to[i] = uint16_t(mx_bits(mx_round_to_bf16(y[i])) >> 16);
}

inline void store_f16(const float* __restrict y, int n, uint16_t* __restrict to) {
  for (int i = 0; i < n; ++i) to[i] = mx_round_to_f16(y[i]);
}

// Store elements at..at+n: exact, or rounded to nearest even.
MX_NOINLINE void store_values(const MxTensor& t, int64_t at, int n, const float* y) {
  void* data = const_cast<void*>(t.data);
  switch (t.type) {
    case MX_F32: std::memcpy(static_cast<float*>(data) + at, y, size_t(n) * 4); break;
    case MX_BF16: store_bf16(y, n, static_cast<uint16_t*>(data) + at); break;
    case MX_F16: store_f16(y, n, static_cast<uint16_t*>(data) + at); break;
    case MX_F64: std::copy_n(y, n, static_cast<double*>(data) + at); break;
  }
}

inline int64_t packed_bytes(int64_t columns, int bits) {
  return bits == 4 ? (columns + 1) / 2 : bits == 6 ? (columns + 3) / 4 * 3 : columns;
}

inline void narrow_codes(const uint32_t* __restrict wide, int n, uint8_t* __restrict codes) {
  for (int i = 0; i < n; ++i) codes[i] = uint8_t(wide[i]);
}

inline void pack4(const uint8_t* __restrict codes, int n, uint8_t* __restrict out) {
  const int pairs = n / 2;
  for (int i = 0; i < pairs; ++i) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  if (n & 1) out[pairs] = codes[n - 1];
}

inline void pack6(const uint8_t* codes, int n, uint8_t* out) {
  for (int i = 0; i < n; i += 4) {
    uint32_t word = 0;
    for (int k = 0; k < 4 && i + k < n; ++k) word |= uint32_t(codes[i + k]) << (6 * k);
    *out++ = uint8_t(word);
    *out++ = uint8_t(word >> 8);
    *out++ = uint8_t(word >> 16);
  }
}

MX_NOINLINE void store_codes(const uint8_t* codes, int n, int bits, uint8_t* out) {
  if (bits == 4) pack4(codes, n, out);
  else if (bits == 6) pack6(codes, n, out);
  else std::memcpy(out, codes, size_t(n));
}

// Unpack codes first..first+n of a row to one per byte.
MX_NOINLINE void unpack_row(const uint8_t* packed, int64_t first, int64_t n, int bits, uint8_t* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = first + i;
    if (bits == 4) {
      codes[i] = uint8_t(packed[at / 2] >> (4 * (at & 1)) & 0xF);
    } else if (bits == 6) {
      const uint8_t* word = packed + at / 4 * 3;
      const uint32_t codes4 = uint32_t(word[0]) | uint32_t(word[1]) << 8 | uint32_t(word[2]) << 16;
      codes[i] = uint8_t(codes4 >> (6 * (at & 3)) & 0x3F);
    } else {
      codes[i] = packed[at];
    }
  }
}

template <int N>
inline uint32_t amax_bits(const float* x, int n) {
  uint32_t largest = 0;
  const int count = N ? N : n;
  for (int i = 0; i < count; ++i) {
    uint32_t bits = mx_bits(x[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

#if defined(__AVX512F__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MXCLI_HAS_SIXTEEN 1
#endif
#endif
#ifdef MXCLI_HAS_SIXTEEN
inline MxLaneBits larger(MxLaneBits a, MxLaneBits b) { return a > b ? a : b; }

// Raise amax[i] to the bits of the largest magnitude of block i, of 16 neighboring blocks of N elements: registers are
// folded in pairs, whose halves end up next to each other, until one holds an element of each block.
template <int N>
inline void raise_amaxes(const float* x, uint32_t* amax) {
  MxLaneBits v[16], all;
  for (int i = 0; i < 16; ++i) {
    v[i] = MxLaneBits{};
    for (int k = 0; k < N; k += 16) {
      MxLaneBits bits;
      std::memcpy(&bits, x + i * N + k, sizeof bits);
      v[i] = larger(v[i], bits & 0x7FFFFFFFu);
    }
  }
#define MXCLI_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
  for (int i = 0; i < 8; ++i)
    v[i] = larger(MXCLI_PICK(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                  MXCLI_PICK(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  for (int i = 0; i < 4; ++i)
    v[i] = larger(MXCLI_PICK(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                  MXCLI_PICK(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
  for (int i = 0; i < 2; ++i)
    v[i] = larger(MXCLI_PICK(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                  MXCLI_PICK(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  v[0] = larger(MXCLI_PICK(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                MXCLI_PICK(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
#undef MXCLI_PICK
  std::memcpy(&all, amax, sizeof all);
  all = larger(all, v[0]);
  std::memcpy(amax, &all, sizeof all);
}
#endif

}  // namespace
}  // namespace MXCLI_ISA

#endif
