// Training kernels for one instruction set, as kernels.h.

#include "simd.h"
#include "gemm.h"
#include "attention.h"
#include "training_kernels.h"
#include "training_attention.h"

static void run_attention_forward(const AttentionCall &a, Index text, Index head) {
    static thread_local TrainingScratch scratch;
    attention_forward(a, text, head, scratch);
}

static void run_attention_backward(const AttentionCall &a, Index text, Index kv_head) {
    static thread_local TrainingScratch scratch;
    attention_backward(a, text, kv_head, scratch);
}
