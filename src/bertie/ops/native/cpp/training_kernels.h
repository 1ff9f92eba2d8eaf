// Element-wise training kernels, forward and backward: dropout + residual + norm, activations, rotary embeddings, AdamW.

typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline vu lane_numbers() {
    vu lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = (uint32_t)i;
    return lanes;
}

// Dropout of one row: which elements are kept follows from the seed, the row and the column alone, so that the backward
// pass needs no stored mask and the number of threads does not matter.
struct RowDropout {
    uint32_t first = 0, second = 0, threshold = 0;
    float scale = 1.0f;

    RowDropout(const Dropout &dropout, uint64_t row) : threshold(dropout.threshold), scale(dropout.scale) {
        if (!threshold) return;
        uint64_t z = dropout.seed + (row + 1) * 0x9E3779B97F4A7C15ull;  // SplitMix64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z ^= z >> 31;
        first = (uint32_t)z, second = (uint32_t)(z >> 32);
    }
    // The factors, 0 or 1 / (1 - p), of the columns [column, column + LANES).
    vf factors(Index column) const {
        vu x = (lane_numbers() + (uint32_t)column) ^ first;
        x ^= x >> 16;
        x *= 0x7FEB352Du;
        x ^= (x >> 15) ^ second;
        x *= 0x846CA68Bu;
        x ^= x >> 16;
        return select((vi)(x < threshold), vf{}, broadcast(scale));
    }
    vf apply(vf x, Index column) const { return threshold ? x * factors(column) : x; }
};

// Up to LANES numbers of a row; the rest of the register is 0.
static inline vf load_some(const float *p, Index count) {
    if (count >= LANES) return load(p);
    vf x = vf{};
    memcpy(&x, p, count * sizeof(float));
    return x;
}

static inline void store_some(float *p, vf x, Index count) {
    if (count >= LANES) return store(p, x);
    memcpy(p, &x, count * sizeof(float));
}

// Rows [first, last): total = residual + dropout(x), out = norm(total). Saves 1 / standard deviation and the mean.
static void add_norm_forward(const AddNorm &a, Index first, Index last) {
    Index D = a.width;
    for (Index r = first; r < last; r++) {
        RowDropout dropout(a.dropout, r);
        const float *x = a.x + r * D, *residual = a.residual ? a.residual + r * D : nullptr;
        float *total = a.total ? a.total + r * D : nullptr;
        vf sum = vf{};
        for (Index i = 0; i < D; i += LANES) {
            Index count = D - i;
            vf t = dropout.apply(load_some(x + i, count), i);
            if (residual) t += load_some(residual + i, count);
            if (total) store_some(total + i, t, count);
            sum += t;
        }
        const float *t = total ? total : x;
        float mean = a.rms ? 0.0f : reduce_sum(sum) / D;
        sum = vf{};
        for (Index i = 0; i < D; i += LANES) {
            vf d = load_some(t + i, D - i) - broadcast(mean);
            if (D - i < LANES) d = load_some((const float *)&d, D - i);
            sum += d * d;
        }
        float rstd = 1.0f / std::sqrt(reduce_sum(sum) / D + a.eps);
        for (Index i = 0; i < D; i += LANES) {
            Index count = D - i;
            vf y = (load_some(t + i, count) - broadcast(mean)) * broadcast(rstd) * load_some(a.weight + i, count);
            if (a.bias) y += load_some(a.bias + i, count);
            store_some(a.out + r * D + i, y, count);
        }
        a.statistics[2 * r] = mean, a.statistics[2 * r + 1] = rstd;
    }
}

// Rows [first, last): the gradients of residual and x from those of out and total (null: 0). Adds the gradients of weight
// and bias to `sums` (2, D).
static void add_norm_backward(const AddNorm &a, Index first, Index last, float *sums) {
    Index D = a.width;
    for (Index r = first; r < last; r++) {
        RowDropout dropout(a.dropout, r);
        const float *total = a.total + r * D, *grad = a.grad_out + r * D;
        const float *grad_total = a.grad_total ? a.grad_total + r * D : nullptr;
        vf mean = broadcast(a.statistics[2 * r]), rstd = broadcast(a.statistics[2 * r + 1]);
        vf sum = vf{}, dot = vf{};
        for (Index i = 0; i < D; i += LANES) {
            Index count = D - i;
            vf g = load_some(grad + i, count), normed = (load_some(total + i, count) - mean) * rstd;
            vf scaled = g * load_some(a.weight + i, count);  // 0 beyond the row, where `normed` is not
            sum += scaled;
            dot += scaled * normed;
            store_some(sums + i, load_some(sums + i, count) + g * normed, count);
            if (a.bias) store_some(sums + D + i, load_some(sums + D + i, count) + g, count);
        }
        vf shift = broadcast(a.rms ? 0.0f : reduce_sum(sum) / D), slope = broadcast(reduce_sum(dot) / D);
        for (Index i = 0; i < D; i += LANES) {
            Index count = D - i;
            vf normed = (load_some(total + i, count) - mean) * rstd;
            vf g = rstd * (load_some(grad + i, count) * load_some(a.weight + i, count) - shift - normed * slope);
            if (grad_total) g += load_some(grad_total + i, count);
            store_some(a.grad_residual + r * D + i, g, count);
            if (a.grad_x) store_some(a.grad_x + r * D + i, dropout.apply(g, i), count);
        }
    }
}

// The derivative of an activation.
template <int ACTIVATION> static inline vf derivative(vf x) {
    const vf one = broadcast(1.0f);
    if (ACTIVATION == GELU) {  // see activate<GELU>
        vf z = abs(x) * broadcast(0.70710678f);
        vf t = one / (one + broadcast(0.55f) * z);
        vf q = broadcast(0.10732429f);
        q = q * t - broadcast(0.51803766f);
        q = q * t + broadcast(0.75971367f);
        q = q * t - broadcast(0.04142571f);
        q = q * t + broadcast(0.39084198f);
        q = q * t + broadcast(0.30158345f);
        vf e = exp(-(z * z)), tail = broadcast(0.5f) * q * t * e;
        return select(x > vf{}, one - tail, tail) + x * e * broadcast(0.39894228f);
    }
    if (ACTIVATION == GELU_TANH) {
        vf square = x * x;
        vf u = broadcast(1.5957691216f) * x * (one + broadcast(0.044715f) * square);
        vf s = one / (one + exp(-u));
        return s + x * s * (one - s) * broadcast(1.5957691216f) * (one + broadcast(0.134145f) * square);
    }
    if (ACTIVATION == RELU) return select(x > vf{}, one, vf{});
    vf s = one / (one + exp(-x));
    return s + x * s * (one - s);
}

// Rows [first, last) of act(y), or gated act(y[:F]) * y[F:].
template <int ACTIVATION> static void activation_forward(const ActivationCall &a, Index first, Index last) {
    Index F = a.width, stride = a.gated ? 2 * F : F;
    for (Index r = first; r < last; r++)
        for (Index i = 0; i < F; i += LANES) {
            const float *y = a.y + r * stride + i;
            vf v = activate<ACTIVATION>(load_some(y, F - i));
            if (a.gated) v *= load_some(y + F, F - i);
            store_some(a.out + r * F + i, v, F - i);
        }
}

template <int ACTIVATION> static void activation_backward(const ActivationCall &a, Index first, Index last) {
    Index F = a.width, stride = a.gated ? 2 * F : F;
    for (Index r = first; r < last; r++)
        for (Index i = 0; i < F; i += LANES) {
            const float *y = a.y + r * stride + i;
            float *grad_y = a.grad_y + r * stride + i;
            vf x = load_some(y, F - i), grad = load_some(a.grad_out + r * F + i, F - i);
            if (a.gated) {
                store_some(grad_y + F, grad * activate<ACTIVATION>(x), F - i);
                grad *= load_some(y + F, F - i);
            }
            store_some(grad_y, grad * derivative<ACTIVATION>(x), F - i);
        }
}

static void activation(const ActivationCall &a, Index first, Index last) {
#define CASE(kind) (a.grad_out ? activation_backward<kind> : activation_forward<kind>)(a, first, last)
    switch (a.kind) {
        case GELU: return CASE(GELU);
        case GELU_TANH: return CASE(GELU_TANH);
        case RELU: return CASE(RELU);
        default: return CASE(SILU);
    }
#undef CASE
}

static inline vf square_root(vf x) {
#if LANES == 16
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__aarch64__)
    return (vf)vsqrtq_f32((float32x4_t)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// AdamW as in PyTorch for `count` numbers; `decay` is 1 - lr * weight decay.
static void adamw(const AdamW &a, float *p, const float *g, float *m, float *v, Index count, float decay,
                  float step_size, float inverse_root) {
    vf one_minus1 = broadcast(1.0f - a.beta1), beta2 = broadcast(a.beta2), one_minus2 = broadcast(1.0f - a.beta2);
    for (Index i = 0; i < count; i += LANES) {
        Index n = count - i;
        vf grad = g ? load_some(g + i, n) * broadcast(a.gradient_scale) : vf{};
        vf first = load_some(m + i, n), second = load_some(v + i, n);
        first += (grad - first) * one_minus1;
        second = second * beta2 + one_minus2 * grad * grad;
        vf denominator = square_root(second) * broadcast(inverse_root) + broadcast(a.eps);
        vf value = load_some(p + i, n) * broadcast(decay) - broadcast(step_size) * first / denominator;
        store_some(p + i, value, n);
        store_some(m + i, first, n);
        store_some(v + i, second, n);
    }
}

static void scale(float *p, Index count, float factor) {
    for (Index i = 0; i < count; i += LANES) store_some(p + i, load_some(p + i, count - i) * broadcast(factor), count - i);
}

static double sum_of_squares(const float *x, Index count) {
    double total = 0;
    for (Index i = 0; i < count;) {
        vf sum = vf{};
        Index end = std::min(count, i + 64 * LANES);  // few enough for float32
        for (; i < end; i += LANES) {
            vf v = load_some(x + i, end - i);
            sum += v * v;
        }
        i = end;
        total += reduce_sum(sum);
    }
    return total;
}

// Rotary embeddings of rows [first, last) of x (T, heads, d), by the angles' cos and sin (T, d); `sign` -1: the inverse.
static void rotary(const Rotary &a, Index first, Index last) {
    Index d = a.d, half = d / 2;
    for (Index r = first; r < last; r++)
        for (Index h = 0; h < a.heads; h++) {
            const float *x = a.x + r * a.stride + h * d, *cos = a.cos + r * d, *sin = a.sin + r * d;
            float *out = a.out + (r * a.heads + h) * d;
            if (a.inverse)  // the transposed matrix
                for (Index i = 0; i < half; i++) {
                    out[i] = x[i] * cos[i] + x[i + half] * sin[i + half];
                    out[i + half] = x[i + half] * cos[i + half] - x[i] * sin[i];
                }
            else
                for (Index i = 0; i < half; i++) {
                    out[i] = x[i] * cos[i] - x[i + half] * sin[i];
                    out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
                }
        }
}
