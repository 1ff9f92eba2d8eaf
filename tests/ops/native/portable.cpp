// Checks of the compiled libraries without Python or PyTorch, for CPUs that only an emulator provides: make test-emulated.
//
// Every instruction level of the CPU is compared with a plain computation in double precision, on a ragged batch; results
// must not depend on the number of threads or on the other texts. Link it with encoder.cpp and training.cpp.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {
void bertie_encoder_abi_6();  // called below: a library with other signatures does not link
void bertie_training_abi_3();
int bertie_encoder_isa_level();
void *bertie_encoder_create(int level, const int64_t *shape, double scale);
void bertie_encoder_add_layer(void *encoder, int block, int64_t before, int64_t after, int rotary);
void bertie_encoder_set_linear(void *encoder, int block, int which, int64_t n, int64_t k, const float *f32,
                               const uint16_t *bf16, const int8_t *int8, const float *scales, const float *bias);
void bertie_encoder_set_norm(void *encoder, int block, int slot, const float *weight, const float *bias, int rms,
                             double eps);
void bertie_encoder_forward(void *encoder, int64_t texts, const int32_t *cu_seqlens, const int64_t *ids,
                            const int64_t *segments, const int64_t *positions, float *x, const float *const *cos,
                            const float *const *sin, const float *bias, const int32_t *rows, int64_t distances,
                            int64_t zero_distance, int threads);
void bertie_encoder_destroy(void *encoder);
void bertie_training_attention(int level, int threads, const int64_t *shape, const int32_t *cu_seqlens, double scale,
                               double dropout, uint64_t seed, float *const *tensors, int backward);
void bertie_training_add_norm(int level, int threads, int64_t rows, int64_t width, double eps, int rms, double dropout,
                              uint64_t seed, float *const *tensors);
void bertie_training_activation(int level, int threads, int64_t rows, int64_t width, int kind, int gated, const float *y,
                                float *out, const float *grad_out, float *grad_y);
void bertie_training_adamw(int level, int threads, int64_t count, float *const *tensors, const int64_t *sizes,
                           const double *factors, const double *options);
}

using Vector = std::vector<float>;
constexpr long D = 64, HEADS = 2, HEAD = 32, FF = 101;
const std::vector<int32_t> CU_SEQLENS = {0, 5, 38, 40, 300, 301};
int failures = 0;

uint32_t state = 1;
float draw() { return (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; }
Vector draws(long n, float scale = 1.0f) {
    Vector x(n);
    for (float &v : x) v = draw() * scale;
    return x;
}

void check(const char *what, int level, double error, double limit) {
    bool good = error <= limit;  // false for NaN
    failures += !good;
    std::printf("level %d  %-40s error %.2e, at most %.0e  %s\n", level, what, error, limit, good ? "ok" : "WRONG");
}

double max_error(const Vector &a, const Vector &b) {
    double worst = 0;
    for (size_t i = 0; i < a.size(); i++) {
        double error = std::fabs((double)a[i] - b[i]);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

double relative_error(const Vector &a, const Vector &b) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.size(); i++) error += (a[i] - b[i]) * (a[i] - b[i]), norm += a[i] * a[i];
    return std::sqrt(error / norm);
}

struct Linear {
    long n, k;
    Vector weight, bias, scales;
    std::vector<int8_t> int8;

    Linear(long n, long k) : n(n), k(k), weight(draws(n * k, 0.2f)), bias(draws(n, 0.2f)), scales(n), int8(n * k) {
        for (long r = 0; r < n; r++) {
            float top = 0;
            for (long i = 0; i < k; i++) top = std::fmax(top, std::fabs(weight[r * k + i]));
            scales[r] = top / 127;
            for (long i = 0; i < k; i++) int8[r * k + i] = (int8_t)std::lrint(weight[r * k + i] / scales[r]);
        }
    }
    Vector apply(const Vector &x) const {
        Vector y(x.size() / k * n);
        for (size_t r = 0; r < x.size() / k; r++)
            for (long c = 0; c < n; c++) {
                double total = bias[c];
                for (long i = 0; i < k; i++) total += (double)x[r * k + i] * weight[c * k + i];
                y[r * n + c] = (float)total;
            }
        return y;
    }
};

double gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

void layer_norm(Vector &x, const Vector &weight, const Vector &bias) {
    for (size_t r = 0; r < x.size() / D; r++) {
        double mean = 0, variance = 0;
        for (long i = 0; i < D; i++) mean += x[r * D + i] / (double)D;
        for (long i = 0; i < D; i++) variance += (x[r * D + i] - mean) * (x[r * D + i] - mean) / D;
        for (long i = 0; i < D; i++)
            x[r * D + i] = (float)((x[r * D + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i]);
    }
}

struct Visible {
    long before, after;  // how many tokens on either side a query attends to; -1: all
};

// softmax(q k^T / sqrt(d)) v within each text; rows of q, k and v are `stride` apart.
Vector attend(const float *q, const float *k, const float *v, long stride, Visible visible) {
    Vector out(CU_SEQLENS.back() * D);
    for (size_t t = 0; t + 1 < CU_SEQLENS.size(); t++)
        for (long h = 0; h < HEADS; h++)
            for (long i = CU_SEQLENS[t]; i < CU_SEQLENS[t + 1]; i++) {
                std::vector<double> scores;
                std::vector<long> keys;
                double total = 0;
                for (long j = CU_SEQLENS[t]; j < CU_SEQLENS[t + 1]; j++) {
                    if (visible.before >= 0 && i - j > visible.before) continue;
                    if (visible.after >= 0 && j - i > visible.after) continue;
                    double score = 0;
                    for (long c = h * HEAD; c < (h + 1) * HEAD; c++) score += (double)q[i * stride + c] * k[j * stride + c];
                    scores.push_back(std::exp(score / std::sqrt((double)HEAD)));
                    keys.push_back(j);
                    total += scores.back();
                }
                for (long c = h * HEAD; c < (h + 1) * HEAD; c++) {
                    double value = 0;
                    for (size_t j = 0; j < keys.size(); j++) value += scores[j] / total * v[keys[j] * stride + c];
                    out[i * D + c] = (float)value;
                }
            }
    return out;
}

struct Model {
    Linear qkv{3 * D, D}, out{D, D}, up{FF, D}, down{D, FF};
    Vector weight = draws(D), bias = draws(D);
    Visible layers[3] = {{-1, -1}, {20, 20}, {-1, 0}};  // full, sliding and causal; they share a block

    Vector reference(Vector x) const {
        for (Visible visible : layers) {
            Vector projected = qkv.apply(x);
            Vector a = out.apply(attend(&projected[0], &projected[D], &projected[2 * D], 3 * D, visible));
            for (size_t i = 0; i < x.size(); i++) x[i] += a[i];
            layer_norm(x, weight, bias);
            Vector h = up.apply(x);
            for (float &value : h) value = (float)gelu(value);
            Vector f = down.apply(h);
            for (size_t i = 0; i < x.size(); i++) x[i] += f[i];
            layer_norm(x, weight, bias);
        }
        return x;
    }
    Vector compiled(int level, bool int8, Vector x, std::vector<int32_t> cu_seqlens, int threads) const {
        int64_t shape[] = {D, HEADS, HEADS, HEAD, FF, 0, 0, 1};
        void *encoder = bertie_encoder_create(level, shape, 1 / std::sqrt((double)HEAD));
        for (Visible visible : layers) bertie_encoder_add_layer(encoder, 0, visible.before, visible.after, -1);
        const Linear *linears[] = {&qkv, &out, &up, nullptr, &down};
        for (int i = 0; i < 5; i++)
            if (const Linear *l = linears[i])
                bertie_encoder_set_linear(encoder, 0, i, l->n, l->k, int8 ? nullptr : l->weight.data(), nullptr,
                                          int8 ? l->int8.data() : nullptr, l->scales.data(), l->bias.data());
        for (int slot : {1, 3}) bertie_encoder_set_norm(encoder, 0, slot, weight.data(), bias.data(), 0, 1e-5);
        bertie_encoder_forward(encoder, (int64_t)cu_seqlens.size() - 1, cu_seqlens.data(), nullptr, nullptr, nullptr,
                               x.data(), nullptr, nullptr, nullptr, nullptr, 0, 0, threads);
        bertie_encoder_destroy(encoder);
        return x;
    }
};

void check_encoder(int level) {
    Model model;
    Vector x = draws(CU_SEQLENS.back() * D), expected = model.reference(x);
    for (bool int8 : {false, true}) {
        if (int8 && level == 0) continue;
        Vector y = model.compiled(level, int8, x, CU_SEQLENS, 1);
        if (int8) check("encoder, int8 (relative)", level, relative_error(expected, y), 0.03);
        else check("encoder, float32", level, max_error(expected, y), 1e-4);
        check(int8 ? "int8 on three threads" : "float32 on three threads", level,
              max_error(y, model.compiled(level, int8, x, CU_SEQLENS, 3)), 0);
        for (size_t t = 0; t + 1 < CU_SEQLENS.size(); t++) {
            Vector own(x.begin() + CU_SEQLENS[t] * D, x.begin() + CU_SEQLENS[t + 1] * D);
            Vector alone = model.compiled(level, int8, own, {0, CU_SEQLENS[t + 1] - CU_SEQLENS[t]}, 1);
            Vector batched(y.begin() + CU_SEQLENS[t] * D, y.begin() + CU_SEQLENS[t + 1] * D);
            check(int8 ? "int8, a text alone" : "float32, a text alone", level, max_error(batched, alone), 0);
        }
    }
}

// The gradient of sum(out * w) by one element of q, k or v, by central differences.
double numeric_gradient(std::vector<Vector> qkv, int which, long at, const Vector &w) {
    double sums[2];
    for (int side = 0; side < 2; side++) {
        qkv[which][at] += side ? -2e-2f : 1e-2f;
        Vector out = attend(qkv[0].data(), qkv[1].data(), qkv[2].data(), D, {-1, -1});
        sums[side] = 0;
        for (size_t i = 0; i < out.size(); i++) sums[side] += (double)out[i] * w[i];
    }
    return (sums[0] - sums[1]) / 2e-2;
}

void check_attention(int level) {
    long T = CU_SEQLENS.back();
    std::vector<Vector> qkv = {draws(T * D), draws(T * D), draws(T * D)};
    Vector out(T * D), log_sums(T * HEADS), w = draws(T * D), grads(T * 3 * D);
    int64_t shape[] = {(int64_t)CU_SEQLENS.size() - 1, HEADS, HEADS, HEAD, -1, -1, D, D, D, 3 * D};
    float *tensors[] = {qkv[0].data(), qkv[1].data(), qkv[2].data(), out.data(), log_sums.data(),
                        w.data(), grads.data(), grads.data() + D, grads.data() + 2 * D};
    for (int backward : {0, 1})
        bertie_training_attention(level, 3, shape, CU_SEQLENS.data(), 1 / std::sqrt((double)HEAD), 0, 0, tensors, backward);
    check("attention", level, max_error(attend(qkv[0].data(), qkv[1].data(), qkv[2].data(), D, {-1, -1}), out), 1e-5);
    double worst = 0;
    for (int which = 0; which < 3; which++)
        for (long row : {2L, 37L, 170L}) {
            long column = (row * 7 + which) % D;
            double numeric = numeric_gradient(qkv, which, row * D + column, w);
            worst = std::fmax(worst, std::fabs(numeric - grads[row * 3 * D + which * D + column]));
        }
    check("gradients of attention", level, worst, 2e-3);
}

void check_training(int level) {
    long rows = 67, width = 53;
    Vector x = draws(rows * width), residual = draws(rows * width), weight = draws(width), bias = draws(width);
    Vector total(rows * width), out(rows * width), statistics(rows * 2), expected(rows * width);
    float *tensors[] = {x.data(), residual.data(), weight.data(), bias.data(), total.data(), out.data(), statistics.data()};
    bertie_training_add_norm(level, 2, rows, width, 1e-5, 0, 0, 0, tensors);
    for (long r = 0; r < rows; r++) {
        double mean = 0, variance = 0;
        for (long i = 0; i < width; i++) mean += ((double)x[r * width + i] + residual[r * width + i]) / width;
        for (long i = 0; i < width; i++) variance += std::pow((double)x[r * width + i] + residual[r * width + i] - mean, 2) / width;
        for (long i = 0; i < width; i++)
            expected[r * width + i] = (float)(((double)x[r * width + i] + residual[r * width + i] - mean) /
                                              std::sqrt(variance + 1e-5) * weight[i] + bias[i]);
    }
    check("residual + LayerNorm", level, max_error(expected, out), 1e-5);
    Vector wide = draws(rows * width, 4.0f), grad(rows * width), ones(rows * width, 1.0f), slope(rows * width);
    bertie_training_activation(level, 2, rows, width, 0, 0, wide.data(), out.data(), nullptr, nullptr);
    bertie_training_activation(level, 2, rows, width, 0, 0, wide.data(), nullptr, ones.data(), grad.data());
    for (size_t i = 0; i < wide.size(); i++) {
        expected[i] = (float)gelu(wide[i]);
        slope[i] = (float)((gelu(wide[i] + 1e-4) - gelu(wide[i] - 1e-4)) / 2e-4);
    }
    check("GELU", level, max_error(expected, out), 1e-5);
    check("gradient of GELU", level, max_error(slope, grad), 1e-5);
    Vector p = draws(101), g = draws(101), m = draws(101), v = draws(101), after = p;
    for (float &value : v) value = std::fabs(value);
    double factors[] = {0.99, 0.01, 1.5}, options[] = {0.9, 0.999, 1e-8, 1.0};
    for (size_t i = 0; i < p.size(); i++) {
        double first = 0.9 * m[i] + 0.1 * g[i], second = 0.999 * v[i] + 0.001 * g[i] * g[i];
        after[i] = (float)(p[i] * 0.99 - 0.01 * first / (std::sqrt(second) * 1.5 + 1e-8));
    }
    float *parameters[] = {p.data(), g.data(), m.data(), v.data()};
    int64_t size = 101;
    bertie_training_adamw(level, 1, 1, parameters, &size, factors, options);
    check("AdamW", level, max_error(after, p), 1e-6);
}

int main() {
    bertie_encoder_abi_6();
    bertie_training_abi_3();
    int highest = bertie_encoder_isa_level();
    for (int level = 0; level <= highest; level++) {
        check_encoder(level);
        check_attention(level);
        check_training(level);
    }
    std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures != 0;
}
