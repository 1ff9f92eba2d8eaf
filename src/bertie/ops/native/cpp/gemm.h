// GEMM with packed weights: activations (rows, K) times a weight (N, K), transposed, in f32, bf16 or int8.
//
// The weight is packed into panels of NR output columns; a microkernel computes a tile of up to MR rows by NR columns
// in registers. GEMMs end in an epilogue (bias, activation, residual, ...), so results are written to memory once.

constexpr Index NR = 2 * LANES;  // columns of a panel: two registers

// Weight (N, K) in f32 panels: [N / NR][K][NR].
static void pack_f32(Arena &arena, Linear &linear, const float *weight) {
    Index panels = (linear.n + NR - 1) / NR;
    linear.f32 = (float *)arena.allocate(panels * linear.k * NR * sizeof(float));
    for (Index p = 0; p < panels; p++)
        for (Index k = 0; k < linear.k; k++)
            for (Index j = 0; j < NR; j++) {
                Index n = p * NR + j;
                linear.f32[(p * linear.k + k) * NR + j] = n < linear.n ? weight[n * linear.k + k] : 0.0f;
            }
}

// Relative position table (R, H * d) in panels per head: [H][R / NR][d][NR].
static void pack_relative(std::vector<float> &packed, const float *table, Index rows, Index heads, Index d) {
    Index panels = (rows + NR - 1) / NR;
    packed.assign(heads * panels * d * NR, 0.0f);
    for (Index h = 0; h < heads; h++)
        for (Index r = 0; r < rows; r++)
            for (Index i = 0; i < d; i++)
                packed[((h * panels + r / NR) * d + i) * NR + r % NR] = table[(r * heads + h) * d + i];
}

template <int R> struct Tile {  // accumulators of R rows by NR columns
    vf acc[R][2];
};

template <int R> INLINE Tile<R> microkernel(const float *a, Index lda, const float *b, Index k) {
    Tile<R> tile;
    for (int r = 0; r < R; r++) tile.acc[r][0] = tile.acc[r][1] = vf{};
    for (Index i = 0; i < k; i++, b += NR) {
        vf b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf x = broadcast(a[r * lda + i]);
            tile.acc[r][0] += x * b0;
            tile.acc[r][1] += x * b1;
        }
    }
    return tile;
}

// Calls f(integral_constant<R>, first row) for tiles of MR rows and then for one tile of the remaining rows.
template <int R, class F> static inline void remaining_tile(Index remaining, Index row, F &&f) {
    if constexpr (R > 0) {
        if (remaining == R) f(std::integral_constant<int, R>(), row);
        else remaining_tile<R - 1>(remaining, row, f);
    }
}

template <class F> static inline void for_each_tile(Index first, Index last, F &&f) {
    Index row = first;
    for (; row + MR <= last; row += MR) f(std::integral_constant<int, MR>(), row);
    remaining_tile<MR - 1>(last - row, row, f);
}

#if INT8_DOT == 4 && INT8_SIGNED
typedef int8_t Activation8;  // quantized activation
typedef int8_t Weight8;      // quantized weight
static inline vi dot(vi acc, vi a, vi b) {
    return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
}
#elif INT8_DOT == 4
typedef uint8_t Activation8;
typedef int8_t Weight8;
static inline vi dot(vi acc, vi a, vi b) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b); }
#elif INT8_DOT == 2
typedef int16_t Activation8;
typedef int16_t Weight8;
#if LANES == 16
static inline vi dot(vi acc, vi a, vi b) { return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#elif LANES == 8
static inline vi dot(vi acc, vi a, vi b) { return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
static inline vi dot(vi acc, vi a, vi b) {
    int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return acc + (vi)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
#endif
#endif

#if INT8_DOT
constexpr Index GROUP = INT8_DOT;  // consecutive k per 32-bit lane

// int8 weight (N, K) in panels: [N / NR][K / GROUP][NR][GROUP].
static void pack_int8(Arena &arena, Linear &linear, const int8_t *weight, const float *scales) {
    Index panels = (linear.n + NR - 1) / NR, groups = (linear.k + GROUP - 1) / GROUP;
    size_t bytes = panels * groups * NR * GROUP * sizeof(Weight8);
    Weight8 *packed = (Weight8 *)memset(arena.allocate(bytes), 0, bytes);
    linear.int8 = packed;
    linear.scales.assign(panels * NR, 0.0f);
    linear.row_sums.assign(panels * NR, 0.0f);
    for (Index n = 0; n < linear.n; n++) {
        linear.scales[n] = scales[n];
        int32_t total = 0;
        for (Index k = 0; k < linear.k; k++) {
            int8_t value = weight[n * linear.k + k];
            total += value;
            packed[(((n / NR) * groups + k / GROUP) * NR + n % NR) * GROUP + k % GROUP] = value;
        }
        linear.row_sums[n] = (float)total;
    }
}

template <int R> struct Int8Tile {
    vi acc[R][2];
};

template <int R> INLINE Int8Tile<R> microkernel(const Activation8 *a, Index lda, const Weight8 *b, Index groups) {
    Int8Tile<R> tile;
    for (int r = 0; r < R; r++) tile.acc[r][0] = tile.acc[r][1] = vi{};
    for (Index i = 0; i < groups; i++, b += NR * GROUP) {
        vi b0 = *(const vi *)b, b1 = *(const vi *)(b + LANES * GROUP);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t group;
            memcpy(&group, a + r * lda + i * GROUP, 4);
            vi x = group - vi{};
            tile.acc[r][0] = dot(tile.acc[r][0], x, b0);
            tile.acc[r][1] = dot(tile.acc[r][1], x, b1);
        }
    }
    return tile;
}

// Narrows 32-bit lanes to activations.
static inline void store_narrow(Activation8 *out, vi values) {
#if LANES == 4 && INT8_DOT == 4
    int16x4_t narrow = vmovn_s32((int32x4_t)values);
    int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(narrow, narrow))), 0);
    memcpy(out, &four, 4);
#elif LANES == 4
    vst1_s16(out, vmovn_s32((int32x4_t)values));
#elif INT8_DOT == 4
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)values));
#elif LANES == 16
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)values));
#else
    __m256i packed = _mm256_packs_epi32((__m256i)values, (__m256i)values);  // within each 128-bit half
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#endif
}

constexpr int32_t OFFSET = INT8_SIGNED ? 128 : 0;  // of quantized activations

// Asymmetric dynamic quantization per row: x = scale * (q - zero), q in [0, 255] minus OFFSET; the range includes 0.
static void quantize(const float *x, Index rows, Index width, Index stride, Activation8 *out, float *scales,
                     float *zeros) {
    for (Index r = 0; r < rows; r++, x += width, out += stride) {
        vf high = vf{}, low = vf{}, non_finite = vf{};  // x - x is NaN where x is NaN or infinite
        Index i = 0;
        for (; i + LANES <= width; i += LANES) {
            vf v = load(x + i);
            high = max(high, v);
            low = max(low, -v);
            non_finite += v - v;
        }
        float top = reduce_max(high), bottom = reduce_max(low), invalid = reduce_sum(non_finite);
        for (; i < width; i++) top = std::max(top, x[i]), bottom = std::max(bottom, -x[i]), invalid += x[i] - x[i];
        float range = top + bottom, inverse = invalid == 0.0f && range > 0 ? 255.0f / range : 0.0f;
        float zero = std::nearbyint(bottom * inverse);
        scales[r] = invalid == 0.0f ? range / 255.0f : NAN;
        zeros[r] = zero - OFFSET;
        // Rounding at both ends may exceed 255 by one.
        for (i = 0; i + LANES <= width; i += LANES) {
            vf q = load(x + i) * broadcast(inverse) + broadcast(zero);
            store_narrow(out + i, round_magic(select(q > broadcast(255.0f), broadcast(255.0f), q)) - OFFSET);
        }
        for (; i < width; i++) out[i] = (Activation8)(lrintf(std::min(255.0f, x[i] * inverse + zero)) - OFFSET);
        for (; i < stride; i++) out[i] = 0;
    }
}
#endif

#if BF16
// bf16 weight (N, K) in panels of pairs: [N / NR][K / 2][NR][2].
static void pack_bf16(Arena &arena, Linear &linear, const uint16_t *weight) {
    Index panels = (linear.n + NR - 1) / NR, pairs = (linear.k + 1) / 2;
    size_t bytes = panels * pairs * NR * 2 * sizeof(uint16_t);
    linear.bf16 = (uint16_t *)memset(arena.allocate(bytes), 0, bytes);
    for (Index n = 0; n < linear.n; n++)
        for (Index k = 0; k < linear.k; k++)
            linear.bf16[(((n / NR) * pairs + k / 2) * NR + n % NR) * 2 + k % 2] = weight[n * linear.k + k];
}
#endif

struct Scratch {  // one thread's buffers
    // GEMM inputs in int8 or bf16
    std::vector<uint8_t> quantized;
    std::vector<float> scales, zeros;
    // attention
    std::vector<float> keys, values, scores, c2p, p2c, key_scales, value_scales;
    std::vector<uint8_t> keys8, values8, queries8, probabilities8;
    // hidden states
    std::vector<float> x, normed, ff, added;
};

// The activations of a GEMM, in the format that the weight asks for.
struct Input {
    const float *f32;
    Index stride;
#if BF16
    const uint16_t *bf16;
    Index bf16_stride;
#endif
#if INT8_DOT
    const Activation8 *int8;
    Index int8_stride;
    const float *scales, *zeros;
#endif
};

static Input prepare_input(const Linear &linear, const float *x, Index first, Index last, Scratch &scratch) {
    Input input{};
    input.f32 = x;
    input.stride = linear.k;
#if INT8_DOT
    if (linear.int8) {
        input.int8_stride = (linear.k + 63) / 64 * 64;
        scratch.quantized.resize(last * input.int8_stride * sizeof(Activation8));
        scratch.scales.resize(last);
        scratch.zeros.resize(last);
        auto *quantized = (Activation8 *)scratch.quantized.data();
        quantize(x + first * linear.k, last - first, linear.k, input.int8_stride, quantized + first * input.int8_stride,
                 &scratch.scales[first], &scratch.zeros[first]);
        input.int8 = quantized;
        input.scales = scratch.scales.data();
        input.zeros = scratch.zeros.data();
    }
#endif
#if BF16
    if (linear.bf16) {
        input.bf16_stride = (linear.k + 31) / 32 * 32;
        scratch.quantized.resize(last * input.bf16_stride * sizeof(uint16_t));
        auto *rounded = (uint16_t *)scratch.quantized.data();
        bf16::round(x + first * linear.k, last - first, linear.k, input.bf16_stride,
                    rounded + first * input.bf16_stride);
        input.bf16 = rounded;
    }
#endif
    return input;
}

// Rows [first, last) times the weight, plus bias. The panels are divided into `parts`, of which this call computes
// `part`. epilogue(row, column, v0, v1) receives NR columns of a row in two registers.
template <class Epilogue>
static inline void gemm(const Input &a, Index first, Index last, const Linear &linear, int part, int parts,
                        Epilogue &&epilogue) {
    Index panels = (linear.n + NR - 1) / NR;
    for (Index p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
        vf bias0 = vf{}, bias1 = vf{};
        if (!linear.bias.empty()) bias0 = load(&linear.bias[p * NR]), bias1 = load(&linear.bias[p * NR + LANES]);
#if INT8_DOT
        if (linear.int8) {
            Index groups = (linear.k + GROUP - 1) / GROUP;
            const Weight8 *b = (const Weight8 *)linear.int8 + p * groups * NR * GROUP;
            vf scale0 = load(&linear.scales[p * NR]), scale1 = load(&linear.scales[p * NR + LANES]);
            vf sum0 = load(&linear.row_sums[p * NR]), sum1 = load(&linear.row_sums[p * NR + LANES]);
            for_each_tile(first, last, [&](auto count, Index row) TARGET {
                constexpr int R = decltype(count)::value;
                auto tile = microkernel<R>(a.int8 + row * a.int8_stride, a.int8_stride, b, groups);
                for (int r = 0; r < R; r++) {
                    vf scale = broadcast(a.scales[row + r]), zero = broadcast(a.zeros[row + r]);
                    vf v0 = (__builtin_convertvector(tile.acc[r][0], vf) - zero * sum0) * (scale0 * scale) + bias0;
                    vf v1 = (__builtin_convertvector(tile.acc[r][1], vf) - zero * sum1) * (scale1 * scale) + bias1;
                    epilogue(row + r, p * NR, v0, v1);
                }
            });
            continue;
        }
#endif
#if BF16
        if (linear.bf16) {
            Index pairs = (linear.k + 1) / 2;
            for_each_tile(first, last, [&](auto count, Index row) TARGET {
                constexpr int R = decltype(count)::value;
                const uint16_t *rows = a.bf16 + row * a.bf16_stride;
                Tile<R> tile;
                bf16::microkernel<R>(rows, a.bf16_stride, linear.bf16 + p * pairs * NR * 2, pairs, tile.acc);
                for (int r = 0; r < R; r++) epilogue(row + r, p * NR, tile.acc[r][0] + bias0, tile.acc[r][1] + bias1);
            });
            continue;
        }
#endif
        const float *b = linear.f32 + p * linear.k * NR;
        for_each_tile(first, last, [&](auto count, Index row) TARGET {
            constexpr int R = decltype(count)::value;
            auto tile = microkernel<R>(a.f32 + row * a.stride, a.stride, b, linear.k);
            for (int r = 0; r < R; r++) epilogue(row + r, p * NR, tile.acc[r][0] + bias0, tile.acc[r][1] + bias1);
        });
    }
}

// Stores NR columns of a row of n columns; the last panel may be wider than the row.
static inline void store_panel(float *row, Index column, Index n, vf v0, vf v1) {
    if (column + NR <= n) {
        store(row + column, v0);
        store(row + column + LANES, v1);
        return;
    }
    float panel[NR];
    store(panel, v0);
    store(panel + LANES, v1);
    memcpy(row + column, panel, (n - column) * sizeof(float));
}

static inline void load_panel(const float *row, Index column, Index n, vf &v0, vf &v1) {
    if (column + NR <= n) {
        v0 = load(row + column);
        v1 = load(row + column + LANES);
        return;
    }
    float panel[NR] = {};
    memcpy(panel, row + column, (n - column) * sizeof(float));
    v0 = load(panel);
    v1 = load(panel + LANES);
}
