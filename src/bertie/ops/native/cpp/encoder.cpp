// Encoder layers over a flat batch of texts on CPU. ops/native/encoder.py is the only caller.
//
// Weights are packed once, for the instruction set of the CPU. A large batch is cut into chunks of texts, each of which
// one thread runs through all layers; a small batch is run by all threads together.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "platform.h"

namespace {

#include "model.h"

#define ENCODER_ONLY(x) (x)
#define KERNELS "kernels.h"
#include "levels.h"

OpenMP openmp;

// Scratch memory of a calling thread, reused by later passes.
struct Memory {
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::vector<float>> buffers;
};

void allocate_buffers(const Encoder &e, Pass &pass, std::vector<float> &buffer) {
    Index T = pass.cu_seqlens[pass.texts], inner = e.heads * e.head_width;
    Index qkv_width = (e.heads + 2 * e.kv_heads) * e.head_width;
    Index shared = pass.team_size > 1 ? T : 0;  // rows of the buffers that only a team needs
    buffer.resize(T * (qkv_width + inner) + shared * (2 * e.width + e.ff_width));
    pass.qkv = buffer.data();
    pass.context = pass.qkv + T * qkv_width;
    pass.attention_out = pass.context + T * inner;
    pass.ff_out = pass.attention_out + shared * e.width;
    pass.ff = pass.ff_out + shared * e.width;
}

constexpr Index CHUNK_TOKENS = 256;  // of the texts that a thread takes at a time

// Boundaries of chunks of consecutive texts.
std::vector<Index> chunk_texts(Index texts, const int32_t *cu_seqlens, int threads) {
    Index limit = std::max(Index(64), std::min(CHUNK_TOKENS, (Index)cu_seqlens[texts] / (threads * 3)));
    std::vector<Index> boundaries{0};
    for (Index t = 1; t <= texts; t++)
        if (t == texts || cu_seqlens[t + 1] - cu_seqlens[boundaries.back()] > limit) boundaries.push_back(t);
    return boundaries;
}

void run(const Encoder &e, const Batch &batch, int threads) {
    auto set_texts = [&](Pass &pass, Index first, Index last, std::vector<int32_t> &cu_seqlens, int team_size) {
        cu_seqlens.clear();
        for (Index t = first; t <= last; t++) cu_seqlens.push_back(batch.cu_seqlens[t] - batch.cu_seqlens[first]);
        pass.batch = &batch;
        pass.first_token = batch.cu_seqlens[first];
        pass.texts = last - first;
        pass.cu_seqlens = cu_seqlens.data();
        pass.x = batch.x + pass.first_token * e.width;
        pass.team_size = team_size;
    };
    static thread_local Memory memories[4];
    Memory &memory = memories[e.isa_level];  // the calling thread's, which the team uses too
    memory.buffers.resize(std::max(memory.buffers.size(), (size_t)threads));
    while ((int)memory.workers.size() < threads) memory.workers.emplace_back(e.new_worker());
    std::vector<Index> boundaries = chunk_texts(batch.texts, batch.cu_seqlens, threads);
    Index chunks = boundaries.size() - 1;
    if (chunks < threads) {
        Pass pass;
        std::vector<int32_t> cu_seqlens;
        set_texts(pass, 0, batch.texts, cu_seqlens, threads);
        allocate_buffers(e, pass, memory.buffers[0]);
        auto run_together = [&](int rank, int team_size) {
            if (rank == 0) pass.team_size = team_size;  // OpenMP may start fewer threads than requested
            pass.barrier(team_size);
            memory.workers[rank]->run(e, pass, rank);
        };
        return run_team(openmp, threads, run_together);
    }
    std::atomic<Index> next{0};
    auto run_chunks = [&](int rank, int) {
        std::vector<int32_t> cu_seqlens;
        for (Index i; (i = next.fetch_add(1)) < chunks;) {
            Pass pass;
            set_texts(pass, boundaries[i], boundaries[i + 1], cu_seqlens, 1);
            allocate_buffers(e, pass, memory.buffers[rank]);
            memory.workers[rank]->run(e, pass, 0);
        }
    };
    run_team(openmp, threads, run_chunks);
}

}  // namespace

// --- C interface ---

extern "C" {

EXPORT void bertie_encoder_abi_6() {}  // ABI_VERSION in ops/native/encoder.py

// See detect_isa_level in platform.h.
EXPORT int bertie_encoder_isa_level() { return detect_isa_level(); }

EXPORT void bertie_encoder_set_openmp(void *parallel, void *thread_num, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.thread_num = (int (*)())thread_num;
    openmp.num_threads = (int (*)())num_threads;
}

// `shape`: width, heads, kv_heads, head_width, ff_width, activation, gated, number of blocks.
EXPORT void *bertie_encoder_create(int isa_level, const int64_t *shape, double scale) {
    auto *e = new Encoder();
    e->isa_level = isa_level;
    e->width = shape[0], e->heads = shape[1], e->kv_heads = shape[2], e->head_width = shape[3], e->ff_width = shape[4];
    e->activation = (int)shape[5], e->gated = shape[6] != 0, e->blocks.resize(shape[7]), e->scale = (float)scale;
#define USE(isa)                                                                 \
    (e->pack_f32 = isa::pack_f32, e->pack_relative = isa::pack_relative,         \
     e->new_worker = isa::new_worker, e->panel_width = isa::NR)
    USE(generic);
#if defined(__aarch64__)
    if (isa_level == 1) USE(neon), e->pack_int8 = neon::pack_int8;
    if (isa_level == 2) USE(dotprod), e->pack_int8 = dotprod::pack_int8;
#elif defined(__x86_64__)
    if (isa_level == 1) USE(avx2), e->pack_int8 = avx2::pack_int8;
    if (isa_level == 2) USE(avx512), e->pack_int8 = avx512::pack_int8;
    if (isa_level == 3) USE(vnni), e->pack_int8 = vnni::pack_int8, e->pack_bf16 = vnni::pack_bf16;
#endif
#undef USE
    return e;
}

EXPORT void bertie_encoder_add_layer(void *encoder, int block, int64_t before, int64_t after, int rotary) {
    ((Encoder *)encoder)->layers.push_back({block, rotary, (Index)before, (Index)after});
}

// Whether the CPU reports bf16 dot products.
EXPORT int bertie_encoder_has_bf16() {
#if defined(__x86_64__)
    CpuFeatures cpu;
    return cpu.vnni && cpu.bf16;
#else
    return 0;
#endif
}

// Speed of the bf16 GEMM relative to f32; 0: not available, or wrong results. Call it in a process of its own: some
// virtual machines report AVX512_BF16 and raise SIGILL.
EXPORT double bertie_encoder_bf16_speedup() {
#if defined(__x86_64__)
    if (bertie_encoder_has_bf16()) return vnni::bf16_speedup();
#endif
    return 0.0;
}

// `which`: 0 qkv, 1 out, 2 up, 3 gate, 4 down. The weight (n, k) is f32, bf16, or int8 with one scale per row.
EXPORT void bertie_encoder_set_linear(void *encoder, int block_index, int which, int64_t n, int64_t k, const float *f32,
                                      const uint16_t *bf16, const int8_t *int8, const float *scales, const float *bias) {
    auto *e = (Encoder *)encoder;
    Block &block = e->blocks[block_index];
    Linear *linears[] = {&block.qkv, &block.out, &block.up, &block.gate, &block.down};
    Linear &linear = *linears[which];
    linear.n = n, linear.k = k;
    if (bias) {
        linear.bias.assign((n + e->panel_width - 1) / e->panel_width * e->panel_width, 0.0f);
        std::copy(bias, bias + n, linear.bias.begin());
    }
    if (int8) e->pack_int8(e->arena, linear, int8, scales);
    else if (bf16) e->pack_bf16(e->arena, linear, bf16);
    else e->pack_f32(e->arena, linear, f32);
}

// `slot`: 0 pre-attention, 1 post-attention, 2 pre-feed-forward, 3 post-feed-forward, 4 the output of attention, 5 that
// of the feed-forward layer, 6 queries, 7 keys.
// Of block -1: 0 the norm of the embeddings, 1 the final norm.
EXPORT void bertie_encoder_set_norm(void *encoder, int block_index, int slot, const float *weight, const float *bias,
                                    int rms, double eps) {
    auto *e = (Encoder *)encoder;
    Norm *norm = slot == 0 ? &e->embeddings.norm : &e->final_norm;
    if (block_index >= 0) {
        Block &block = e->blocks[block_index];
        Norm *norms[] = {&block.pre_attention,    &block.post_attention, &block.pre_ff, &block.post_ff,
                         &block.attention_output, &block.ff_output,      &block.q_norm, &block.k_norm};
        norm = norms[slot];
    }
    Index width = block_index >= 0 && slot >= 6 ? e->head_width : e->width;
    norm->weight.assign(weight, weight + width);
    if (bias) norm->bias.assign(bias, bias + width);
    norm->rms = rms != 0;
    norm->eps = (float)eps;
}

// Disentangled attention: the relative position keys (c2p) and queries (p2c) of a block, (rows, H * d); null: not used.
EXPORT void bertie_encoder_set_relative_tables(void *encoder, int block_index, int64_t rows, const float *c2p,
                                               const float *p2c) {
    auto *e = (Encoder *)encoder;
    Block &block = e->blocks[block_index];
    e->relative_rows = rows;
    if (c2p) e->pack_relative(block.c2p_table, c2p, rows, e->heads, e->head_width);
    if (p2c) e->pack_relative(block.p2c_table, p2c, rows, e->heads, e->head_width);
}

// The tables stay in the caller's memory. `constant` is one row, added to every token.
EXPORT void bertie_encoder_set_embeddings(void *encoder, const float *words, const float *segments,
                                          const float *positions, const float *constant, double scale) {
    Embeddings &tables = ((Encoder *)encoder)->embeddings;
    tables.words = words, tables.segments = segments, tables.positions = positions, tables.constant = constant;
    tables.scale = (float)scale;
}

EXPORT void bertie_encoder_forward(void *encoder, int64_t texts, const int32_t *cu_seqlens, const int64_t *ids,
                                   const int64_t *segments, const int64_t *positions, float *x, const float *const *cos,
                                   const float *const *sin, const float *bias, const int32_t *rows, int64_t distances,
                                   int64_t zero_distance, int threads) {
    Batch batch{(Index)texts, cu_seqlens, ids, segments, positions, x, cos, sin, bias, rows, (Index)distances,
                (Index)zero_distance};
    run(*(Encoder *)encoder, batch, std::max(1, threads));
}

// Remembers two of a weight's n values, by which bertie_encoder_is_current notices that an optimizer has changed it.
EXPORT void bertie_encoder_sample_weight(void *encoder, const float *weight, int64_t n) {
    for (const float *at : {weight + n / 2, weight + n - 1}) ((Encoder *)encoder)->samples.push_back({at, *at});
}

// Whether all sampled weights are unchanged.
EXPORT int bertie_encoder_is_current(void *encoder) {
    for (auto [at, value] : ((Encoder *)encoder)->samples)
        if (memcmp(at, &value, sizeof value)) return 0;
    return 1;
}

EXPORT void bertie_encoder_destroy(void *encoder) { delete (Encoder *)encoder; }
}
