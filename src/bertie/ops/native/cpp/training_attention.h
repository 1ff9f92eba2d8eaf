// Attention of one head over one text, forward and backward, in f32, with dropout on the attention weights.

// As microkernel, with `a` transposed: a[i * lda + r].
template <int R> INLINE Tile<R> microkernel_transposed(const float *a, Index lda, const float *b, Index k) {
    Tile<R> tile;
    for (int r = 0; r < R; r++) tile.acc[r][0] = tile.acc[r][1] = vf{};
    for (Index i = 0; i < k; i++, b += NR, a += lda) {
        vf b0 = load(b), b1 = load(b + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf x = broadcast(a[r]);
            tile.acc[r][0] += x * b0;
            tile.acc[r][1] += x * b1;
        }
    }
    return tile;
}

// Packs rows (count, d) transposed into GEMM panels over the rows: [padded / NR][d][NR].
static void pack_transposed(const float *x, Index stride, Index count, Index padded, Index d,
                            std::vector<float> &packed) {
    packed.resize(padded * d);
    for (Index j = 0; j < padded; j++) {
        float *to = &packed[j / NR * d * NR + j % NR];
        const float *from = x + j * stride;
        if (j < count)
            for (Index i = 0; i < d; i++) to[i * NR] = from[i];
        else
            for (Index i = 0; i < d; i++) to[i * NR] = 0.0f;
    }
}

// Packs rows (count, d) into GEMM panels over the columns: [d / NR][padded][NR].
static void pack_rows(const float *x, Index stride, Index count, Index padded, Index d, std::vector<float> &packed) {
    Index panels = (d + NR - 1) / NR;
    packed.resize(panels * padded * NR);
    for (Index p = 0; p < panels; p++)
        for (Index j = 0; j < padded; j++) {
            float *to = &packed[(p * padded + j) * NR];
            Index columns = j < count ? std::min(NR, d - p * NR) : 0;
            memcpy(to, x + j * stride + p * NR, columns * sizeof(float));
            memset(to + columns, 0, (NR - columns) * sizeof(float));
        }
}

struct TrainingScratch {
    std::vector<float> keys, values, key_rows, value_rows, query_rows, grad_rows, weights, grads, grad_keys, grad_values;
};

constexpr Index TRAINING_BLOCK = 8 * MR;  // queries at a time in the backward pass

static void attention_forward(const AttentionCall &a, Index text, Index h, TrainingScratch &s) {
    Index start = a.cu_seqlens[text], n = a.cu_seqlens[text + 1] - start, d = a.d, kv = h / (a.heads / a.kv_heads);
    Index value_panels = (d + NR - 1) / NR, block = a.before < 0 ? n : TRAINING_BLOCK;
    const float *q = a.q + start * a.q_stride + h * d, *k = a.k + start * a.k_stride + kv * d;
    const float *v = a.v + start * a.v_stride + kv * d;
    for (Index from = 0; from < n; from += block) {
        Index to = std::min(n, from + block);
        KeyRange range(n, a.before, a.after, from, to);
        Index padded = range.panels() * NR;
        pack_transposed(k + range.low * a.k_stride, a.k_stride, range.size(), padded, d, s.keys);
        pack_rows(v + range.low * a.v_stride, a.v_stride, range.size(), padded, d, s.value_rows);
        s.weights.resize(MR * padded);
        for_each_tile(from, to, [&](auto count, Index row) TARGET {
            constexpr int R = decltype(count)::value;
            Index first = range.first_panel(row), last = range.last_panel(row, R), begin = first * NR, end = last * NR;
            for (Index p = first; p < last; p++) {
                auto tile = microkernel<R>(q + row * a.q_stride, a.q_stride, &s.keys[p * d * NR], d);
                for (int r = 0; r < R; r++) {
                    store(&s.weights[r * padded + p * NR], tile.acc[r][0] * broadcast(a.scale));
                    store(&s.weights[r * padded + p * NR + LANES], tile.acc[r][1] * broadcast(a.scale));
                }
            }
            float inverse[R];
            for (int r = 0; r < R; r++) {
                float *scores = &s.weights[r * padded];
                range.mask(scores, row + r, begin, end);
                vf top = row_max(scores, begin, end), total = vf{};
                RowDropout dropout(a.dropout, (start + row + r) * a.heads + h);
                for (Index j = begin; j < end; j += LANES) {
                    vf w = exp(load(scores + j) - top);
                    total += w;
                    store(scores + j, dropout.apply(w, range.low + j));
                }
                float sum = reduce_sum(total);
                inverse[r] = 1.0f / sum;
                a.log_sums[(start + row + r) * a.heads + h] = top[0] + std::log(sum);
            }
            for (Index p = 0; p < value_panels; p++) {
                auto tile = microkernel<R>(&s.weights[begin], padded, &s.value_rows[(p * padded + begin) * NR], end - begin);
                for (int r = 0; r < R; r++) {
                    vf w = broadcast(inverse[r]);
                    store_panel(a.out + ((start + row + r) * a.heads + h) * d, p * NR, d, tile.acc[r][0] * w,
                                tile.acc[r][1] * w);
                }
            }
        });
    }
}

// sums[j] += weights[:, j]ᵀ · rows for the keys [0, keys): `rows` are `count` packed rows of d columns.
static void add_transposed_product(const std::vector<float> &weights, Index padded, Index keys,
                                   const std::vector<float> &rows, Index count, Index d, float *sums, Index stride) {
    for (Index p = 0; p < (d + NR - 1) / NR; p++)
        for_each_tile(0, keys, [&](auto tile_rows, Index j) TARGET {
            constexpr int R = decltype(tile_rows)::value;
            auto tile = microkernel_transposed<R>(&weights[j], padded, &rows[p * count * NR], count);
            for (int r = 0; r < R; r++) {
                float *to = sums + (j + r) * stride + p * NR;
                store(to, load(to) + tile.acc[r][0]);
                store(to + LANES, load(to + LANES) + tile.acc[r][1]);
            }
        });
}

// One tile of R queries: attention weights with dropout in s.weights, gradients of the scores in s.grads (times scale).
template <int R>
static void score_gradients(const AttentionCall &a, const KeyRange &range, Index start, Index h, Index row,
                            Index block_row, const float *q, const float *grad, TrainingScratch &s) {
    Index d = a.d, padded = range.panels() * NR;
    Index first = range.first_panel(row), last = range.last_panel(row, R), begin = first * NR, end = last * NR;
    Index grad_stride = a.heads * d;
    for (Index p = first; p < last; p++) {
        auto tile = microkernel<R>(q + row * a.q_stride, a.q_stride, &s.keys[p * d * NR], d);
        auto grads = microkernel<R>(grad + row * grad_stride, grad_stride, &s.values[p * d * NR], d);
        for (int r = 0; r < R; r++) {
            Index at = (block_row + r) * padded + p * NR;
            store(&s.weights[at], tile.acc[r][0] * broadcast(a.scale));
            store(&s.weights[at + LANES], tile.acc[r][1] * broadcast(a.scale));
            store(&s.grads[at], grads.acc[r][0]);
            store(&s.grads[at + LANES], grads.acc[r][1]);
        }
    }
    for (int r = 0; r < R; r++) {
        Index token = (start + row + r) * a.heads + h;
        float *weights = &s.weights[(block_row + r) * padded], *grads = &s.grads[(block_row + r) * padded];
        range.mask(weights, row + r, begin, end);
        float delta = 0;
        for (Index i = 0; i < d; i++) delta += a.grad_out[token * d + i] * a.out[token * d + i];
        RowDropout dropout(a.dropout, token);
        vf log_sum = broadcast(a.log_sums[token]), mean = broadcast(delta), scale = broadcast(a.scale);
        for (Index j = 0; j < begin; j += LANES) store(weights + j, vf{}), store(grads + j, vf{});
        for (Index j = begin; j < end; j += LANES) {
            vf w = exp(load(weights + j) - log_sum), g = load(grads + j), dropped = w;
            if (dropout.threshold) {
                vf factors = dropout.factors(range.low + j);
                g *= factors, dropped *= factors;
            }
            store(weights + j, dropped);
            store(grads + j, w * (g - mean) * scale);
        }
        for (Index j = end; j < padded; j += LANES) store(weights + j, vf{}), store(grads + j, vf{});
    }
}

// The gradients of one key head of a text, and of the queries that share it.
static void attention_backward(const AttentionCall &a, Index text, Index kv, TrainingScratch &s) {
    Index start = a.cu_seqlens[text], n = a.cu_seqlens[text + 1] - start, d = a.d, share = a.heads / a.kv_heads;
    Index panels = (d + NR - 1) / NR, wide = panels * NR;
    const float *k = a.k + start * a.k_stride + kv * d, *v = a.v + start * a.v_stride + kv * d;
    s.grad_keys.assign((n + NR) * wide, 0.0f);
    s.grad_values.assign((n + NR) * wide, 0.0f);
    KeyRange packed(0, -1, -1, 0, 0);
    for (Index h = kv * share; h < (kv + 1) * share; h++) {
        const float *q = a.q + start * a.q_stride + h * d, *grad = a.grad_out + (start * a.heads + h) * d;
        for (Index from = 0; from < n; from += TRAINING_BLOCK) {
            Index to = std::min(n, from + TRAINING_BLOCK), count = to - from;
            // Causal attention without a window packs all keys once, not more of them for each block.
            KeyRange range(n, a.before, a.after, a.before < 0 ? 0 : from, a.before < 0 ? n : to);
            Index padded = range.panels() * NR, keys = range.size();
            if (range.low != packed.low || range.high != packed.high) {
                pack_transposed(k + range.low * a.k_stride, a.k_stride, keys, padded, d, s.keys);
                pack_transposed(v + range.low * a.v_stride, a.v_stride, keys, padded, d, s.values);
                pack_rows(k + range.low * a.k_stride, a.k_stride, keys, padded, d, s.key_rows);
                packed = range;
            }
            pack_rows(q + from * a.q_stride, a.q_stride, count, count, d, s.query_rows);
            pack_rows(grad + from * a.heads * d, a.heads * d, count, count, d, s.grad_rows);
            s.weights.resize(std::max((Index)s.weights.size(), TRAINING_BLOCK * padded));
            s.grads.resize(std::max((Index)s.grads.size(), TRAINING_BLOCK * padded));
            for_each_tile(from, to, [&](auto tile_rows, Index row) TARGET {
                constexpr int R = decltype(tile_rows)::value;
                score_gradients<R>(a, range, start, h, row, row - from, q, grad, s);
                Index begin = range.first_panel(row) * NR, end = range.last_panel(row, R) * NR;
                for (Index p = 0; p < panels; p++) {
                    auto tile = microkernel<R>(&s.grads[(row - from) * padded + begin], padded,
                                               &s.key_rows[(p * padded + begin) * NR], end - begin);
                    for (int r = 0; r < R; r++)
                        store_panel(a.grad_q + (start + row + r) * a.grad_stride + h * d, p * NR, d, tile.acc[r][0],
                                    tile.acc[r][1]);
                }
            });
            float *grad_keys = &s.grad_keys[range.low * wide], *grad_values = &s.grad_values[range.low * wide];
            add_transposed_product(s.grads, padded, keys, s.query_rows, count, d, grad_keys, wide);
            add_transposed_product(s.weights, padded, keys, s.grad_rows, count, d, grad_values, wide);
        }
    }
    for (Index j = 0; j < n; j++) {
        Index to = (start + j) * a.grad_stride + kv * d;
        memcpy(a.grad_k + to, &s.grad_keys[j * wide], d * sizeof(float));
        memcpy(a.grad_v + to, &s.grad_values[j * wide], d * sizeof(float));
    }
}
