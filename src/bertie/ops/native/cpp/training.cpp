// Training on CPU: forward and backward passes of attention, norms and activations, and the optimizer.
// ops/native/training.py is the only caller. Matrix multiplications of linear layers stay in PyTorch.
//
// No result depends on the number of threads: sums over rows are taken in blocks of fixed size.

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "platform.h"

namespace {

#include "model.h"

struct Dropout {
    uint64_t seed = 0;
    uint32_t threshold = 0;  // of 2^32: the probability of an element to be dropped
    float scale = 1.0f;

    Dropout(double p, uint64_t seed) : seed(seed), threshold((uint32_t)(p * 4294967296.0)), scale((float)(1 / (1 - p))) {}
};

struct AttentionCall {
    const int32_t *cu_seqlens;
    Index texts, heads, kv_heads, d, before, after, q_stride, k_stride, v_stride, grad_stride;
    float scale;
    Dropout dropout;
    const float *q, *k, *v;
    float *out, *log_sums;  // (T, H, d), (T, H)
    const float *grad_out;  // null: forward
    float *grad_q, *grad_k, *grad_v;
};

struct AddNorm {
    Index rows, width;
    const float *x, *residual, *weight, *bias;
    float *total, *out, *statistics;  // (T, D), (T, D), (T, 2)
    float eps;
    bool rms;
    Dropout dropout;
    const float *grad_out, *grad_total;
    float *grad_residual, *grad_x;
};

struct ActivationCall {
    Index rows, width;
    int kind;
    bool gated;
    const float *y;
    float *out;
    const float *grad_out;  // null: forward
    float *grad_y;
};

struct Rotary {
    Index rows, heads, d, stride;
    const float *x, *cos, *sin;
    float *out;
    bool inverse;
};

struct AdamW {
    float beta1, beta2, eps, gradient_scale;
};

#define ENCODER_ONLY(x) 0
#define KERNELS "training_level.h"
#include "levels.h"

// The kernels for an instruction level: 0 generic; x86-64: 1 AVX2, 2 and more AVX-512; AArch64: 1 and more NEON.
#if defined(__x86_64__)
#define PICK(kernel) (level >= 2 ? avx512::kernel : level == 1 ? avx2::kernel : generic::kernel)
#elif defined(__aarch64__)
#define PICK(kernel) (level >= 1 ? neon::kernel : generic::kernel)
#else
#define PICK(kernel) (generic::kernel)
#endif

OpenMP openmp;

// Calls f(item) for the items [0, count), in any order, on up to `threads` threads.
template <class F> void for_each(Index count, int threads, F &&f) {
    std::atomic<Index> next{0};
    auto run = [&](int, int) {
        for (Index i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i);
    };
    run_team(openmp, (int)std::min((Index)threads, count), run);
}

constexpr Index ROWS = 32;         // rows per work item
constexpr Index NUMBERS = 1 << 16;  // parameters per work item

Index blocks_of(Index count, Index size) { return (count + size - 1) / size; }

}  // namespace

extern "C" {

EXPORT void bertie_training_abi_3() {}  // ABI_VERSION in ops/native/training.py

EXPORT void bertie_training_set_openmp(void *parallel, void *thread_num, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.thread_num = (int (*)())thread_num;
    openmp.num_threads = (int (*)())num_threads;
}

// `shape`: texts, heads, kv_heads, head width, tokens that a query attends to before and after itself
// (-1: all), strides of q, k, v and of the gradients.
// `tensors`: q, k, v, out, log_sums; for the backward pass also grad_out, grad_q, grad_k, grad_v.
EXPORT void bertie_training_attention(int level, int threads, const int64_t *shape, const int32_t *cu_seqlens,
                                      double scale, double dropout, uint64_t seed, float *const *tensors,
                                      int backward) {
    AttentionCall a{cu_seqlens, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], shape[7], shape[8],
                    shape[9], (float)scale, Dropout(dropout, seed), tensors[0], tensors[1], tensors[2], tensors[3], tensors[4],
                    nullptr, nullptr, nullptr, nullptr};
    if (backward) a.grad_out = tensors[5], a.grad_q = tensors[6], a.grad_k = tensors[7], a.grad_v = tensors[8];
    auto run = backward ? PICK(run_attention_backward) : PICK(run_attention_forward);
    Index heads = backward ? a.kv_heads : a.heads;
    for_each(a.texts * heads, threads, [&](Index item) { run(a, item / heads, item % heads); });
}

// `tensors`: x, residual (or null), weight, bias (or null), total (or null), out, statistics.
EXPORT void bertie_training_add_norm(int level, int threads, int64_t rows, int64_t width, double eps, int rms,
                                     double dropout, uint64_t seed, float *const *tensors) {
    AddNorm a{rows, width, tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6],
              (float)eps, rms != 0, Dropout(dropout, seed), nullptr, nullptr, nullptr, nullptr};
    auto run = PICK(add_norm_forward);
    for_each(blocks_of(rows, ROWS), threads, [&](Index i) { run(a, i * ROWS, std::min(a.rows, (i + 1) * ROWS)); });
}

// `tensors`: weight, bias (or null), total, statistics, grad_out, grad_total (or null), grad_residual, grad_x (or null),
// grad_weight, grad_bias (or null).
EXPORT void bertie_training_add_norm_backward(int level, int threads, int64_t rows, int64_t width, int rms,
                                              double dropout, uint64_t seed, float *const *tensors) {
    AddNorm a{rows, width, nullptr, nullptr, tensors[0], tensors[1], tensors[2], nullptr, tensors[3], 0.0f, rms != 0,
              Dropout(dropout, seed), tensors[4], tensors[5], tensors[6], tensors[7]};
    Index blocks = blocks_of(rows, ROWS);
    std::vector<float> sums(blocks * 2 * width, 0.0f);
    auto run = PICK(add_norm_backward);
    for_each(blocks, threads, [&](Index i) {
        run(a, i * ROWS, std::min(a.rows, (i + 1) * ROWS), &sums[i * 2 * width]);
    });
    for (int part = 0; part < 2; part++) {
        float *to = tensors[8 + part];
        if (!to) continue;
        std::fill(to, to + width, 0.0f);
        for (Index i = 0; i < blocks; i++)
            for (Index j = 0; j < width; j++) to[j] += sums[(i * 2 + part) * width + j];
    }
}

// y (rows, F or 2F) -> out (rows, F); with grad_out, its gradient to grad_y.
EXPORT void bertie_training_activation(int level, int threads, int64_t rows, int64_t width, int kind, int gated,
                                       const float *y, float *out, const float *grad_out, float *grad_y) {
    ActivationCall a{rows, width, kind, gated != 0, y, out, grad_out, grad_y};
    auto run = PICK(activation);
    for_each(blocks_of(rows, ROWS), threads, [&](Index i) { run(a, i * ROWS, std::min(a.rows, (i + 1) * ROWS)); });
}

EXPORT void bertie_training_rotary(int level, int threads, int64_t rows, int64_t heads, int64_t d, int64_t stride,
                                   const float *x, const float *cos, const float *sin, float *out, int inverse) {
    Rotary a{rows, heads, d, stride, x, cos, sin, out, inverse != 0};
    auto run = PICK(rotary);
    for_each(blocks_of(rows, ROWS), threads, [&](Index i) { run(a, i * ROWS, std::min(a.rows, (i + 1) * ROWS)); });
}

// The sum of squares of `count` tensors.
EXPORT double bertie_training_sum_of_squares(int level, int threads, int64_t count, const float *const *tensors,
                                             const int64_t *sizes) {
    std::vector<std::pair<const float *, Index>> items;
    for (Index t = 0; t < count; t++)
        for (Index at = 0; at < sizes[t]; at += NUMBERS)
            items.push_back({tensors[t] + at, std::min(NUMBERS, (Index)sizes[t] - at)});
    std::vector<double> sums(items.size());
    auto run = PICK(sum_of_squares);
    for_each((Index)items.size(), threads, [&](Index i) { sums[i] = run(items[i].first, items[i].second); });
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

// One AdamW step of `count` parameters. Each has 4 `tensors`: parameter, gradient, and the averages of the gradient and
// its square; and 3 `factors`: 1 - lr * weight decay, lr / (1 - beta1^step), and 1 / sqrt(1 - beta2^step).
EXPORT void bertie_training_adamw(int level, int threads, int64_t count, float *const *tensors, const int64_t *sizes,
                                  const double *factors, const double *options) {
    AdamW a{(float)options[0], (float)options[1], (float)options[2], (float)options[3]};
    std::vector<std::pair<Index, Index>> items;
    for (Index t = 0; t < count; t++)
        for (Index at = 0; at < sizes[t]; at += NUMBERS) items.push_back({t, at});
    auto run = PICK(adamw);
    for_each((Index)items.size(), threads, [&](Index i) {
        auto [t, at] = items[i];
        float *const *own = tensors + 4 * t;
        const double *f = factors + 3 * t;
        run(a, own[0] + at, own[1] + at, own[2] + at, own[3] + at, std::min(NUMBERS, (Index)sizes[t] - at), (float)f[0],
            (float)f[1], (float)f[2]);
    });
}

// One AdamW step of a table (rows, width) whose gradient is `gradient[gradient_row[r]]`, or 0 where that is -1. Rows that
// never had a gradient are not `active`: only weight decay changes them.
EXPORT void bertie_training_adamw_rows(int level, int threads, int64_t rows, int64_t width, float *const *tensors,
                                       const int32_t *gradient_row, const uint8_t *active, const double *factors,
                                       const double *options) {
    AdamW a{(float)options[0], (float)options[1], (float)options[2], (float)options[3]};
    auto run = PICK(adamw);
    auto decay = PICK(scale);
    for_each(blocks_of(rows, 256), threads, [&](Index i) {
        for (Index r = i * 256; r < std::min((Index)rows, (i + 1) * 256); r++) {
            float *p = tensors[0] + r * width;
            if (active[r]) {
                const float *g = gradient_row[r] < 0 ? nullptr : tensors[1] + gradient_row[r] * width;
                run(a, p, g, tensors[2] + r * width, tensors[3] + r * width, width, (float)factors[0], (float)factors[1],
                    (float)factors[2]);
            } else if (factors[0] != 1.0) {
                decay(p, width, (float)factors[0]);
            }
        }
    });
}
}
