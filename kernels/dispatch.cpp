// The exported C functions, forwarding to the build of quantize.cpp for the widest instruction set of this CPU.
#include <cstdlib>
#include <cstring>

#include "quantize.h"

#define MXCLI_EXPORT extern "C" __attribute__((visibility("default")))
#define MXCLI_DECLARE(isa)      \
  namespace isa {               \
  extern const MxKernel kernel; \
  }

MXCLI_DECLARE(baseline)
#if defined(MXCLI_HAS_avx2)
MXCLI_DECLARE(avx2)
MXCLI_DECLARE(avx512)
#endif

namespace {

struct Build {
  const char* name;
  const MxKernel* kernel;
  bool runs;
};

struct Choice {
  const MxKernel* kernel = &baseline::kernel;
  const char* name = "baseline";

  Choice() {
    const char* wanted = std::getenv("MXCLI_ISA");
    Build builds[] = {
        {"baseline", &baseline::kernel, true},
#if defined(MXCLI_HAS_avx2)
        {"avx2", &avx2::kernel,
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")},
        {"avx512", &avx512::kernel,
         __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")},
#endif
    };
    for (const Build& build : builds) {
      if (!build.runs) continue;
      kernel = build.kernel;
      name = build.name;
      if (wanted && std::strcmp(wanted, build.name) == 0) return;
    }
  }
};

const Choice& choice() {
  static const Choice chosen;
  return chosen;
}

}  // namespace

// Sizes of the structures, so that callers can check that their declarations match.
MXCLI_EXPORT void mx_sizes(int64_t sizes[6]) {
  sizes[0] = sizeof(MxScheme);
  sizes[1] = sizeof(MxTensor);
  sizes[2] = sizeof(MxStats);
  sizes[3] = sizeof(MxPerBlock);
  sizes[4] = sizeof(MxResult);
  sizes[5] = sizeof(MxFloat);
}

// Instruction set in use: "baseline", "avx2" or "avx512". The environment variable MXCLI_ISA selects one that the CPU
// supports.
MXCLI_EXPORT const char* mx_isa() { return choice().name; }

MXCLI_EXPORT void mx_quantize(const MxScheme* scheme, const MxTensor* x, float amax, uint32_t seed, uint32_t stream,
                              int threads, MxResult* result) {
  choice().kernel->quantize(scheme, x, amax, MxKey{seed, stream}, threads, result);
}

MXCLI_EXPORT float mx_amax(const MxTensor* x, int threads, int64_t* nonfinite, int64_t* first_nonfinite) {
  return choice().kernel->amax(x, threads, nonfinite, first_nonfinite);
}

MXCLI_EXPORT void mx_dequantize(const MxScheme* scheme, const uint8_t* codes, const void* scales, float encode,
                                float decode, const MxTensor* out, int threads) {
  choice().kernel->dequantize(scheme, codes, scales, encode, decode, out, threads);
}

MXCLI_EXPORT void mx_quantize_dequantize(const MxScheme* scheme, const MxTensor* x, float amax, uint32_t seed,
                                         uint32_t stream, const MxTensor* out, int threads) {
  choice().kernel->quantize_dequantize(scheme, x, amax, MxKey{seed, stream}, out, threads);
}

MXCLI_EXPORT void mx_unpack(const uint8_t* packed, int64_t rows, int64_t columns, int bits, uint8_t* codes) {
  choice().kernel->unpack(packed, rows, columns, bits, codes);
}

MXCLI_EXPORT void mx_cut(const MxScheme* scheme, const MxTensor* x, MxCut* out) {
  choice().kernel->cut(scheme, x, out);
}
