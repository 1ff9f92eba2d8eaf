// CPU kernels for one instruction set; encoder.cpp includes this file once per instruction set, inside a namespace.
//
// Parameters, defined by the includer:
//   LANES     floats per SIMD register
//   MR        rows of a GEMM tile
//   INT8_DOT  int8 values per 32-bit lane and instruction: 4 (VNNI), 2 (as int16, pmaddwd), 0 (no int8 GEMM)
//   BF16      1 if the bf16 dot product of AVX512_BF16 may be used
//
// Each output row is computed by the same operations in the same order whatever the other rows are. A text's result
// therefore does not depend on its neighbours, bit for bit.

#include "simd.h"
#include "gemm.h"
#include "attention.h"
#include "attention_int8.h"
#include "forward.h"
