// C interface of the CPU kernel; mxcli.backends declares the same structures with ctypes.
#ifndef MXCLI_QUANTIZE_H
#define MXCLI_QUANTIZE_H

#include <cstdint>

#include "numerics.h"

// What runs once per stripe or block stays out of line: inlined into every loop, it triples the time to compile.
#define MX_NOINLINE __attribute__((noinline))

constexpr int kLanes = MX_LANE_BYTES / 4;  // binary32 values per SIMD register of this build

enum MxType { MX_F32 = 0, MX_BF16 = 1, MX_F16 = 2, MX_F64 = 3 };

// A row-major tensor; `batch` folds the leading dimensions, blocks are in the last two. The rotation is applied when
// elements are read and undone when they are written; its size divides `columns`.
struct MxTensor {
  const void* data;
  int64_t type, batch, rows, columns;
  MxRotation rotation;
};

constexpr int kScaleBins = MX_SCALE_BINS;
constexpr int kCodeBins = MX_CODE_BINS;
constexpr int kSqnrBins = MX_SQNR_BINS;
constexpr int kRangeBins = MX_RANGE_BINS;
constexpr int kWorst = 8;

struct MxWorst {
  double noise;
  int64_t block;
};

// Statistics of a tensor. Counts, extremes and `worst` are independent of order; sums are added in the order of fixed
// chunks. So no result depends on the thread count.
struct MxStats {
  int64_t elements, blocks, zero_blocks, nan_blocks, saturated, saturated_blocks, underflowed, scale_underflowed_blocks;
  int64_t nan, infinite, first_nonfinite, worst_count;
  double amax, max_abs_error, max_rel_error, min_block_sqnr, min_block_range;
  double signal, noise, cross,
      error;         // sums of x^2, (y-x)^2, x(y-x), y-x over finite elements of blocks that are not NaN
  int64_t measured;  // count of those elements
  int64_t scale_bins[kScaleBins], code_bins[kCodeBins], block_code_bins[kCodeBins];
  int64_t sqnr_bins[kSqnrBins], range_bins[kRangeBins];
  MxWorst worst[kWorst];
};

// Per-block arrays in the order of the scale grid; each may be null.
struct MxPerBlock {
  float* amax;
  float* decode;  // dequantization factor
  int32_t* saturated;
  int32_t* underflowed;
  double* noise;
};

struct MxResult {
  uint8_t* codes;  // packed rows, or null
  void* scales;    // codes or binary32, one per block, or null
  MxStats* stats;  // or null
  MxPerBlock per_block;
  float encode, decode;  // out: tensor scales
};

// Chunks whose sums are added in order, the same on every device: `per_chunk` units of unit_rows rows, or, if one unit
// is larger than a chunk, `parts` parts of a unit with `part` columns each.
struct MxCut {
  int64_t unit_rows, units, part, parts, per_chunk, chunks;
};

struct MxKernel {
  void (*quantize)(const MxScheme*, const MxTensor*, float amax, MxKey, int threads, MxResult*);
  float (*amax)(const MxTensor*, int threads, int64_t* nonfinite, int64_t* first_nonfinite);
  void (*dequantize)(const MxScheme*, const uint8_t* codes, const void* scales, float encode, float decode,
                     const MxTensor* out, int threads);
  void (*quantize_dequantize)(const MxScheme*, const MxTensor*, float amax, MxKey, const MxTensor* out, int threads);
  void (*unpack)(const uint8_t* packed, int64_t rows, int64_t columns, int bits, uint8_t* codes);
  void (*cut)(const MxScheme*, const MxTensor*, MxCut*);
};

#endif
