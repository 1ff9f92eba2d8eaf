// The forward pass: embeddings, norms, transformer layers.

// LayerNorm or RMSNorm of one row.
static void normalize(const Norm &norm, const float *x, float *out, Index width) {
    vf total = vf{};
    float tail = 0, mean = 0;
    Index i;
    if (!norm.rms) {
        for (i = 0; i + LANES <= width; i += LANES) total += load(x + i);
        for (; i < width; i++) tail += x[i];
        mean = (reduce_sum(total) + tail) / width;
        total = vf{};
        tail = 0;
    }
    for (i = 0; i + LANES <= width; i += LANES) {
        vf d = load(x + i) - broadcast(mean);
        total += d * d;
    }
    for (; i < width; i++) tail += (x[i] - mean) * (x[i] - mean);
    float rstd = 1.0f / std::sqrt((reduce_sum(total) + tail) / width + norm.eps);
    const float *w = norm.weight.data(), *b = norm.bias.empty() ? nullptr : norm.bias.data();
    for (i = 0; i + LANES <= width; i += LANES) {
        vf y = (load(x + i) - broadcast(mean)) * broadcast(rstd) * load(w + i);
        store(out + i, b ? y + load(b + i) : y);
    }
    for (; i < width; i++) out[i] = (x[i] - mean) * rstd * w[i] + (b ? b[i] : 0.0f);
}

// Returns x itself where the norm is the identity.
static const float *apply_norm(const Norm &norm, const float *x, float *out, Index first, Index last, Index width) {
    if (norm.weight.empty()) return x;
    for (Index r = first; r < last; r++) normalize(norm, x + r * width, out + r * width, width);
    return out;
}

// activation(up(a)), times gate(a) if gated, for rows [first, last); row `first` is the first row of `ff`.
template <int ACTIVATION>
static void feed_forward_up(const Encoder &e, const Block &block, const Input &a, Index first, Index last, int part,
                            int parts, float *ff) {
    Index width = e.ff_width;
    gemm(a, first, last, block.up, part, parts, [&](Index row, Index column, vf v0, vf v1) TARGET {
        store_panel(ff + (row - first) * width, column, width, activate<ACTIVATION>(v0), activate<ACTIVATION>(v1));
    });
    if (e.gated)  // this thread has computed the same columns of `up`
        gemm(a, first, last, block.gate, part, parts, [&](Index row, Index column, vf v0, vf v1) TARGET {
            vf up0, up1;
            float *target = ff + (row - first) * width;
            load_panel(target, column, width, up0, up1);
            store_panel(target, column, width, up0 * v0, up1 * v1);
        });
}

static void feed_forward_up(const Encoder &e, const Block &block, const Input &a, Index first, Index last, int part,
                            int parts, float *ff) {
    switch (e.activation == GELU && (block.down.int8 || block.down.bf16) ? GELU_FAST : e.activation) {
        case GELU_FAST: return feed_forward_up<GELU_FAST>(e, block, a, first, last, part, parts, ff);
        case GELU: return feed_forward_up<GELU>(e, block, a, first, last, part, parts, ff);
        case GELU_TANH: return feed_forward_up<GELU_TANH>(e, block, a, first, last, part, parts, ff);
        case RELU: return feed_forward_up<RELU>(e, block, a, first, last, part, parts, ff);
        default: return feed_forward_up<SILU>(e, block, a, first, last, part, parts, ff);
    }
}

// y = linear(a) + residual, rows [first, last); y may be the residual.
static void gemm_residual(const Input &a, Index first, Index last, const Linear &linear, int part, int parts,
                          const float *residual, float *y) {
    gemm(a, first, last, linear, part, parts, [&](Index row, Index column, vf v0, vf v1) TARGET {
        vf residual0, residual1;
        load_panel(residual + row * linear.n, column, linear.n, residual0, residual1);
        store_panel(y + row * linear.n, column, linear.n, v0 + residual0, v1 + residual1);
    });
}

// y = linear(a), rows [first, last).
static void gemm_output(const Input &a, Index first, Index last, const Linear &linear, int part, int parts, float *y) {
    gemm(a, first, last, linear, part, parts, [&](Index row, Index column, vf v0, vf v1) {
        store_panel(y + row * linear.n, column, linear.n, v0, v1);
    });
}

// x += norm(y), rows [0, rows); y is overwritten.
static void add_normalized(const Norm &norm, float *y, float *x, Index rows, Index width) {
    apply_norm(norm, y, y, 0, rows, width);
    for (Index i = 0; i < rows * width; i++) x[i] += y[i];
}

// x = norm(x + linear(a)), or x + norm(linear(a)) with a norm of the output; rows [0, rows), by one thread.
static void add_linear(const Input &a, Index rows, const Linear &linear, const Norm &output, const Norm &post, float *x,
                       Scratch &s) {
    if (output.weight.empty()) {
        gemm_residual(a, 0, rows, linear, 0, 1, x, x);
    } else {
        s.added.resize(rows * linear.n);
        gemm_output(a, 0, rows, linear, 0, 1, s.added.data());
        add_normalized(output, s.added.data(), x, rows, linear.n);
    }
    apply_norm(post, x, x, 0, rows, linear.n);
}

// The same by a team, each thread a part of the columns, into the shared `sum`; x is each thread's own copy of all rows.
static void add_linear_by_column(const Input &a, const Linear &linear, const Norm &output, const Norm &post, float *x,
                                 float *sum, Pass &pass, int rank, Scratch &s) {
    Index T = pass.cu_seqlens[pass.texts], D = linear.n;
    if (output.weight.empty()) {
        gemm_residual(a, 0, T, linear, rank, pass.team_size, x, sum);
        pass.barrier();
        if (post.weight.empty()) memcpy(x, sum, T * D * sizeof(float));
        else apply_norm(post, sum, x, 0, T, D);
    } else {
        gemm_output(a, 0, T, linear, rank, pass.team_size, sum);
        pass.barrier();
        s.added.assign(sum, sum + T * D);  // the others read it too
        add_normalized(output, s.added.data(), x, T, D);
        apply_norm(post, x, x, 0, T, D);
    }
}

// Embeddings of one token: the sum of word, segment and position embeddings, normalized.
static void embed(const Encoder &e, const Pass &pass, Index row, float *out) {
    const Embeddings &tables = e.embeddings;
    const Batch &batch = *pass.batch;
    Index token = pass.first_token + row, D = e.width;
    const float *word = tables.words + batch.ids[token] * D;
    const float *others[] = {tables.segments ? tables.segments + batch.segments[token] * D : nullptr,
                             tables.positions ? tables.positions + batch.positions[token] * D : nullptr,
                             tables.constant};
    for (Index i = 0; i < D; i++) out[i] = word[i] * tables.scale;
    for (const float *other : others)
        if (other)
            for (Index i = 0; i < D; i++) out[i] += other[i];
    if (!tables.norm.weight.empty()) normalize(tables.norm, out, out, D);
}

static void attention(const Encoder &e, const Layer &layer, const Pass &pass, int rank, Scratch &s) {
    const Block &block = e.blocks[layer.block];
    Index inner = e.heads * e.head_width, qkv_width = (e.heads + 2 * e.kv_heads) * e.head_width;
    auto kernel = attention_f32;
#if INT8_DOT && !INT8_SIGNED
    bool fits = e.head_width % NR == 0 && e.head_width <= MAX_HEAD_WIDTH;
    if (block.qkv.int8 && fits && !pass.batch->rows) kernel = attention_int8;
#endif
    Index table_size = (e.relative_rows + NR - 1) / NR * NR * e.head_width, item = 0;
    for (Index t = 0; t < pass.texts; t++) {
        Index start = pass.cu_seqlens[t], n = pass.cu_seqlens[t + 1] - start;
        for (Index h = 0; h < e.heads; h++) {
            RelativePosition relative = pass.batch->relative_position(block, h, table_size);
            for (Index from = 0; from < n; from += QUERY_BLOCK, item++) {
                if (item % pass.team_size != rank) continue;
                Index to = std::min(n, from + QUERY_BLOCK);
                KeyRange range(n, layer.before, layer.after, from, to);
                kernel(e, pass.qkv + start * qkv_width, range, h, from, to, relative, pass.context + start * inner, s);
            }
        }
    }
}

constexpr Index ROW_BLOCK = 8 * MR;  // rows per feed-forward, so that the intermediate activations stay in cache

// One thread's share of a pass. A team divides the rows or, where there are few, the output columns of each GEMM;
// attention is always divided by head and query block.
static void forward(const Encoder &e, Pass &pass, int rank, Scratch &s) {
    Index T = pass.cu_seqlens[pass.texts], D = e.width, inner = e.heads * e.head_width;
    Index qkv_width = (e.heads + 2 * e.kv_heads) * e.head_width;
    int team = pass.team_size;
    bool by_column = team > 1 && T < 4 * MR * team;
    Index first_row = by_column ? 0 : T * rank / team, last_row = by_column ? T : T * (rank + 1) / team;
    int part = by_column ? rank : 0, parts = by_column ? team : 1;
    float *x = pass.x;
    if (by_column) {  // each thread keeps a copy of all rows, which saves barriers
        s.x.assign(x, x + T * D);
        x = s.x.data();
    }
    if (pass.batch->ids) {
        for (Index r = first_row; r < last_row; r++) embed(e, pass, r, x + r * D);
    }
    s.normed.resize(T * D);
    for (const Layer &layer : e.layers) {
        const Block &block = e.blocks[layer.block];
        {
            const float *in = apply_norm(block.pre_attention, x, s.normed.data(), first_row, last_row, D);
            Input a = prepare_input(block.qkv, in, first_row, last_row, s);
            gemm(a, first_row, last_row, block.qkv, part, parts, [&](Index row, Index column, vf v0, vf v1) TARGET {
                store_panel(pass.qkv + row * qkv_width, column, qkv_width, v0, v1);
            });
        }
        pass.barrier();
        if (layer.rotary >= 0 || !block.q_norm.weight.empty()) {
            Index d = e.head_width;
            const float *cos = layer.rotary < 0 ? nullptr : pass.batch->cos[layer.rotary] + pass.first_token * d;
            const float *sin = layer.rotary < 0 ? nullptr : pass.batch->sin[layer.rotary] + pass.first_token * d;
            for (Index row = T * rank / team; row < T * (rank + 1) / team; row++)
                for (Index h = 0; h < e.heads + e.kv_heads; h++) {
                    float *head = pass.qkv + row * qkv_width + h * d;
                    const Norm &norm = h < e.heads ? block.q_norm : block.k_norm;
                    if (!norm.weight.empty()) normalize(norm, head, head, d);
                    if (cos) apply_rotary(head, cos + row * d, sin + row * d, d);
                }
            pass.barrier();
        }
        attention(e, layer, pass, rank, s);
        pass.barrier();
        if (by_column) {
            Input context = prepare_input(block.out, pass.context, 0, T, s);
            add_linear_by_column(context, block.out, block.attention_output, block.post_attention, x,
                                 pass.attention_out, pass, rank, s);
            const float *in = apply_norm(block.pre_ff, x, s.normed.data(), 0, T, D);
            feed_forward_up(e, block, prepare_input(block.up, in, 0, T, s), 0, T, part, parts, pass.ff);
            pass.barrier();
            add_linear_by_column(prepare_input(block.down, pass.ff, 0, T, s), block.down, block.ff_output,
                                 block.post_ff, x, pass.ff_out, pass, rank, s);
            continue;
        }
        for (Index from = first_row; from < last_row; from += ROW_BLOCK) {
            Index rows = std::min(last_row, from + ROW_BLOCK) - from;
            float *h = x + from * D;
            s.ff.resize(ROW_BLOCK * e.ff_width);
            Input context = prepare_input(block.out, pass.context + from * inner, 0, rows, s);
            add_linear(context, rows, block.out, block.attention_output, block.post_attention, h, s);
            const float *in = apply_norm(block.pre_ff, h, s.normed.data(), 0, rows, D);
            feed_forward_up(e, block, prepare_input(block.up, in, 0, rows, s), 0, rows, 0, 1, s.ff.data());
            add_linear(prepare_input(block.down, s.ff.data(), 0, rows, s), rows, block.down, block.ff_output,
                       block.post_ff, h, s);
        }
        if (team > 1) pass.barrier();
    }
    for (Index r = first_row; r < last_row; r++)
        if (!e.final_norm.weight.empty()) normalize(e.final_norm, x + r * D, x + r * D, D);
    if (by_column && rank == 0) memcpy(pass.x, x, T * D * sizeof(float));
}

struct IsaWorker : Worker {
    Scratch scratch;
    void run(const Encoder &e, Pass &pass, int rank) override { forward(e, pass, rank, scratch); }
};

static Worker *new_worker() { return new IsaWorker(); }

#if BF16
// Speed of the bf16 GEMM relative to f32, measured; 0 where its results are wrong.
static double bf16_speedup() {
    constexpr Index ROWS = 8 * MR, K = 384, N = 768;
    Arena arena;
    Linear f32, bf16;
    f32.n = bf16.n = N, f32.k = bf16.k = K;
    std::vector<float> x(ROWS * K), weight(N * K), expected(ROWS * N), actual(ROWS * N);
    std::vector<uint16_t> rounded(N * K);
    uint32_t state = 1;
    auto random = [&] { return (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f; };
    for (float &v : x) v = random();
    for (Index i = 0; i < N * K; i++) {
        weight[i] = random();
        uint32_t bits;
        memcpy(&bits, &weight[i], 4);
        rounded[i] = (uint16_t)((bits + 0x8000) >> 16);
    }
    pack_f32(arena, f32, weight.data());
    pack_bf16(arena, bf16, rounded.data());
    Scratch s;
    auto seconds = [&](const Linear &linear, std::vector<float> &out) TARGET {
        auto start = std::chrono::steady_clock::now();
        for (int repeat = 0; repeat < 4; repeat++)
            gemm(prepare_input(linear, x.data(), 0, ROWS, s), 0, ROWS, linear, 0, 1,
                 [&](Index row, Index column, vf v0, vf v1) TARGET { store_panel(&out[row * N], column, N, v0, v1); });
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 8; round++) {
        best[0] = std::min(best[0], seconds(f32, expected));
        best[1] = std::min(best[1], seconds(bf16, actual));
    }
    double error = 0, norm = 0;
    for (Index i = 0; i < ROWS * N; i++) {
        error += (expected[i] - actual[i]) * (expected[i] - actual[i]);
        norm += expected[i] * expected[i];
    }
    return error < 1e-4 * norm ? best[0] / best[1] : 0.0;
}
#endif
