// The encoder's arithmetic for one instruction set; encoder.cpp includes this file once for each of them.
//
// VW is how many floats a register holds and TALL how many rows a tile of a product has; DOT says how bytes are
// multiplied: 4 at a time (VNNI), 2 at a time (as 16-bit numbers), or not at all (0). HALVES says that pairs of bf16
// can be multiplied, by chips that have AVX512_BF16.
//
// Every number of a row is computed by the same operations in the same order whatever the other rows are: a text's
// result does not depend on its neighbours, to the bit.

typedef float vf __attribute__((vector_size(VW * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VW * 4), aligned(4), may_alias));

constexpr long NR = 2 * VW;  // columns of a panel

static inline vf load(const float *p) { return *(const vf *)p; }
static inline void store(float *p, vf x) { *(vf *)p = x; }
static inline vf all(float x) { return x - vf{}; }
static inline vf choose(vi mask, vf yes, vf no) { return mask ? yes : no; }
static inline vf larger(vf a, vf b) { return choose(a < b, b, a); }  // NaN of a stays

// Of all numbers of a register, halves first.
template <class Join> static inline float joined(vf x, Join &&join) {
#if VW == 16
    __m256 low = _mm512_castps512_ps256((__m512)x), high = _mm512_extractf32x8_ps((__m512)x, 1);
    __m256 eight = join(low, high);
    __m128 four = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif VW == 8
    __m128 four = join(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
#else
    vf four = x;
#endif
    return join(join(four[0], four[2]), join(four[1], four[3]));
}

static inline float sum(vf x) {
    return joined(x, [](auto a, auto b) { return a + b; });
}

static inline float most(vf x) {
    return joined(x, [](auto a, auto b) { return a < b ? b : a; });
}

// e to the power x, to about one part in 10^7; 0 below -87.
static inline vf exponential(vf x) {
    vf low = choose(x < all(-87.0f), all(-87.0f), x);
    low = choose(low > all(88.0f), all(88.0f), low);
    const vf shift = all(12582912.0f);  // 1.5 * 2^23: what is added to it is rounded to a whole number
    vf shifted = low * all(1.44269504f) + shift;
    vf whole = shifted - shift;
    vf rest = low - whole * all(0.693359375f);
    rest = rest + whole * all(2.12194440e-4f);
    vf y = all(1.9875691500e-4f);
    y = y * rest + all(1.3981999507e-3f);
    y = y * rest + all(8.3334519073e-3f);
    y = y * rest + all(4.1665795894e-2f);
    y = y * rest + all(1.6666665459e-1f);
    y = y * rest + all(5.0000001201e-1f);
    y = y * rest * rest + rest + all(1.0f);
    vi power = ((vi)shifted << 23) + (127 << 23);  // the low bits of `shifted` are the whole number
    return choose(x < all(-87.0f), vf{}, y * (vf)power);
}

// The same to about one part in 10^4, not below e^-87: for what is rounded to a byte.
static inline vf nearly_exponential(vf x) {
    const vf shift = all(12582912.0f);
    vf scaled = choose(x < all(-87.0f), all(-87.0f), x) * all(1.44269504f);
    vf shifted = scaled + shift;
    vf rest = scaled - (shifted - shift);
    vf y = all(5.5171669e-2f) * rest + all(2.4261195e-1f);
    y = y * rest + all(6.9326099e-1f);
    y = y * rest + all(9.9992807e-1f);
    return y * (vf)(((vi)shifted << 23) + (127 << 23));
}

constexpr int NEARLY_GELU = 4;

// Activations, as native.ACTIVATIONS counts them.
template <int KIND> static inline vf activated(vf x) {
    if (KIND == NEARLY_GELU) {  // to 3e-5: the normal distribution as a logistic one of a polynomial
        vf u = x * x;
        u = choose(u > all(64.0f), all(64.0f), u);
        vf z = x * ((all(-7.03046019e-4f) * u + all(7.40113728e-2f)) * u + all(1.59501567f));
        z = choose(z > all(80.0f), all(80.0f), z);
        z = choose(z < all(-80.0f), all(-80.0f), z);  // the other end of what has an exponential
        return x / (all(1.0f) + nearly_exponential(-z));
    }
    if (KIND == 0) {  // gelu: x times the normal distribution, whose tail is e^(-z^2) times a polynomial of 1 / (1 + z)
        vf z = choose(x < vf{}, -x, x) * all(0.70710678f);
        vf t = all(1.0f) / (all(1.0f) + all(0.55f) * z);
        vf q = all(0.10732429f);
        q = q * t - all(0.51803766f);
        q = q * t + all(0.75971367f);
        q = q * t - all(0.04142571f);
        q = q * t + all(0.39084198f);
        q = q * t + all(0.30158345f);
        vf tail = all(0.5f) * x * (q * t * exponential(-(z * z)));
        return choose(x > vf{}, x - tail, tail);
    }
    if (KIND == 1) {
        vf u = all(1.5957691216f) * (x + all(0.044715f) * x * x * x);
        return x / (all(1.0f) + exponential(-u));
    }
    if (KIND == 2) return choose(x < vf{}, vf{}, x);
    return x / (all(1.0f) + exponential(-x));
}

// --- products: rows of A times the columns of a packed matrix ---

// One matrix (N, K) of a linear layer, in panels of NR columns: [N / NR][K][NR].
static void pack(Arena &arena, Matrix &m, const float *w) {
    long panels = (m.n + NR - 1) / NR;
    m.floats = (float *)arena.take(panels * m.k * NR * sizeof(float));
    for (long p = 0; p < panels; p++)
        for (long k = 0; k < m.k; k++)
            for (long j = 0; j < NR; j++) {
                long n = p * NR + j;
                m.floats[(p * m.k + k) * NR + j] = n < m.n ? w[n * m.k + k] : 0.0f;
            }
}

// A table (R, H d) of relative positions, of each head in panels: [H][R / NR][d][NR].
static void pack_relative(std::vector<float> &out, const float *table, long rows, long heads, long d) {
    long panels = (rows + NR - 1) / NR;
    out.assign(heads * panels * d * NR, 0.0f);
    for (long h = 0; h < heads; h++)
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < d; i++)
                out[((h * panels + r / NR) * d + i) * NR + r % NR] = table[(r * heads + h) * d + i];
}

template <int R> struct Tile {  // R rows of a panel
    vf at[R][2];
};

template <int R> INLINE Tile<R> multiply(const float *a, long lda, const float *b, long k) {
    Tile<R> acc;
    for (int r = 0; r < R; r++) acc.at[r][0] = acc.at[r][1] = vf{};
    for (long i = 0; i < k; i++, b += NR) {
        vf b0 = load(b), b1 = load(b + VW);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf x = all(a[r * lda + i]);
            acc.at[r][0] += x * b0;
            acc.at[r][1] += x * b1;
        }
    }
    return acc;
}

// Calls `f` with a constant number of rows, TALL at a time and then the rest.
template <int R, class F> static inline void rest(long left, long row, F &&f) {
    if constexpr (R > 0) {
        if (left == R) f(std::integral_constant<int, R>(), row);
        else rest<R - 1>(left, row, f);
    }
}

template <class F> static inline void by_tiles(long first, long last, F &&f) {
    long row = first;
    for (; row + TALL <= last; row += TALL) f(std::integral_constant<int, TALL>(), row);
    rest<TALL - 1>(last - row, row, f);
}

#if DOT == 4
constexpr long GROUP = 4;
typedef uint8_t Code;  // of an activation
static inline vi dot(vi acc, vi a, vi b) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
typedef int8_t Weight;
#elif DOT == 2
constexpr long GROUP = 2;
typedef int16_t Code;
#if VW == 16
static inline vi dot(vi acc, vi a, vi b) { return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
static inline vi dot(vi acc, vi a, vi b) { return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif
typedef int16_t Weight;
#endif

#if DOT
// Codes (N, K) in panels: [N / NR][K / GROUP][NR][GROUP].
static void pack_codes(Arena &arena, Matrix &m, const int8_t *w, const float *scales) {
    long panels = (m.n + NR - 1) / NR, groups = (m.k + GROUP - 1) / GROUP;
    size_t bytes = panels * groups * NR * GROUP * sizeof(Weight);
    Weight *out = (Weight *)memset(arena.take(bytes), 0, bytes);
    m.codes = out;
    m.scales.assign(panels * NR, 0.0f);
    m.sums.assign(panels * NR, 0.0f);
    for (long n = 0; n < m.n; n++) {
        m.scales[n] = scales[n];
        int32_t total = 0;
        for (long k = 0; k < m.k; k++) {
            int8_t code = w[n * m.k + k];
            total += code;
            out[(((n / NR) * groups + k / GROUP) * NR + n % NR) * GROUP + k % GROUP] = code;
        }
        m.sums[n] = (float)total;
    }
}

template <int R> struct Sums {
    vi at[R][2];
};

template <int R> INLINE Sums<R> multiply(const Code *a, long lda, const Weight *b, long groups) {
    Sums<R> acc;
    for (int r = 0; r < R; r++) acc.at[r][0] = acc.at[r][1] = vi{};
    for (long i = 0; i < groups; i++, b += NR * GROUP) {
        vi b0 = *(const vi *)b, b1 = *(const vi *)(b + VW * GROUP);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, a + r * lda + i * GROUP, 4);
            vi x = pair - vi{};
            acc.at[r][0] = dot(acc.at[r][0], x, b0);
            acc.at[r][1] = dot(acc.at[r][1], x, b1);
        }
    }
    return acc;
}

static inline void put_codes(Code *out, vi codes) {
#if DOT == 4
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)codes));
#elif VW == 16
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)codes));
#else
    __m256i pairs = _mm256_packs_epi32((__m256i)codes, (__m256i)codes);  // in each half
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#endif
}

// Rows as codes from 0 to 255: each row's own least and greatest number, and 0, lie on the scale. A number is
// scale * (code - zero).
static void quantize(const float *x, long rows, long width, long stride, Code *out, float *scales, float *zeros) {
    const vf shift = all(12582912.0f);
    for (long r = 0; r < rows; r++, x += width, out += stride) {
        vf high = vf{}, low = vf{}, wrong = vf{};  // x - x is no number where x is none, or beyond all
        long i = 0;
        for (; i + VW <= width; i += VW) {
            vf v = load(x + i);
            high = larger(high, v);
            low = larger(low, -v);
            wrong += v - v;
        }
        float top = most(high), bottom = most(low), odd = sum(wrong);
        for (; i < width; i++) top = std::max(top, x[i]), bottom = std::max(bottom, -x[i]), odd += x[i] - x[i];
        float range = top + bottom, inverse = odd == 0.0f && range > 0 ? 255.0f / range : 0.0f;
        float zero = std::nearbyint(bottom * inverse);
        scales[r] = odd == 0.0f ? range / 255.0f : NAN;
        zeros[r] = zero;
        // Rounding of both ends may pass the last code by one.
        for (i = 0; i + VW <= width; i += VW) {
            vf code = load(x + i) * all(inverse) + all(zero);
            put_codes(out + i, (vi)(choose(code > all(255.0f), all(255.0f), code) + shift) - 0x4B400000);
        }
        for (; i < width; i++) out[i] = (Code)lrintf(std::min(255.0f, x[i] * inverse + zero));
        for (; i < stride; i++) out[i] = 0;
    }
}
#endif

#if HALVES
// Weights in bf16 (N, K) in panels of pairs: [N / NR][K / 2][NR][2].
static void pack_halves(Arena &arena, Matrix &m, const uint16_t *w) {
    long panels = (m.n + NR - 1) / NR, pairs = (m.k + 1) / 2;
    size_t bytes = panels * pairs * NR * 2 * sizeof(uint16_t);
    m.halves = (uint16_t *)memset(arena.take(bytes), 0, bytes);
    for (long n = 0; n < m.n; n++)
        for (long k = 0; k < m.k; k++)
            m.halves[(((n / NR) * pairs + k / 2) * NR + n % NR) * 2 + k % 2] = w[n * m.k + k];
}

template <int R> INLINE Tile<R> multiply(const uint16_t *a, long lda, const uint16_t *b, long pairs) {
    Tile<R> acc;
    for (int r = 0; r < R; r++) acc.at[r][0] = acc.at[r][1] = vf{};
    for (long i = 0; i < pairs; i++, b += NR * 2) {
        auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + NR);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, a + r * lda + i * 2, 4);
            auto x = (__m512bh)_mm512_set1_epi32(pair);
            acc.at[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc.at[r][0], x, b0);
            acc.at[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc.at[r][1], x, b1);
        }
    }
    return acc;
}

// Rows rounded to bf16.
static void halve(const float *x, long rows, long width, long stride, uint16_t *out) {
    for (long r = 0; r < rows; r++, x += width, out += stride)
        for (long i = 0; i < stride; i += VW) {
            long some = std::max(0L, std::min((long)VW, width - i));
            auto v = _mm512_maskz_loadu_ps((__mmask16)((1u << some) - 1), x + i);
            _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(v));
        }
}
#endif

// What a product reads: rows of floats or, for weights in bytes, of codes with their scales, or of bf16.
struct Rows {
    const float *floats;
    long stride;
#if HALVES
    const uint16_t *halves;
    long half_stride;
#endif
#if DOT
    const Code *codes;
    long code_stride;
    const float *scales, *zeros;
#endif
};

// For rows [first, last) and the panels of `share` of `shares`: `end(row, column, left, right)` gets both halves of
// each stretch of a row, the bias added.
template <class End>
static inline void product(const Rows &a, long first, long last, const Matrix &m, int share, int shares, End &&end) {
    long panels = (m.n + NR - 1) / NR;
    for (long p = panels * share / shares; p < panels * (share + 1) / shares; p++) {
        vf bias0 = vf{}, bias1 = vf{};
        if (!m.bias.empty()) bias0 = load(&m.bias[p * NR]), bias1 = load(&m.bias[p * NR + VW]);
#if DOT
        if (m.codes) {
            long groups = (m.k + GROUP - 1) / GROUP;
            const Weight *b = (const Weight *)m.codes + p * groups * NR * GROUP;
            vf scale0 = load(&m.scales[p * NR]), scale1 = load(&m.scales[p * NR + VW]);
            vf sum0 = load(&m.sums[p * NR]), sum1 = load(&m.sums[p * NR + VW]);
            by_tiles(first, last, [&](auto count, long row) {
                constexpr int R = decltype(count)::value;
                auto acc = multiply<R>(a.codes + row * a.code_stride, a.code_stride, b, groups);
                for (int r = 0; r < R; r++) {
                    vf s = all(a.scales[row + r]), zero = all(a.zeros[row + r]);
                    vf v0 = (__builtin_convertvector(acc.at[r][0], vf) - zero * sum0) * (scale0 * s) + bias0;
                    vf v1 = (__builtin_convertvector(acc.at[r][1], vf) - zero * sum1) * (scale1 * s) + bias1;
                    end(row + r, p * NR, v0, v1);
                }
            });
            continue;
        }
#endif
#if HALVES
        if (m.halves) {
            long pairs = (m.k + 1) / 2;
            by_tiles(first, last, [&](auto count, long row) {
                constexpr int R = decltype(count)::value;
                const uint16_t *rows = a.halves + row * a.half_stride;
                auto acc = multiply<R>(rows, a.half_stride, m.halves + p * pairs * NR * 2, pairs);
                for (int r = 0; r < R; r++) end(row + r, p * NR, acc.at[r][0] + bias0, acc.at[r][1] + bias1);
            });
            continue;
        }
#endif
        const float *b = m.floats + p * m.k * NR;
        by_tiles(first, last, [&](auto count, long row) {
            constexpr int R = decltype(count)::value;
            auto acc = multiply<R>(a.floats + row * a.stride, a.stride, b, m.k);
            for (int r = 0; r < R; r++) end(row + r, p * NR, acc.at[r][0] + bias0, acc.at[r][1] + bias1);
        });
    }
}

// Both halves of a stretch into a row of n numbers.
static inline void put(float *row, long column, long n, vf v0, vf v1) {
    if (column + NR <= n) {
        store(row + column, v0);
        store(row + column + VW, v1);
        return;
    }
    float both[NR];
    store(both, v0);
    store(both + VW, v1);
    memcpy(row + column, both, (n - column) * sizeof(float));
}

static inline void get(const float *row, long column, long n, vf &v0, vf &v1) {
    if (column + NR <= n) {
        v0 = load(row + column);
        v1 = load(row + column + VW);
        return;
    }
    float both[NR] = {};
    memcpy(both, row + column, (n - column) * sizeof(float));
    v0 = load(both);
    v1 = load(both + VW);
}

// --- norms ---

static void normalize(const Norm &norm, const float *x, float *out, long width) {
    vf total = vf{};
    float tail = 0, mean = 0;
    long i;
    if (!norm.rms) {
        for (i = 0; i + VW <= width; i += VW) total += load(x + i);
        for (; i < width; i++) tail += x[i];
        mean = (sum(total) + tail) / width;
        total = vf{};
        tail = 0;
    }
    for (i = 0; i + VW <= width; i += VW) {
        vf d = load(x + i) - all(mean);
        total += d * d;
    }
    for (; i < width; i++) tail += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / std::sqrt((sum(total) + tail) / width + norm.eps);
    const float *w = norm.weight.data(), *b = norm.bias.empty() ? nullptr : norm.bias.data();
    for (i = 0; i + VW <= width; i += VW) {
        vf y = (load(x + i) - all(mean)) * all(scale) * load(w + i);
        store(out + i, b ? y + load(b + i) : y);
    }
    for (; i < width; i++) out[i] = (x[i] - mean) * scale * w[i] + (b ? b[i] : 0.0f);
}

// --- attention of one head over a stretch of one text's queries ---

constexpr long STRETCH = 40 * TALL;  // queries of an item of work

struct Scratch {  // a thread's own
    std::vector<float> keys, values, scores, met_query, met_key, x, normed, ff;
    std::vector<uint8_t> codes, key_codes, value_codes, query_codes, weights;
    std::vector<float> scales, zeros;
};

static void rotate(float *row, const float *cos, const float *sin, long d) {
    long half = d / 2;
    for (long i = 0; i < half; i++) {
        float a = row[i], b = row[i + half];
        row[i] = a * cos[i] - b * sin[i];
        row[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// Where a tile of queries [row, row + count) looks: panels of the keys from `low` on, and in them what a query sees.
struct View {
    long n, window, low, high;

    View(long n, long window, long from, long to) : n(n), window(window) {
        low = window < 0 ? 0 : std::max(0L, from - window) / NR * NR;
        high = window < 0 ? n : std::min(n, to + window);
    }
    long panels() const { return (high - low + NR - 1) / NR; }
    long first(long row) const { return window < 0 ? 0 : (std::max(low, row - window) - low) / NR; }
    long last(long row, long count) const {
        return window < 0 ? panels() : (std::min(high, row + count + window) - low + NR - 1) / NR;
    }
    // Hides the scores of a tile's panels that the query does not see.
    void hide(float *scores, long query, long begin, long end) const {
        long from = window < 0 ? 0 : std::max(0L, query - window) - low;
        long to = (window < 0 ? n : std::min(n, query + window + 1)) - low;
        for (long j = begin; j < from; j++) scores[j] = -INFINITY;
        for (long j = to; j < end; j++) scores[j] = -INFINITY;
    }
};

static inline vf greatest(const float *x, long begin, long end) {
    vf high = all(-INFINITY);
    for (long j = begin; j < end; j += VW) high = larger(high, load(x + j));
    return all(most(high));
}

// Adds to a query's scores what a head has for the distance of each key; `bias` is that of the query itself.
static inline void add_bias(float *scores, const float *bias, long query, long low, long begin, long end) {
    if (!bias) return;
    for (long j = begin; j < end; j += VW) store(scores + j, load(scores + j) + load(bias + low + j - query));
}

// What a head's queries or keys make of the distances: products with the rows of a table, some panels of it.
struct Met {
    const float *table;  // [R / NR][d][NR] of the head; null: there is none
    long first, width;   // panel and columns

    template <int R> void rows(const float *x, long stride, long d, float scale, float *out) const {
        for (long p = 0; p < width / NR; p++) {
            auto acc = multiply<R>(x, stride, table + (first + p) * d * NR, d);
            for (int r = 0; r < R; r++) {
                store(out + r * width + p * NR, acc.at[r][0] * all(scale));
                store(out + r * width + p * NR + VW, acc.at[r][1] * all(scale));
            }
        }
    }
};

static void attend(const Encoder &e, const float *qkv, long n, long head, long from, long to, long window,
                   const Distances &far, float *out, Scratch &s) {
    long d = e.head_width, wide = (e.heads + 2 * e.kv_heads) * d, own = head / (e.heads / e.kv_heads);
    const float *q = qkv + head * d, *k = qkv + (e.heads + own) * d, *v = k + e.kv_heads * d;
    View view(n, window, from, to);
    long panels = view.panels(), across = (d + NR - 1) / NR, padded = panels * NR, seen = view.high - view.low;
    s.keys.resize(padded * d);
    s.values.resize(across * padded * NR);
    s.scores.resize(TALL * padded);
    for (long j = 0; j < padded; j++) {
        float *at = &s.keys[j / NR * d * NR + j % NR];
        const float *key = k + (view.low + j) * wide;
        for (long i = 0; i < d; i++) at[i * NR] = j < seen ? key[i] : 0.0f;
    }
    for (long p = 0; p < across; p++)
        for (long j = 0; j < padded; j++) {
            float *at = &s.values[(p * padded + j) * NR];
            long some = j < seen ? std::min(NR, d - p * NR) : 0;
            memcpy(at, v + (view.low + j) * wide + p * NR, some * sizeof(float));
            memset(at + some, 0, (NR - some) * sizeof(float));
        }
    // The table's rows for the distances that this text has lie together.
    long low_row = 0, high_row = 0;
    if (far.rows) std::tie(low_row, high_row) = std::minmax({far.rows[1 - n], far.rows[n - 1]});
    long first_panel = low_row / NR, across_rows = (high_row / NR + 1 - first_panel) * NR;
    Met by_query{far.keys, first_panel, across_rows}, by_key{far.queries, first_panel, across_rows};
    if (far.keys) s.met_query.resize(TALL * across_rows);
    if (far.queries) {
        s.met_key.resize(seen * across_rows);
        by_tiles(0, seen, [&](auto count, long j) {
            by_key.rows<decltype(count)::value>(k + (view.low + j) * wide, wide, d, e.scale, &s.met_key[j * across_rows]);
        });
    }
    by_tiles(from, to, [&](auto count, long row) {
        constexpr int R = decltype(count)::value;
        if (far.keys) by_query.rows<R>(q + row * wide, wide, d, e.scale, s.met_query.data());
        long first = view.first(row), last = view.last(row, R), begin = first * NR, end = last * NR;
        for (long p = first; p < last; p++) {
            auto acc = multiply<R>(q + row * wide, wide, &s.keys[p * d * NR], d);
            for (int r = 0; r < R; r++) {
                float *at = &s.scores[r * padded + p * NR];
                store(at, acc.at[r][0] * all(e.scale));
                store(at + VW, acc.at[r][1] * all(e.scale));
            }
        }
        float inverse[R];
        for (int r = 0; r < R; r++) {
            float *at = &s.scores[r * padded];
            add_bias(at, far.bias, row + r, view.low, begin, end);
            if (far.rows) {
                const int32_t *rows = far.rows + view.low - (row + r);
                const float *mine = s.met_query.data() + r * across_rows - first_panel * NR;
                const float *theirs = s.met_key.data() - first_panel * NR;
                long last_seen = std::min(end, seen);
                if (far.keys)
                    for (long j = begin; j < last_seen; j++) at[j] += mine[rows[j]];
                if (far.queries)
                    for (long j = begin; j < last_seen; j++) at[j] += theirs[j * across_rows + rows[j]];
            }
            view.hide(at, row + r, begin, end);
            vf top = greatest(at, begin, end), total = vf{};
            for (long j = begin; j < end; j += VW) {
                vf w = exponential(load(at + j) - top);
                total += w;
                store(at + j, w);
            }
            inverse[r] = 1.0f / sum(total);
        }
        for (long p = 0; p < across; p++) {
            auto acc = multiply<R>(&s.scores[begin], padded, &s.values[(p * padded + begin) * NR], end - begin);
            for (int r = 0; r < R; r++) {
                vf by = all(inverse[r]);
                put(out + (row + r) * e.heads * d + head * d, p * NR, d, acc.at[r][0] * by, acc.at[r][1] * by);
            }
        }
    });
}

#if DOT
// Numbers as codes from -127 to 127, by their greatest.
static inline vi signed_codes(vf x, vf inverse) {
    return (vi)(x * inverse + all(12582912.0f)) - 0x4B400000;
}

constexpr long WIDEST = 1024;  // of a head in bytes

// The same with queries, keys, weights and values in bytes: a scale a query, a key and a column of values. Weights are
// bytes from 0 to 255, the greatest of a query 255, and are added up as such. d is a multiple of NR, at most WIDEST.
static void attend_bytes(const Encoder &e, const float *qkv, long n, long head, long from, long to, long window,
                         const Distances &far, float *out, Scratch &s) {
    long d = e.head_width, wide = (e.heads + 2 * e.kv_heads) * d, own = head / (e.heads / e.kv_heads);
    const float *q = qkv + head * d, *k = qkv + (e.heads + own) * d, *v = k + e.kv_heads * d;
    View view(n, window, from, to);
    long panels = view.panels(), across = (d + NR - 1) / NR, padded = panels * NR, seen = view.high - view.low;
    long groups = d / GROUP;
    s.key_codes.resize(padded * d * sizeof(Weight));
    s.value_codes.resize(across * padded * NR * sizeof(Weight));
    s.weights.resize(TALL * padded * sizeof(Code));
    s.scores.resize(TALL * padded);
    s.keys.resize(2 * padded);
    s.query_codes.resize((to - from) * d * sizeof(Code));
    s.values.resize(2 * (to - from) + across * NR);
    auto *keys = (Weight *)s.key_codes.data(), *values = (Weight *)s.value_codes.data();
    auto *queries = (Code *)s.query_codes.data(), *weights = (Code *)s.weights.data();
    float *key_scales = s.keys.data(), *key_sums = key_scales + padded;
    float *scales = s.values.data(), *zeros = scales + (to - from), *column_scales = zeros + (to - from);

    for (long r = from; r < to; r++)
        quantize(q + r * wide, 1, d, d, queries + (r - from) * d, scales + r - from, zeros + r - from);
    for (long j = 0; j < padded; j++) {
        Weight *at = keys + (j / NR * groups * NR + j % NR) * GROUP;
        const float *key = k + (view.low + j) * wide;
        Weight codes[WIDEST];
        vf high = vf{};
        vi total = vi{};
        if (j < seen)
            for (long i = 0; i < d; i += VW) high = larger(high, choose(load(key + i) < vf{}, -load(key + i), load(key + i)));
        float top = most(high), inverse = top > 0 ? 127.0f / top : 0.0f;
        for (long i = 0; i < d; i += VW) {
            vi some = j < seen ? signed_codes(load(key + i), all(inverse)) : vi{};
            total += some;
            put_codes((Code *)codes + i, some);
        }
        for (long g = 0; g < groups; g++) memcpy(at + g * NR * GROUP, codes + g * GROUP, 4);
        key_sums[j] = sum(__builtin_convertvector(total, vf));
        key_scales[j] = top / 127.0f * e.scale;
    }
    for (long c = 0; c < across * NR; c += VW) {
        vf high = vf{};
        if (c < d)
            for (long j = 0; j < seen; j++) {
                vf x = load(v + (view.low + j) * wide + c);
                high = larger(high, choose(x < vf{}, -x, x));
            }
        store(column_scales + c, high * all(1.0f / 127.0f));
        vf inverse = choose(high > vf{}, all(127.0f) / high, vf{});
        Weight *at = values + c / NR * padded * NR + c % NR * GROUP;
        for (long j = 0; j < padded; j += GROUP, at += NR * GROUP) {
            vi both = vi{};
            for (long g = 0; g < GROUP && c < d && j + g < seen; g++) {
                vi one = signed_codes(load(v + (view.low + j + g) * wide + c), inverse);
                both |= (one & (GROUP == 4 ? 0xFF : 0xFFFF)) << (int)(g * 32 / GROUP);
            }
            *(vi *)at = both;
        }
    }
    by_tiles(from, to, [&](auto count, long row) {
        constexpr int R = decltype(count)::value;
        long first = view.first(row), last = view.last(row, R), begin = first * NR, end = last * NR;
        for (long p = first; p < last; p++) {
            auto acc = multiply<R>(queries + (row - from) * d, d, keys + p * groups * NR * GROUP, groups);
            vf sum0 = load(key_sums + p * NR), sum1 = load(key_sums + p * NR + VW);
            vf scale0 = load(key_scales + p * NR), scale1 = load(key_scales + p * NR + VW);
            for (int r = 0; r < R; r++) {
                vf by = all(scales[row + r - from]), zero = all(zeros[row + r - from]);
                float *at = &s.scores[r * padded + p * NR];
                store(at, (__builtin_convertvector(acc.at[r][0], vf) - zero * sum0) * (scale0 * by));
                store(at + VW, (__builtin_convertvector(acc.at[r][1], vf) - zero * sum1) * (scale1 * by));
            }
        }
        float inverse[R];
        for (int r = 0; r < R; r++) {
            float *at = &s.scores[r * padded];
            Code *to_ = weights + r * padded;
            add_bias(at, far.bias, row + r, view.low, begin, end);
            view.hide(at, row + r, begin, end);
            vf top = greatest(at, begin, end);
            vi total = vi{};
            for (long j = begin; j < end; j += VW) {
                vf w = nearly_exponential(load(at + j) - top) * all(255.0f);
                vi code = (vi)(w + all(12582912.0f)) - 0x4B400000;
                total += code;
                put_codes(to_ + j, code);
            }
            inverse[r] = 1.0f / sum(__builtin_convertvector(total, vf));
        }
        for (long p = 0; p < across; p++) {
            const Weight *b = values + p * padded * NR + begin * NR;
            auto acc = multiply<R>(weights + begin, padded, b, (end - begin) / GROUP);
            vf scale0 = load(column_scales + p * NR), scale1 = load(column_scales + p * NR + VW);
            for (int r = 0; r < R; r++) {
                vf by = all(inverse[r]);
                put(out + (row + r) * e.heads * d + head * d, p * NR, d,
                    __builtin_convertvector(acc.at[r][0], vf) * (scale0 * by),
                    __builtin_convertvector(acc.at[r][1], vf) * (scale1 * by));
            }
        }
    });
}
#endif

// --- the encoder ---

// Rows for a product with m: as they are, or as codes.
static Rows rows_for(const Matrix &m, const float *x, long first, long last, Scratch &s) {
    Rows out{};
    out.floats = x;
    out.stride = m.k;
#if DOT
    if (m.codes) {
        out.code_stride = (m.k + 63) / 64 * 64;
        s.codes.resize(last * out.code_stride * sizeof(Code));
        s.scales.resize(last);
        s.zeros.resize(last);
        Code *codes = (Code *)s.codes.data();
        quantize(x + first * m.k, last - first, m.k, out.code_stride, codes + first * out.code_stride,
                 &s.scales[first], &s.zeros[first]);
        out.codes = codes;
        out.scales = s.scales.data();
        out.zeros = s.zeros.data();
    }
#endif
#if HALVES
    if (m.halves) {
        out.half_stride = (m.k + 31) / 32 * 32;
        s.codes.resize(last * out.half_stride * sizeof(uint16_t));
        auto *halves = (uint16_t *)s.codes.data();
        halve(x + first * m.k, last - first, m.k, out.half_stride, halves + first * out.half_stride);
        out.halves = halves;
    }
#endif
    return out;
}

// activation(up(a)) for rows [first, last) into `ff`, whose first row is `first`.
template <int KIND>
static void expand(const Encoder &e, const Block &b, const Rows &a, long first, long last, int share, int shares,
                   float *ff) {
    long f = e.ff_width;
    product(a, first, last, b.up, share, shares, [&](long row, long column, vf v0, vf v1) {
        put(ff + (row - first) * f, column, f, activated<KIND>(v0), activated<KIND>(v1));
    });
    if (e.gated)  // the same thread has the same columns of both
        product(a, first, last, b.gate, share, shares, [&](long row, long column, vf v0, vf v1) {
            vf w0, w1;
            float *at = ff + (row - first) * f;
            get(at, column, f, w0, w1);
            put(at, column, f, w0 * v0, w1 * v1);
        });
}

static void expand(const Encoder &e, const Block &b, const Rows &a, long first, long last, int share, int shares,
                   float *ff) {
    switch (e.activation == 0 && (b.down.codes || b.down.halves) ? NEARLY_GELU : e.activation) {
        case NEARLY_GELU: return expand<NEARLY_GELU>(e, b, a, first, last, share, shares, ff);
        case 0: return expand<0>(e, b, a, first, last, share, shares, ff);
        case 1: return expand<1>(e, b, a, first, last, share, shares, ff);
        case 2: return expand<2>(e, b, a, first, last, share, shares, ff);
        default: return expand<3>(e, b, a, first, last, share, shares, ff);
    }
}

// y = a product + x, into x, rows [first, last).
static void add_product(const Rows &a, long first, long last, const Matrix &m, int share, int shares, const float *x,
                        float *y) {
    product(a, first, last, m, share, shares, [&](long row, long column, vf v0, vf v1) {
        vf w0, w1;
        get(x + row * m.n, column, m.n, w0, w1);
        put(y + row * m.n, column, m.n, v0 + w0, v1 + w1);
    });
}

static const float *normed(const Norm &norm, const float *x, float *out, long first, long last, long width) {
    if (norm.weight.empty()) return x;
    for (long r = first; r < last; r++) normalize(norm, x + r * width, out + r * width, width);
    return out;
}

// Words, segments and positions, summed and normalized: row `row` of a job.
static void embed(const Encoder &e, const Job &job, long row, float *out) {
    const Embeddings &t = e.embeddings;
    const Batch &b = *job.batch;
    long at = job.start + row, D = e.width;
    const float *word = t.words + b.ids[at] * D;
    const float *more[] = {t.segments ? t.segments + b.segments[at] * D : nullptr,
                           t.positions ? t.positions + b.positions[at] * D : nullptr, t.all};
    for (long i = 0; i < D; i++) out[i] = word[i] * t.scale;
    for (const float *one : more)
        if (one)
            for (long i = 0; i < D; i++) out[i] += one[i];
    if (!t.norm.weight.empty()) normalize(t.norm, out, out, D);
}

constexpr long ROWS = 8 * TALL;  // of a feed-forward at a time, so that what lies between stays in the cache

// A thread's part of a pass over some texts. A team of several either shares the rows or, where these are few, the
// columns of every product; the texts' heads are shared in both.
static void forward(const Encoder &e, Job &job, int rank, Scratch &s) {
    long T = job.cu[job.texts], D = e.width, inner = e.heads * e.head_width;
    long wide = (e.heads + 2 * e.kv_heads) * e.head_width;
    int team = job.team;
    bool columns = team > 1 && T < 4 * TALL * team;
    long mine = columns ? 0 : T * rank / team, mine_end = columns ? T : T * (rank + 1) / team;
    int share = columns ? rank : 0, shares = columns ? team : 1;
    float *x = job.x;
    if (columns) {  // each thread keeps all rows for itself, and so waits for the others less often
        s.x.assign(x, x + T * D);
        x = s.x.data();
    }
    if (job.batch->ids) {
        for (long r = mine; r < mine_end; r++) embed(e, job, r, x + r * D);
    }
    s.normed.resize(T * D);
    for (int layer = 0; layer < (int)e.layers.size(); layer++) {
        const Layer &l = e.layers[layer];
        const Block &b = e.blocks[l.block];
        {
            const float *in = normed(b.norms[0], x, s.normed.data(), mine, mine_end, D);
            Rows a = rows_for(b.qkv, in, mine, mine_end, s);
            product(a, mine, mine_end, b.qkv, share, shares, [&](long row, long column, vf v0, vf v1) {
                put(job.qkv + row * wide, column, wide, v0, v1);
            });
        }
        job.barrier();
        if (l.rotation >= 0) {
            const float *cos = job.batch->cos[l.rotation] + job.start * e.head_width;
            const float *sin = job.batch->sin[l.rotation] + job.start * e.head_width;
            for (long row = T * rank / team; row < T * (rank + 1) / team; row++)
                for (long h = 0; h < e.heads + e.kv_heads; h++)
                    rotate(job.qkv + row * wide + h * e.head_width, cos + row * e.head_width,
                           sin + row * e.head_width, e.head_width);
            job.barrier();
        }
        auto look = attend;
#if DOT
        if (b.qkv.codes && e.head_width % NR == 0 && e.head_width <= WIDEST && !job.batch->rows) look = attend_bytes;
#endif
        long item = 0;
        for (long t = 0; t < job.texts; t++) {
            long start = job.cu[t], n = job.cu[t + 1] - start;
            for (long h = 0; h < e.heads; h++) {
                Distances far = job.batch->of_head(b, h, (e.relative_rows + NR - 1) / NR * NR * e.head_width);
                for (long from = 0; from < n; from += STRETCH, item++)
                    if (item % team == rank)
                        look(e, job.qkv + start * wide, n, h, from, std::min(n, from + STRETCH), l.window, far,
                             job.seen + start * inner, s);
            }
        }
        job.barrier();
        if (columns) {
            add_product(rows_for(b.out, job.seen, 0, T, s), 0, T, b.out, share, shares, x, job.sum);
            job.barrier();
            if (b.norms[1].weight.empty()) memcpy(x, job.sum, T * D * sizeof(float));
            else normed(b.norms[1], job.sum, x, 0, T, D);
            const float *in = normed(b.norms[2], x, s.normed.data(), 0, T, D);
            expand(e, b, rows_for(b.up, in, 0, T, s), 0, T, share, shares, job.ff);
            job.barrier();
            add_product(rows_for(b.down, job.ff, 0, T, s), 0, T, b.down, share, shares, x, job.sum2);
            job.barrier();
            if (b.norms[3].weight.empty()) memcpy(x, job.sum2, T * D * sizeof(float));
            else normed(b.norms[3], job.sum2, x, 0, T, D);
            continue;
        }
        for (long from = mine; from < mine_end; from += ROWS) {
            long to = std::min(mine_end, from + ROWS), count = to - from;
            float *here = x + from * D;
            s.ff.resize(ROWS * e.ff_width);
            add_product(rows_for(b.out, job.seen + from * inner, 0, count, s), 0, count, b.out, 0, 1, here, here);
            normed(b.norms[1], here, here, 0, count, D);
            const float *in = normed(b.norms[2], here, s.normed.data(), 0, count, D);
            expand(e, b, rows_for(b.up, in, 0, count, s), 0, count, 0, 1, s.ff.data());
            add_product(rows_for(b.down, s.ff.data(), 0, count, s), 0, count, b.down, 0, 1, here, here);
            normed(b.norms[3], here, here, 0, count, D);
        }
        if (team > 1) job.barrier();
    }
    for (long r = mine; r < mine_end; r++)
        if (!e.norm.weight.empty()) normalize(e.norm, x + r * D, x + r * D, D);
    if (columns && rank == 0) memcpy(job.x, x, T * D * sizeof(float));
}

struct Thread : Worker {
    Scratch scratch;
    void run(const Encoder &e, Job &job, int rank) override { forward(e, job, rank, scratch); }
};

static Worker *new_thread() { return new Thread(); }

#if HALVES
// How many times as fast products of bf16 are as those of floats; 0 where they are wrong.
static double trial() {
    constexpr long ROWS = 8 * TALL, K = 384, N = 768;
    Arena arena;
    Matrix floats, halves;
    floats.n = halves.n = N, floats.k = halves.k = K;
    std::vector<float> x(ROWS * K), w(N * K), one(ROWS * N), two(ROWS * N);
    std::vector<uint16_t> rounded(N * K);
    uint32_t state = 1;
    auto draw = [&] { return (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; };
    for (float &v : x) v = draw();
    for (long i = 0; i < N * K; i++) {
        w[i] = draw();
        uint32_t bits;
        memcpy(&bits, &w[i], 4);
        rounded[i] = (uint16_t)((bits + 0x8000) >> 16);
    }
    pack(arena, floats, w.data());
    pack_halves(arena, halves, rounded.data());
    Scratch s;
    auto seconds = [&](const Matrix &m, std::vector<float> &out) {
        auto start = std::chrono::steady_clock::now();
        for (int again = 0; again < 4; again++)
            product(rows_for(m, x.data(), 0, ROWS, s), 0, ROWS, m, 0, 1,
                    [&](long row, long column, vf v0, vf v1) { put(&out[row * N], column, N, v0, v1); });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 8; round++) {
        best[0] = std::min(best[0], seconds(floats, one));
        best[1] = std::min(best[1], seconds(halves, two));
    }
    double error = 0, length = 0;
    for (long i = 0; i < ROWS * N; i++) {
        error += (one[i] - two[i]) * (one[i] - two[i]);
        length += one[i] * one[i];
    }
    return error < 1e-4 * length ? best[0] / best[1] : 0.0;
}
#endif
