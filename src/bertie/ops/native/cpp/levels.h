// Includes KERNELS once per instruction set of the architecture, each time inside a namespace of its own.
//
// The includer defines KERNELS, a file name, and ENCODER_ONLY(x): x, or 0 where int8 and bf16 are not used.
// For each instruction set the file finds defined:
//   LANES       floats per SIMD register
//   MR          rows of a GEMM tile
//   INT8_DOT    int8 values per 32-bit lane and instruction: 4 (VNNI, SDOT), 2 (as int16), 0 (no int8 GEMM)
//   INT8_SIGNED 1 if activations are quantized to [-128, 127] instead of [0, 255]: SDOT multiplies signed numbers only
//   BF16        1 if there is a bf16 GEMM, in namespace bf16
//   TARGET      attribute of lambdas: clang does not apply its target pragma to them

#define INT8_SIGNED 0
#define TARGET
#define LANES 4
#define MR 4
#define INT8_DOT 0
#define BF16 0
namespace generic {
#include KERNELS
}  // namespace generic
#undef TARGET
#undef MR
#undef INT8_DOT

#if defined(__aarch64__)

#define TARGET
#define MR 8
#define INT8_DOT ENCODER_ONLY(2)
namespace neon {
#include KERNELS
}  // namespace neon
#undef INT8_DOT
#undef TARGET

#if ENCODER_ONLY(1)
#undef INT8_SIGNED
#define INT8_SIGNED 1
#define INT8_DOT 4
#ifdef __clang__
#define TARGET __attribute__((target("dotprod")))
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#define TARGET
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
namespace dotprod {
#include KERNELS
}  // namespace dotprod
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef INT8_DOT
#undef TARGET
#endif
#undef MR

#elif defined(__x86_64__)

#undef LANES
#define LANES 8
#define MR 6
#define INT8_DOT ENCODER_ONLY(2)
#ifdef __clang__
#define TARGET __attribute__((target("avx2,fma")))
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#define TARGET
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#include KERNELS
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TARGET
#undef MR
#undef LANES

#define LANES 16
#define MR 12
#ifdef __clang__
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#define TARGET
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#include KERNELS
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TARGET
#undef INT8_DOT

#if ENCODER_ONLY(1)
#ifdef __clang__
#define BF16_TARGET target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#pragma clang attribute push(__attribute__((BF16_TARGET)), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,prefer-vector-width=512")
#endif
namespace bf16 {  // called only where bertie_encoder_has_bf16 returns 1
#include "bf16.h"
}  // namespace bf16
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#undef BF16
#define BF16 1
#define INT8_DOT 4
#ifdef __clang__
#define VNNI_TARGET target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")
#define TARGET __attribute__((VNNI_TARGET))
#pragma clang attribute push(__attribute__((VNNI_TARGET)), apply_to = function)
#else
#define TARGET
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,prefer-vector-width=512")
#endif
namespace vnni {
#include KERNELS
}  // namespace vnni
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef TARGET
#undef INT8_DOT
#endif
#undef MR

#endif
#undef LANES
#undef BF16
#undef INT8_SIGNED
#undef KERNELS
