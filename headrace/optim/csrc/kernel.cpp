// Which code runs on this CPU? One body of code, compiled for three levels of vector instructions, chosen at run time.
//
// Built with -ffp-contract=off: a multiplication and an addition are fused only where PyTorch's kernels fuse them, and
// there they are fused explicitly.
#include "kernel.h"

#define RESTRICT __restrict__
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

#if defined(__FMA__) || defined(__aarch64__)
#define FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#endif
namespace baseline {
#include "kernel_body.h"
}
#undef FMA

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_LEVELS 1
#define FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include "kernel_body.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#include "kernel_body.h"
}
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef FMA
#endif

extern "C" {

// The layout and the forms of masters that this library was built for; kernel.py refuses others.
__attribute__((visibility("default"))) int32_t headrace_optim_layout(void) {
  return (int32_t)(MASTER_FORMS * (1 << 24) + sizeof(Task) * 65536 + sizeof(Constants) * 256 + sizeof(Job));
}

// The best level that this CPU has.
__attribute__((visibility("default"))) int32_t headrace_optim_best_level(void) {
#ifdef HAS_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

// Works on chunks of the job until none is left. Any number of threads may call it with the same job at once.
__attribute__((visibility("default"))) void headrace_optim_work(Job *job) {
#ifdef HAS_LEVELS
  if (job->level == 2) return avx512::work(*job);
  if (job->level == 1) return avx2::work(*job);
#endif
  baseline::work(*job);
}

// The checksum of bfloat16 weights, as a step in split form computes it of what it writes.
__attribute__((visibility("default"))) uint32_t headrace_optim_checksum(const uint16_t *weights, int64_t count) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += (uint32_t)weights[i] * (2u * (uint32_t)i + 1u);
  return sum;
}
}
