// A block's bounds, its distribution over threads, and its exponent under scale rules that try candidates.
#ifndef MXCLI_BLOCKS_H
#define MXCLI_BLOCKS_H

#include "device.h"

// -------------------------------------------------------------------------------------------------------------- blocks

// A block's bounds. The tensor is `rows` x `columns`, repeated; a per-tensor block spans all repetitions.
struct MxBlockBounds {
  mx_i64 grid_row, grid_column;       // in the scale grid, rows counted over all repetitions
  mx_i64 row, column, height, width;  // in the tensor, likewise
};

// Tensor scales from the bits of the tensor's amax, which is read only if the scheme has tensor scales.
MX_FN MxTensorScale mx_read_tensor_scale(const mx_u32* amax, MxScheme r) {
  return mx_tensor_scale(r.tensor_step == MX_TENSOR_NONE ? 0.0f : mx_float(*amax), r);
}

// Bits of the amax from which a per-tensor block is scaled: `given`, which may come from a history of steps (delayed
// scaling), unless `all`, the tensor's largest magnitude of any kind, is not finite.
MX_FN mx_u32 mx_scale_amax(mx_u32 given, mx_u32 all, MxScheme r) {
  return r.tensor_step == MX_TENSOR_NONE && all < MX_INFINITY_BITS ? given : all;
}

MX_FN MxBlockBounds mx_block_bounds(mx_i64 block, mx_i64 rows, mx_i64 columns, mx_i64 block_rows,
                                    mx_i64 block_columns) {
  const mx_i64 down = mx_ceil_div(rows, block_rows), across = mx_ceil_div(columns, block_columns);
  MxBlockBounds p;
  p.grid_row = mx_quotient(block, across);
  p.grid_column = block - p.grid_row * across;
  const mx_i64 repetition = mx_quotient(p.grid_row, down), inside = (p.grid_row - repetition * down) * block_rows;
  p.row = repetition * rows + inside;
  p.column = p.grid_column * block_columns;
  p.height = mx_min_i64(block_rows, rows - inside);
  p.width = mx_min_i64(block_columns, columns - p.column);
  return p;
}

#define MX_VECTOR 8

// A block's vectors of 8 elements, distributed over the threads of a thread block.
struct MxVectors {
  const MxSource* x;  // the tensor
  mx_i64 first;       // the block's first element
  mx_i64 columns, width;
  mx_u32 per_row, count;
};

struct MxVector {
  mx_i64 row, column, n;
};

MX_FN MxVectors mx_vectors(const MxSource* x, mx_i64 columns, const MxBlockBounds& p) {
  MxVectors v;
  v.x = x;
  v.first = p.row * columns + p.column;
  v.columns = columns;
  v.width = p.width;
  v.per_row = (mx_u32)mx_ceil_div(p.width, MX_VECTOR);
  v.count = v.per_row * (mx_u32)p.height;
  return v;
}

MX_FN MxVector mx_vector(const MxVectors& v, mx_u32 i) {
  MxVector at;
  at.row = i / v.per_row;
  at.column = (mx_i64)(i - (mx_u32)at.row * v.per_row) * MX_VECTOR;
  at.n = mx_min_i64(MX_VECTOR, v.width - at.column);
  return at;
}

// Index of a vector's first element in the tensor.
MX_FN mx_i64 mx_element(const MxVectors& v, const MxVector& at) { return v.first + at.row * v.columns + at.column; }

MX_FN void mx_load_vector(const MxVectors& v, mx_u32 i, MxScheme r, float (&x)[MX_VECTOR]) {
  const MxVector at = mx_vector(v, i);
  mx_load_input(v.x, mx_element(v, at), at.n, r, x);
}

// Bits of the block's amax, returned to all threads; `scratch` as in mx_block_max.
MX_FN mx_u32 mx_block_amax(const MxVectors& v, MxScheme r, mx_u32* scratch) {
  mx_u32 amax = 0;
  for (mx_u32 i = threadIdx.x; i < v.count; i += blockDim.x) {
    float x[MX_VECTOR];
    mx_load_vector(v, i, r, x);
    amax = mx_max_u32(amax, mx_amax_bits<MX_VECTOR>(x));
  }
  return mx_block_max(amax, scratch);
}

// ------------------------------------------------------------------------------------------------- candidate exponents

#define MX_CANDIDATES 4

// The exponents that a scale rule tries for a block.
struct MxCandidates {
  mx_i32 count, exponent[MX_CANDIDATES];
};

MX_FN MxCandidates mx_candidate_exponents(mx_u32 amax, MxScheme r) {
  MxCandidates t;
  t.count = amax == 0u || amax >= MX_INFINITY_BITS ? 0 : r.candidate_count;
#pragma unroll
  for (int k = 0; k < MX_CANDIDATES; ++k) {
    const mx_i32 e = mx_floor_exponent(amax, r) + r.candidates[k];
    t.exponent[k] = e < r.min_exponent ? r.min_exponent : e > 127 ? 127 : e;
  }
  return t;
}

// Dequantized magnitude of x under a candidate exponent.
MX_FN float mx_candidate_value(float x, mx_i32 exponent, MxScheme r, MxEncoder e) {
  const auto s = mx_power_of_two_scale((mx_u32)exponent, r);
  return mx_encode_element(x, s.factor, e).value * s.decode;
}

MX_FN double mx_squared_error(float x, float value) {
  const double difference = (double)value - (double)mx_float(mx_bits(x) & 0x7FFFFFFFu);
  return difference * difference;
}

// The exponent with the lowest error; ties go to the largest exponent.
MX_FN mx_i32 mx_best_candidate(const MxCandidates& t, const double (&errors)[MX_CANDIDATES]) {
  mx_i32 chosen = t.exponent[0];
  double best = errors[0];
#pragma unroll
  for (int k = 1; k < MX_CANDIDATES; ++k) {
    if (k >= t.count) continue;
    if (errors[k] < best || (errors[k] == best && t.exponent[k] > chosen)) {
      best = errors[k];
      chosen = t.exponent[k];
    }
  }
  return chosen;
}

// Return whether sums with relative error `relative` may order the candidates differently from exact sums.
// `differs[k]`: some value differs between candidates k and k - 1; if none does, their errors are equal in any
// summation order.
MX_FN bool mx_undecided(const MxCandidates& t, const double (&errors)[MX_CANDIDATES],
                        const bool (&differs)[MX_CANDIDATES], double relative) {
  bool undecided = false;
#pragma unroll
  for (int j = 0; j < MX_CANDIDATES; ++j) {
    bool same = true;
#pragma unroll
    for (int k = j + 1; k < MX_CANDIDATES; ++k) {
      if (k >= t.count) continue;
      same = same && !differs[k];
      const double apart = errors[j] < errors[k] ? errors[k] - errors[j] : errors[j] - errors[k];
      const double larger = errors[j] < errors[k] ? errors[k] : errors[j];
      undecided = undecided || (!same && !(apart > relative * larger));
    }
  }
  return undecided;
}

// Call error(scale) for the scales with a mantissa that a rule tries for a block; set `s` to the best.
template <class Error>
MX_FN void mx_search_scale(mx_u32 amax, MxTensorScale t, MxScheme r, MxScale<float, mx_u32>& s, Error error) {
  if (amax == 0u || amax >= MX_INFINITY_BITS || s.is_nan) return;
  const MxSearch q = mx_begin_search(amax, t, r);
  s = mx_tried_scale(q, 0, t, r);
  double best = error(s);
#pragma unroll 1
  for (mx_i32 k = 1; k < q.count; ++k) {
    const auto tried = mx_tried_scale(q, k, t, r);
    if (mx_ends_search(q, tried, best, r)) break;
    const double found = error(tried);
    if (!mx_is_better(found, best, r)) continue;
    best = found;
    s = tried;
  }
}

MX_FN double mx_element_error(double sum, float x, const MxScale<float, mx_u32>& s, MxScheme r, MxEncoder e) {
  const float magnitude = mx_float(mx_bits(x) & 0x7FFFFFFFu);
  return mx_add_error(sum, mx_encode_element(x, s.factor, e).value * s.decode, magnitude, r.error_norm);
}

// Choose the scale with a mantissa of a block held by one thread.
template <int N>
MX_FN void mx_search_own(const float* x, mx_u32 amax, MxTensorScale t, MxScheme r, MxEncoder e,
                         MxScale<float, mx_u32>& s) {
  mx_search_scale(amax, t, r, s, [&](const MxScale<float, mx_u32>& tried) {
    double parts[MX_ERROR_PARTS] = {};
#pragma unroll
    for (int i = 0; i < N; ++i)
      parts[i % MX_ERROR_PARTS] = mx_element_error(parts[i % MX_ERROR_PARTS], x[i], tried, r, e);
    return mx_total_error(parts, r.error_norm);
  });
}

// Choose the scale with a mantissa of a block shared by all threads; the first ones add up a part of the error each.
MX_FN void mx_search_shared(const MxVectors& v, mx_u32 amax, MxTensorScale t, MxScheme r, MxEncoder e, double* scratch,
                            MxScale<float, mx_u32>& s) {
  mx_search_scale(amax, t, r, s, [&](const MxScale<float, mx_u32>& tried) {
    double parts[MX_ERROR_PARTS] = {};
    if (threadIdx.x < MX_ERROR_PARTS) {
      double part = 0.0;
      const mx_i64 height = v.count / v.per_row;
      for (mx_i64 row = 0; row < height; ++row)
        for (mx_i64 column = threadIdx.x; column < v.width; column += MX_ERROR_PARTS) {
          float x[1];
          mx_load_input(v.x, v.first + row * v.columns + column, 1, r, x);
          part = mx_element_error(part, x[0], tried, r, e);
        }
      scratch[threadIdx.x] = part;
    }
    __syncthreads();
    for (int i = 0; i < MX_ERROR_PARTS; ++i) parts[i] = scratch[i];
    __syncthreads();
    return mx_total_error(parts, r.error_norm);
  });
}

// Choose the candidate of a block held by one thread. Exponents: from binary32 sums where they decide, else from
// binary64 sums in element order, as on the CPU.
template <int N>
MX_FN void mx_choose_candidate(const float* x, mx_u32 amax, MxTensorScale tensor, MxScheme r, MxEncoder e,
                               MxScale<float, mx_u32>& s) {
  if (r.scale_kind != MX_POWER_OF_TWO) return mx_search_own<N>(x, amax, tensor, r, e, s);
  const MxCandidates t = mx_candidate_exponents(amax, r);
  if (t.count == 0) return;
  mx_i32 binade = (mx_i32)(amax >> 23) - 127;
  const float unit = mx_power_of_two(binade < -126 ? 126 : binade > 126 ? -126 : -binade);
  double errors[MX_CANDIDATES] = {};
  bool differs[MX_CANDIDATES] = {};
  float sums[MX_CANDIDATES] = {};
  bool in_range = true;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float before = 0.0f;
#pragma unroll
    for (int k = 0; k < MX_CANDIDATES; ++k) {
      if (k >= t.count) continue;
      const float value = mx_candidate_value(x[i], t.exponent[k], r, e);
      const float error = (value - mx_float(mx_bits(x[i]) & 0x7FFFFFFFu)) * unit;
      sums[k] += error * error;
      differs[k] = differs[k] || (k > 0 && value != before);
      before = value;
    }
  }
#pragma unroll
  for (int k = 0; k < MX_CANDIDATES; ++k) {
    if (k >= t.count) continue;
    in_range = in_range && sums[k] > 1e-20f && sums[k] < 1e20f;
    errors[k] = sums[k];
  }
  // N terms with three roundings each, and N roundings of the sum.
  if (!in_range || mx_undecided(t, errors, differs, (N + 4) * 0x1p-22)) {
#pragma unroll
    for (int k = 0; k < MX_CANDIDATES; ++k) {
      if (k >= t.count) continue;
      errors[k] = 0.0;
#pragma unroll
      for (int i = 0; i < N; ++i) errors[k] += mx_squared_error(x[i], mx_candidate_value(x[i], t.exponent[k], r, e));
    }
  }
  s = mx_power_of_two_scale((mx_u32)mx_best_candidate(t, errors), r);
}

// Choose the candidate of a block shared by all threads. Exponents: from parallel sums where they decide, else from one
// thread's sums in element order, as on the CPU.
MX_FN void mx_choose_candidate_shared(const MxVectors& v, mx_u32 amax, MxTensorScale tensor, MxScheme r, MxEncoder e,
                                      double* scratch, MxScale<float, mx_u32>& s) {
  if (r.scale_kind != MX_POWER_OF_TWO) return mx_search_shared(v, amax, tensor, r, e, scratch, s);
  const MxCandidates t = mx_candidate_exponents(amax, r);
  if (t.count == 0) return;
  double errors[MX_CANDIDATES] = {};
  bool differs[MX_CANDIDATES] = {};
  for (mx_u32 i = threadIdx.x; i < v.count; i += blockDim.x) {
    float x[MX_VECTOR];
    mx_load_vector(v, i, r, x);
#pragma unroll
    for (int j = 0; j < MX_VECTOR; ++j) {
      float before = 0.0f;
#pragma unroll
      for (int k = 0; k < MX_CANDIDATES; ++k) {
        if (k >= t.count) continue;
        const float value = mx_candidate_value(x[j], t.exponent[k], r, e);
        errors[k] += mx_squared_error(x[j], value);
        differs[k] = differs[k] || (k > 0 && value != before);
        before = value;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < MX_CANDIDATES; ++k) {
    errors[k] = mx_block_sum(errors[k], scratch);
    differs[k] = __syncthreads_or(differs[k]);
  }
  __shared__ mx_i32 exponent;
  if (threadIdx.x == 0) {
    if (mx_undecided(t, errors, differs, (double)v.count * MX_VECTOR * 0x1p-51)) {
      for (int k = 0; k < t.count; ++k) {
        errors[k] = 0.0;
        for (mx_u32 i = 0; i < v.count; ++i) {
          float x[MX_VECTOR];
          mx_load_vector(v, i, r, x);
          for (int j = 0; j < MX_VECTOR; ++j)
            errors[k] += mx_squared_error(x[j], mx_candidate_value(x[j], t.exponent[k], r, e));
        }
      }
    }
    exponent = mx_best_candidate(t, errors);
  }
  __syncthreads();
  s = mx_power_of_two_scale((mx_u32)exponent, r);
}

#endif
