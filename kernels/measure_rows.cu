// Statistics of a tensor with blocks of one row, optionally with codes and scales, in one read of the tensor.
// Macros, next to those of device.h and measure.h:
//   MX_WIDTH  columns of a block: up to 32, or a multiple of 16 up to 128
#include "measure.h"

// Column in its block of a lane's element i: one lane has all columns, or four lanes alternate in groups of four.
template <int lanes>
MX_FN int mx_offset(int i, int lane) {
  return lanes == 1 ? i : i / 4 * 16 + lane * 4 + i % 4;
}

// Return whether sums in units of the block's scale have the same bits as in units of the amax's power of two: no
// product or difference may leave the range of normal numbers. Elements reach 2^emax in units of the scale, or less
// where the scale is the smallest that a rule allows, and their squares are added.
MX_FN bool mx_stays_normal(const MxBlock& b, mx_u32 least, mx_i32 emax) {
  if (emax < 0 || emax > 40) return false;
  const mx_u32 scale = mx_bits(b.scale.decode) >> 23, smallest = 0u - least;
  if ((smallest >> 23) + 36u < scale) return false;
  return least != 0u && (b.amax >> 23) - (smallest >> 23) <= 35u && scale >= 27u && scale <= 227u;
}

// Return whether blocks often have elements that underflow, so that counting them directly is cheaper than first
// testing for any: formats whose smallest value is less than 2^8 below the largest.
MX_FN bool mx_often_underflows(MxEncoder e) { return e.element.emax - e.element.emin + e.element.mantissa_bits < 8; }

// Add elements 0 to N - 1 with add(i, sum) in the order given at mx_add_terms, keeping few partial sums alive at a
// time.
template <int N, class Add>
MX_FN MxTerms mx_add_in_halves(Add add) {
  MxTerms four[4];
#pragma unroll
  for (int column = 0; column < 4; column += 2) {  // two neighbors at a time: their codes may be counted as a pair
    MxTerms half[2][2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        MxTerms sum[2] = {};
#pragma unroll
        for (int i = column + 4 * (side + 2 * part); i < N; i += 16) {
          add(i, sum[0]);
          if (i + 1 < N) add(i + 1, sum[1]);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) half[side][k] = part ? mx_add_terms(half[side][k], sum[k]) : sum[k];
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) four[column + k] = mx_add_terms(half[0][k], half[1][k]);
  }
  return mx_sum_four(four);
}

// Measure blocks of 1 x MX_WIDTH of a tensor [rows, columns], with one or four threads per block, in chunks first_chunk
// to last_chunk - 1. `sums` has four numbers per chunk.
extern "C" __global__ void __launch_bounds__(MX_SUMS, 2)
    mx_measure_rows(const MxSource* x, mx_i64 rows, mx_i64 columns, mx_i64 first_chunk, mx_i64 last_chunk,
                    mx_i64 chunk_blocks, mx_i64 chunk_parts, mx_i64 unit_blocks, mx_i64 all_blocks, mx_u64 key,
                    const mx_u32* tensor_amax, mx_u8* codes, void* scales, double* noise, float* per_block,
                    mx_i64 per_block_each, mx_u64* totals, double* sums) {
  constexpr int width = MX_WIDTH, lanes = width > 32 ? 4 : 1, each = width / lanes;
  constexpr int piece = lanes == 1 ? each : 4;  // neighbors that a lane loads at once
  constexpr int at_once = MX_SUMS / lanes;
  __shared__ MxCounts counts;
  const MxScheme r = MX_SCHEME;
  const MxEncoder e = mx_encoder(r);
  const MxTensorScale t = mx_read_tensor_scale(tensor_amax, r);
  const mx_i64 across = mx_ceil_div(columns, width);
  const int lane = threadIdx.x % lanes;
  MxTally tally = mx_begin_tally(counts);

  const MxChunking chunking = {chunk_blocks, chunk_parts, unit_blocks, all_blocks};
  for (mx_i64 chunk = first_chunk + blockIdx.x; chunk < last_chunk; chunk += gridDim.x) {
    const MxChunk in = mx_chunk(chunking, chunk);
    mx_i32 turn = 0;  // the lane that adds the block's sums
    for (mx_i64 first = in.begin; first < in.end; first += at_once, turn = (turn + 1) % lanes) {
      const mx_i64 block = first + threadIdx.x / lanes;
      const bool is_active = block < in.end;
      const mx_i64 row = rows == 1 ? 0 : mx_quotient(block, across), column = (block - row * across) * width;
      const mx_i64 n = is_active ? mx_min_i64(width, columns - column) : 0;
      const mx_i64 at = row * columns + column;

      float values[each], drawn[each];
#pragma unroll
      for (int i = 0; i < each; i += piece) {
        float loaded[piece], own_drawn[piece];
        mx_load_input(x, at + mx_offset<lanes>(i, lane), n - mx_offset<lanes>(i, lane), r, loaded);
        mx_draw(key, at + mx_offset<lanes>(i, lane), e, own_drawn);
#pragma unroll
        for (int k = 0; k < piece; ++k) {
          values[i + k] = loaded[k];
          drawn[i + k] = e.rounding.is_random ? own_drawn[k] : 0.0f;
        }
      }
      const mx_u32 block_amax = mx_lanes_max<lanes>(mx_amax_bits<each>(values));
      MxBlock b = mx_begin_block(block_amax, block_amax, t, r, e);
      if (r.candidate_count && lanes == 1) {
        mx_choose_candidate<each>(values, b.amax, t, r, e, b.scale);
        mx_find_top_code(b, r, e);
      }
      if (MX_CODES && is_active) {
        if (lane == 0) mx_store_scale(scales, row, column / width, across, b.scale.stored, r);
        mx_u32 packed[each];
        mx_encode_block<each>(values, b.scale, e, drawn, packed);
        mx_u8* const to = codes + row * mx_packed_bytes(columns) + mx_packed_bytes(column);
#pragma unroll
        for (int i = 0; i < each; i += piece) {
          const int offset = mx_offset<lanes>(i, lane);
          mx_store_part<piece>(to, offset, n - offset, packed + i);
        }
      }

      mx_u32 amax = b.amax;  // of finite elements
      if (__any_sync(MX_ALL_LANES, b.amax >= MX_INFINITY_BITS)) {
        const mx_u32 finite = mx_finite_amax_bits<each>(values);
        tally.amax = mx_max_u32(tally.amax, finite);  // includes NaN blocks
        const mx_u32 largest = mx_lanes_max<lanes>(finite);
        amax = b.scale.is_nan ? 0u : largest;
      }
      MxSpan span = {};
      MxTerms terms = {}, own[4] = {};
      mx_u32 zeros = 0;
      span.least = 0u - mx_amin_bits<each>(values);
      if (span.least == 0u) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
          span.least = mx_max_u32(span.least, 0u - (mx_bits(values[i]) & 0x7FFFFFFFu));
          zeros += mx_bits(values[i]) << 1 == 0u;
        }
      }
      const mx_u32 least = mx_lanes_max<lanes>(span.least);
      const bool is_scaled = r.scale_kind == MX_POWER_OF_TWO;
      double back = 1.0 / (double)mx_unit(amax);
      if (is_active && b.amax < MX_INFINITY_BITS && (!is_scaled || mx_stays_normal(b, least, e.element.emax))) {
        const float unit = mx_unit(amax), bound = mx_known_bound(tally, counts, b.scale, e);
        const bool counts_zeros = mx_often_underflows(e) || e.rounding.is_random;
        mx_u32 pair = 0;
        auto add = [&](int i, MxTerms& p) {
          mx_u32 code;
          if (is_scaled) code = mx_measure_scaled(values[i], b.scale.factor, e, drawn[i], counts_zeros, bound, p, span);
          else code = mx_measure_element(values[i], b.scale, e, drawn[i], unit, bound, p, span);
          mx_update_top_code(code, e, b);
          if (MX_HISTOGRAM) mx_count_code(code, i, n == width, mx_offset<lanes>(i, lane) < n, pair, counts);
        };
        if constexpr (lanes == 1) terms = mx_add_in_halves<each>(add);
        else {
#pragma unroll
          for (int i = 0; i < each; ++i) add(i, own[i % 4]);
        }
        if (b.saturates) {
#pragma unroll
          for (int i = 0; i < each; ++i) b.saturated += mx_saturates(values[i], b.scale.factor, e);
        }
        if (span.is_relative) {
#pragma unroll 1
          for (int i = 0; i < each; ++i)
            if (mx_offset<lanes>(i, lane) < n)
              mx_measure_relative_error(x, at + mx_offset<lanes>(i, lane), key, r, b.scale, e, tally, counts);
        }
        if (is_scaled) {
          back = (double)b.scale.decode;
          span.max_error *= b.scale.decode;
          if (!counts_zeros && mx_encode_element(mx_float(0u - span.least), b.scale.factor, e).value == 0.0f) {
#pragma unroll
            for (int i = 0; i < each; ++i)
              span.underflowed += mx_encode_element(values[i], b.scale.factor, e).value == 0.0f;
          }
          if (span.underflowed) span.underflowed -= zeros;
        }
      } else if (is_active) {
        span.least = 0u;
        MxTerms first[4] = {};
#pragma unroll 1
        for (int turn_of = 0; turn_of < (lanes == 1 ? 4 : 1); ++turn_of) {
          const int part = lanes == 1 ? turn_of % 2 * 2 + turn_of / 2 : lane;  // 0, 2, 1, 3
          MxTerms found[4];
          mx_measure_steps(x, key, nullptr, at, n, part, amax, r, e, b, found, span, tally, counts, totals);
#pragma unroll
          for (int i = 0; i < 4; ++i) own[i] = turn_of % 2 ? mx_add_terms(own[i], found[i]) : found[i];
          if (turn_of == 1) {
#pragma unroll
            for (int i = 0; i < 4; ++i) first[i] = own[i];
          }
        }
        if (lanes == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) own[i] = mx_add_terms(first[i], own[i]);
          terms = mx_sum_four(own);
        }
      }
      mx_finish_span(span.max_error, span.underflowed, tally, counts);
      if (lanes > 1) terms = mx_lanes_terms(own);
      b.sums = mx_rescale_sums(terms, back);
      b.largest = amax;
      b.least = mx_lanes_max<lanes>(span.least);
      if (r.rounding.is_random) b.top_code = mx_lanes_max<lanes>(b.top_code);
      b.saturated = mx_lanes_sum<lanes>(b.saturated);
      b.underflowed = mx_lanes_sum<lanes>((mx_u64)span.underflowed);
      if (is_active && lane == turn)
        mx_finish_block(b, MxRatio{terms.of[0], terms.of[1]}, r, block, MxPerBlock{noise, per_block, per_block_each},
                        tally, counts);
    }
    mx_finish_chunk(tally, threadIdx.x / lanes + lane * at_once, sums + 4 * chunk);
  }
  mx_add_tally(tally, counts, totals);
}
