// CPU kernels for one instruction set; levels.h includes this file once per instruction set, inside a namespace.
//
// Each output row is computed by the same operations in the same order whatever the other rows are. A text's result
// therefore does not depend on its neighbours, bit for bit.

#include "simd.h"
#include "gemm.h"
#include "attention.h"
#include "attention_int8.h"
#include "forward.h"
