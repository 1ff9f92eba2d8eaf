// SIMD primitives: vector types, reductions, exp and activations.

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

static inline vf load(const float *p) { return *(const vf *)p; }
static inline void store(float *p, vf x) { *(vf *)p = x; }
static inline vf broadcast(float x) { return x - vf{}; }
static inline vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
static inline vf max(vf a, vf b) { return select(a < b, b, a); }  // keeps a NaN of a
static inline vf abs(vf x) { return select(x < vf{}, -x, x); }

// Tree reduction over the lanes of a register.
template <class Op> static inline float reduce(vf x, Op &&op) {
#if LANES == 16
    __m256 low = _mm512_castps512_ps256((__m512)x), high = _mm512_extractf32x8_ps((__m512)x, 1);
    __m256 eight = op(low, high);
    __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif LANES == 8
    __m128 four = op(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
    vf four = x;
#endif
    return op(op(four[0], four[2]), op(four[1], four[3]));
}

static inline float reduce_sum(vf x) {
    return reduce(x, [](auto a, auto b) TARGET { return a + b; });
}

static inline float reduce_max(vf x) {
    return reduce(x, [](auto a, auto b) TARGET { return a < b ? b : a; });
}

// Adding 1.5 * 2^23 to a float rounds it to an integer, which is then in the low mantissa bits.
constexpr float ROUND_MAGIC = 12582912.0f;
constexpr int32_t ROUND_MAGIC_BITS = 0x4B400000;

static inline vi round_magic(vf x) { return (vi)(x + broadcast(ROUND_MAGIC)) - ROUND_MAGIC_BITS; }

// exp(x) with a relative error of about 1e-7 (the polynomial of Cephes' expf); 0 below -87.
static inline vf exp(vf x) {
    vf clamped = select(x < broadcast(-87.0f), broadcast(-87.0f), x);
    clamped = select(clamped > broadcast(88.0f), broadcast(88.0f), clamped);
    const vf magic = broadcast(ROUND_MAGIC);
    vf shifted = clamped * broadcast(1.44269504f) + magic;
    vf n = shifted - magic;
    vf r = clamped - n * broadcast(0.693359375f);
    r = r + n * broadcast(2.12194440e-4f);
    vf y = broadcast(1.9875691500e-4f);
    y = y * r + broadcast(1.3981999507e-3f);
    y = y * r + broadcast(8.3334519073e-3f);
    y = y * r + broadcast(4.1665795894e-2f);
    y = y * r + broadcast(1.6666665459e-1f);
    y = y * r + broadcast(5.0000001201e-1f);
    y = y * r * r + r + broadcast(1.0f);
    vi power = ((vi)shifted << 23) + (127 << 23);  // 2^n: n is in the low bits of `shifted`
    return select(x < broadcast(-87.0f), vf{}, y * (vf)power);
}

// exp(x) with a relative error of about 1e-4, clamped at exp(-87): for values that are then rounded to int8 or bf16.
static inline vf exp_fast(vf x) {
    const vf magic = broadcast(ROUND_MAGIC);
    vf scaled = select(x < broadcast(-87.0f), broadcast(-87.0f), x) * broadcast(1.44269504f);
    vf shifted = scaled + magic;
    vf r = scaled - (shifted - magic);
    vf y = broadcast(5.5171669e-2f) * r + broadcast(2.4261195e-1f);
    y = y * r + broadcast(6.9326099e-1f);
    y = y * r + broadcast(9.9992807e-1f);
    return y * (vf)(((vi)shifted << 23) + (127 << 23));
}

// In the order of ACTIVATIONS in ops/native/encoder.py; GELU_FAST is internal.
enum Activation { GELU, GELU_TANH, RELU, SILU, GELU_FAST };

template <int ACTIVATION> static inline vf activate(vf x) {
    if (ACTIVATION == GELU_FAST) {  // error at most 3e-5: the normal CDF as the logistic function of a polynomial
        vf u = x * x;
        u = select(u > broadcast(64.0f), broadcast(64.0f), u);
        vf z = x * ((broadcast(-7.03046019e-4f) * u + broadcast(7.40113728e-2f)) * u + broadcast(1.59501567f));
        z = select(z > broadcast(80.0f), broadcast(80.0f), z);
        z = select(z < broadcast(-80.0f), broadcast(-80.0f), z);  // exp_fast overflows beyond
        return x / (broadcast(1.0f) + exp_fast(-z));
    }
    if (ACTIVATION == GELU) {  // x times the normal CDF; its tail is exp(-z^2) times a polynomial in 1 / (1 + 0.55 z)
        vf z = abs(x) * broadcast(0.70710678f);
        vf t = broadcast(1.0f) / (broadcast(1.0f) + broadcast(0.55f) * z);
        vf q = broadcast(0.10732429f);
        q = q * t - broadcast(0.51803766f);
        q = q * t + broadcast(0.75971367f);
        q = q * t - broadcast(0.04142571f);
        q = q * t + broadcast(0.39084198f);
        q = q * t + broadcast(0.30158345f);
        vf tail = broadcast(0.5f) * x * (q * t * exp(-(z * z)));
        return select(x > vf{}, x - tail, tail);
    }
    if (ACTIVATION == GELU_TANH) {
        vf u = broadcast(1.5957691216f) * (x + broadcast(0.044715f) * x * x * x);
        return x / (broadcast(1.0f) + exp(-u));
    }
    if (ACTIVATION == RELU) return select(x < vf{}, vf{}, x);
    return x / (broadcast(1.0f) + exp(-x));
}
