// Attention of one head over a block of one text's queries, with both GEMMs in int8.

#if INT8_DOT && !INT8_SIGNED  // softmax weights are unsigned
constexpr Index MAX_HEAD_WIDTH = 1024;

// Symmetric quantization to [-127, 127].
static inline vi quantize_symmetric(vf x, vf inverse_scale) { return round_magic(x * inverse_scale); }

// Keys in int8 panels [keys / NR][d / GROUP][NR][GROUP], with a scale (times the score scale) and a sum per key.
static void quantize_keys(const HeadView &head, const KeyRange &range, float score_scale, Weight8 *packed,
                          float *key_scales, float *key_sums) {
    Index d = head.d, groups = d / GROUP, padded = range.panels() * NR;
    for (Index j = 0; j < padded; j++) {
        Weight8 *target = packed + (j / NR * groups * NR + j % NR) * GROUP;
        const float *key = head.k + (range.low + j) * head.stride;
        Weight8 quantized[MAX_HEAD_WIDTH];
        vf high = vf{};
        vi total = vi{};
        if (j < range.size())
            for (Index i = 0; i < d; i += LANES) high = max(high, abs(load(key + i)));
        float top = reduce_max(high), inverse = top > 0 ? 127.0f / top : 0.0f;
        for (Index i = 0; i < d; i += LANES) {
            vi values = j < range.size() ? quantize_symmetric(load(key + i), broadcast(inverse)) : vi{};
            total += values;
            store_narrow((Activation8 *)quantized + i, values);
        }
        for (Index g = 0; g < groups; g++) memcpy(target + g * NR * GROUP, quantized + g * GROUP, 4);
        key_sums[j] = reduce_sum(__builtin_convertvector(total, vf));
        key_scales[j] = top / 127.0f * score_scale;
    }
}

// Values in int8 panels [d / NR][keys / GROUP][NR][GROUP], with a scale per column.
static void quantize_values(const HeadView &head, const KeyRange &range, Weight8 *packed, float *column_scales) {
    Index d = head.d, padded = range.panels() * NR, columns = (d + NR - 1) / NR * NR, keys = range.size();
    for (Index c = 0; c < columns; c += LANES) {
        vf high = vf{};
        if (c < d)
            for (Index j = 0; j < keys; j++) high = max(high, abs(load(head.v + (range.low + j) * head.stride + c)));
        store(column_scales + c, high * broadcast(1.0f / 127.0f));
        vf inverse = select(high > vf{}, broadcast(127.0f) / high, vf{});
        Weight8 *target = packed + c / NR * padded * NR + c % NR * GROUP;
        for (Index j = 0; j < padded; j += GROUP, target += NR * GROUP) {
            vi group = vi{};
            for (Index g = 0; g < GROUP && c < d && j + g < keys; g++) {
                vi value = quantize_symmetric(load(head.v + (range.low + j + g) * head.stride + c), inverse);
                group |= (value & (GROUP == 4 ? 0xFF : 0xFFFF)) << (int)(g * 32 / GROUP);
            }
            *(vi *)target = group;
        }
    }
}

// As attention_f32, without disentangled attention. Queries are quantized per row, keys per key, values per column.
// Softmax weights are integers in [0, 255], 255 for the largest score of a query; the denominator is their sum.
// d is a multiple of NR, at most MAX_HEAD_WIDTH.
static void attention_int8(const Encoder &e, const float *qkv, const KeyRange &range, Index head_index, Index from,
                           Index to, const RelativePosition &relative, float *out, Scratch &s) {
    HeadView head(e, qkv, head_index);
    Index d = head.d, padded = range.panels() * NR, value_panels = (d + NR - 1) / NR, groups = d / GROUP;
    Index queries = to - from;
    s.keys8.resize(padded * d * sizeof(Weight8));
    s.values8.resize(value_panels * padded * NR * sizeof(Weight8));
    s.probabilities8.resize(MR * padded * sizeof(Activation8));
    s.scores.resize(MR * padded);
    s.key_scales.resize(2 * padded);
    s.queries8.resize(queries * d * sizeof(Activation8));
    s.value_scales.resize(2 * queries + value_panels * NR);
    auto *keys8 = (Weight8 *)s.keys8.data(), *values8 = (Weight8 *)s.values8.data();
    auto *queries8 = (Activation8 *)s.queries8.data(), *probabilities8 = (Activation8 *)s.probabilities8.data();
    float *key_scales = s.key_scales.data(), *key_sums = key_scales + padded;
    float *query_scales = s.value_scales.data(), *query_zeros = query_scales + queries;
    float *column_scales = query_zeros + queries;

    for (Index r = 0; r < queries; r++)
        quantize(head.q + (from + r) * head.stride, 1, d, d, queries8 + r * d, query_scales + r, query_zeros + r);
    quantize_keys(head, range, e.scale, keys8, key_scales, key_sums);
    quantize_values(head, range, values8, column_scales);
    for_each_tile(from, to, [&](auto count, Index row) TARGET {
        constexpr int R = decltype(count)::value;
        Index first = range.first_panel(row), last = range.last_panel(row, R), begin = first * NR, end = last * NR;
        for (Index p = first; p < last; p++) {
            auto tile = microkernel<R>(queries8 + (row - from) * d, d, keys8 + p * groups * NR * GROUP, groups);
            vf sum0 = load(key_sums + p * NR), sum1 = load(key_sums + p * NR + LANES);
            vf scale0 = load(key_scales + p * NR), scale1 = load(key_scales + p * NR + LANES);
            for (int r = 0; r < R; r++) {
                vf scale = broadcast(query_scales[row + r - from]), zero = broadcast(query_zeros[row + r - from]);
                float *scores = &s.scores[r * padded + p * NR];
                store(scores, (__builtin_convertvector(tile.acc[r][0], vf) - zero * sum0) * (scale0 * scale));
                store(scores + LANES, (__builtin_convertvector(tile.acc[r][1], vf) - zero * sum1) * (scale1 * scale));
            }
        }
        float inverse[R];  // of the softmax denominator
        for (int r = 0; r < R; r++) {
            float *scores = &s.scores[r * padded];
            Activation8 *probabilities = probabilities8 + r * padded;
            add_bias(scores, relative.bias, row + r, range.low, begin, end);
            range.mask(scores, row + r, begin, end);
            vf top = row_max(scores, begin, end);
            vi total = vi{};
            for (Index j = begin; j < end; j += LANES) {
                vi w = round_magic(exp_fast(load(scores + j) - top) * broadcast(255.0f));
                total += w;
                store_narrow(probabilities + j, w);
            }
            inverse[r] = 1.0f / reduce_sum(__builtin_convertvector(total, vf));
        }
        for (Index p = 0; p < value_panels; p++) {
            const Weight8 *b = values8 + p * padded * NR + begin * NR;
            auto tile = microkernel<R>(probabilities8 + begin, padded, b, (end - begin) / GROUP);
            vf scale0 = load(column_scales + p * NR), scale1 = load(column_scales + p * NR + LANES);
            for (int r = 0; r < R; r++) {
                vf w = broadcast(inverse[r]);
                store_panel(out + (row + r) * e.heads * d + head_index * d, p * NR, d,
                            __builtin_convertvector(tile.acc[r][0], vf) * (scale0 * w),
                            __builtin_convertvector(tile.acc[r][1], vf) * (scale1 * w));
            }
        }
    });
}
#endif
