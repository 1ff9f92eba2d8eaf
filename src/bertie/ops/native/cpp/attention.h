// Attention of one head over a block of one text's queries, in f32.

constexpr Index QUERY_BLOCK = 40 * MR;  // queries per work item

static void apply_rotary(float *row, const float *cos, const float *sin, Index d) {
    Index half = d / 2;
    for (Index i = 0; i < half; i++) {
        float a = row[i], b = row[i + half];
        row[i] = a * cos[i] - b * sin[i];
        row[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

// One head's q, k and v within the rows of the fused projection (T, (H + 2 * kv_heads) * d).
struct HeadView {
    Index d, stride;
    const float *q, *k, *v;

    HeadView(const Encoder &e, const float *qkv, Index head) {
        Index kv_head = head / (e.heads / e.kv_heads);
        d = e.head_width, stride = (e.heads + 2 * e.kv_heads) * d;
        q = qkv + head * d, k = qkv + (e.heads + kv_head) * d, v = k + e.kv_heads * d;
    }
};

// The keys [low, high) that a block of queries attends to, in panels of NR keys starting at `low`. A query attends to
// `before` keys before its own and `after` keys after it; -1: to all of them.
struct KeyRange {
    Index n, before, after, low, high;

    KeyRange(Index n, Index before, Index after, Index from, Index to) : n(n), before(before), after(after) {
        low = before < 0 ? 0 : std::max(Index(0), from - before) / NR * NR;
        high = after < 0 ? n : std::min(n, to + after);
    }
    Index size() const { return high - low; }
    Index panels() const { return (size() + NR - 1) / NR; }
    // Panels [first_panel, last_panel) that a tile of `count` queries from `row` on attends to.
    Index first_panel(Index row) const { return before < 0 ? 0 : (std::max(low, row - before) - low) / NR; }
    Index last_panel(Index row, Index count) const {
        return after < 0 ? panels() : (std::min(high, row + count + after) - low + NR - 1) / NR;
    }
    // Masks the scores in [begin, end) of keys that the query does not attend to, or beyond the text.
    void mask(float *scores, Index query, Index begin, Index end) const {
        Index from = before < 0 ? 0 : std::max(Index(0), query - before) - low;
        Index to = (after < 0 ? n : std::min(n, query + after + 1)) - low;
        for (Index j = begin; j < from; j++) scores[j] = -INFINITY;
        for (Index j = to; j < end; j++) scores[j] = -INFINITY;
    }
};

static inline vf row_max(const float *x, Index begin, Index end) {
    vf high = broadcast(-INFINITY);
    for (Index j = begin; j < end; j += LANES) high = max(high, load(x + j));
    return broadcast(reduce_max(high));
}

// Adds the relative position bias to one query's scores; `bias` is indexed by key - query.
static inline void add_bias(float *scores, const float *bias, Index query, Index low, Index begin, Index end) {
    if (!bias) return;
    for (Index j = begin; j < end; j += LANES) store(scores + j, load(scores + j) + load(bias + low + j - query));
}

// Dot products of queries (c2p) or keys (p2c) with consecutive panels of a relative position table.
struct RelativeGemm {
    const float *table;       // one head's [R / NR][d][NR]; null: term not used
    Index first_panel, width;  // width in columns

    template <int R> void tile(const float *x, Index stride, Index d, float scale, float *out) const {
        for (Index p = 0; p < width / NR; p++) {
            auto tile = microkernel<R>(x, stride, table + (first_panel + p) * d * NR, d);
            for (int r = 0; r < R; r++) {
                store(out + r * width + p * NR, tile.acc[r][0] * broadcast(scale));
                store(out + r * width + p * NR + LANES, tile.acc[r][1] * broadcast(scale));
            }
        }
    }
};

// Packs the keys into GEMM panels over the keys, and the values into panels over the head's columns.
static void pack_keys_and_values(const HeadView &head, const KeyRange &range, Scratch &s) {
    Index d = head.d, padded = range.panels() * NR, value_panels = (d + NR - 1) / NR;
    s.keys.resize(padded * d);
    s.values.resize(value_panels * padded * NR);
    for (Index j = 0; j < padded; j++) {
        float *packed = &s.keys[j / NR * d * NR + j % NR];
        const float *key = head.k + (range.low + j) * head.stride;
        for (Index i = 0; i < d; i++) packed[i * NR] = j < range.size() ? key[i] : 0.0f;
    }
    for (Index p = 0; p < value_panels; p++)
        for (Index j = 0; j < padded; j++) {
            float *packed = &s.values[(p * padded + j) * NR];
            Index count = j < range.size() ? std::min(NR, d - p * NR) : 0;
            memcpy(packed, head.v + (range.low + j) * head.stride + p * NR, count * sizeof(float));
            memset(packed + count, 0, (NR - count) * sizeof(float));
        }
}

// Queries [from, to) of a text of n tokens; writes the head's columns of `out` (n, H * d).
static void attention_f32(const Encoder &e, const float *qkv, const KeyRange &range, Index head_index, Index from,
                          Index to, const RelativePosition &relative, float *out, Scratch &s) {
    HeadView head(e, qkv, head_index);
    Index n = range.n;
    Index d = head.d, stride = head.stride, keys = range.size();
    Index padded = range.panels() * NR, value_panels = (d + NR - 1) / NR;
    pack_keys_and_values(head, range, s);
    s.scores.resize(MR * padded);
    // The distances within this text use a contiguous range of the table's rows.
    Index low_row = 0, high_row = 0;
    if (relative.rows) std::tie(low_row, high_row) = std::minmax({relative.rows[1 - n], relative.rows[n - 1]});
    Index first_panel = low_row / NR, width = (high_row / NR + 1 - first_panel) * NR;
    RelativeGemm c2p{relative.c2p, first_panel, width}, p2c{relative.p2c, first_panel, width};
    if (relative.c2p) s.c2p.resize(MR * width);
    if (relative.p2c) {
        s.p2c.resize(keys * width);
        for_each_tile(0, keys, [&](auto count, Index j) TARGET {
            p2c.tile<decltype(count)::value>(head.k + (range.low + j) * stride, stride, d, e.scale, &s.p2c[j * width]);
        });
    }
    for_each_tile(from, to, [&](auto count, Index row) TARGET {
        constexpr int R = decltype(count)::value;
        if (relative.c2p) c2p.tile<R>(head.q + row * stride, stride, d, e.scale, s.c2p.data());
        Index first = range.first_panel(row), last = range.last_panel(row, R), begin = first * NR, end = last * NR;
        for (Index p = first; p < last; p++) {
            auto tile = microkernel<R>(head.q + row * stride, stride, &s.keys[p * d * NR], d);
            for (int r = 0; r < R; r++) {
                float *scores = &s.scores[r * padded + p * NR];
                store(scores, tile.acc[r][0] * broadcast(e.scale));
                store(scores + LANES, tile.acc[r][1] * broadcast(e.scale));
            }
        }
        float inverse[R];  // of the softmax denominator
        for (int r = 0; r < R; r++) {
            float *scores = &s.scores[r * padded];
            add_bias(scores, relative.bias, row + r, range.low, begin, end);
            if (relative.rows) {
                const int32_t *rows = relative.rows + range.low - (row + r);
                const float *c2p_scores = s.c2p.data() + r * width - first_panel * NR;
                const float *p2c_scores = s.p2c.data() - first_panel * NR;
                Index last_key = std::min(end, keys);
                if (relative.c2p)
                    for (Index j = begin; j < last_key; j++) scores[j] += c2p_scores[rows[j]];
                if (relative.p2c)
                    for (Index j = begin; j < last_key; j++) scores[j] += p2c_scores[j * width + rows[j]];
            }
            range.mask(scores, row + r, begin, end);
            vf top = row_max(scores, begin, end), total = vf{};
            for (Index j = begin; j < end; j += LANES) {
                vf w = exp(load(scores + j) - top);
                total += w;
                store(scores + j, w);
            }
            inverse[r] = 1.0f / reduce_sum(total);
        }
        for (Index p = 0; p < value_panels; p++) {
            auto tile = microkernel<R>(&s.scores[begin], padded, &s.values[(p * padded + begin) * NR], end - begin);
            for (int r = 0; r < R; r++) {
                vf w = broadcast(inverse[r]);
                store_panel(out + (row + r) * e.heads * d + head_index * d, p * NR, d, tile.acc[r][0] * w,
                            tile.acc[r][1] * w);
            }
        }
    });
}
