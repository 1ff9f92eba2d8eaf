// An encoder's layers over a flat batch of texts, on a CPU. ops/native/encoder.py is its only caller.
//
// Weights are packed once, for the instruction set that the chip has. Many texts are dealt out to the threads, each of
// which takes its own through all layers; a few tokens are worked on by all threads together.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

// --- what an encoder is ---

// Memory in few large pages: to stream weights through small ones, a core waits for their addresses.
class Arena {
  public:
    Arena() = default;
    Arena(const Arena &) = delete;
    ~Arena() {
        for (void *one : chunks) free(one);
    }
    void *take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > left) {
            left = std::max(bytes, CHUNK);
            left = (left + PAGE - 1) / PAGE * PAGE;
            at = (uint8_t *)std::aligned_alloc(PAGE, left);
            if (!at) throw std::bad_alloc();
            chunks.push_back(at);
#if defined(MADV_HUGEPAGE)
            madvise(at, left, MADV_HUGEPAGE);
#endif
        }
        at += bytes;
        left -= bytes;
        return at - bytes;
    }

  private:
    static constexpr size_t PAGE = 2 << 20, CHUNK = 16 << 20;
    std::vector<void *> chunks;
    uint8_t *at = nullptr;
    size_t left = 0;
};

struct Matrix {  // (n, k): floats, bf16, or codes with a scale and a sum a row
    long n = 0, k = 0;
    float *floats = nullptr;
    uint16_t *halves = nullptr;
    void *codes = nullptr;
    std::vector<float> bias, scales, sums;
};

struct Norm {
    std::vector<float> weight, bias;  // no weight: the identity
    bool rms = false;
    float eps = 0;
};

struct Block {
    Matrix qkv, out, up, gate, down;
    Norm norms[4];  // before and after attention, before and after the feed-forward
    std::vector<float> relative_keys, relative_queries;  // of positions, that queries and keys meet; packed
};

struct Embeddings {  // tables of the model's width, not copied; null: none
    const float *words = nullptr, *segments = nullptr, *positions = nullptr, *all = nullptr;
    float scale = 1;
    Norm norm;
};

struct Layer {
    int block, rotation;  // -1: none
    long window;          // -1: all is seen
};

struct Job;
struct Encoder;

struct Worker {  // a thread's memory, kept from pass to pass
    virtual ~Worker() = default;
    virtual void run(const Encoder &, Job &, int rank) = 0;
};

struct Encoder {
    long width, heads, kv_heads, head_width, ff_width, relative_rows = 0;
    int activation;
    bool gated;
    float scale;
    std::vector<Layer> layers;
    std::vector<Block> blocks;
    Embeddings embeddings;
    Norm norm;
    Arena arena;
    void (*pack)(Arena &, Matrix &, const float *);
    void (*pack_codes)(Arena &, Matrix &, const int8_t *, const float *) = nullptr;
    void (*pack_halves)(Arena &, Matrix &, const uint16_t *) = nullptr;
    void (*pack_relative)(std::vector<float> &, const float *, long, long, long);
    Worker *(*new_worker)();
    long panel;
    int level;
    std::vector<std::pair<const float *, float>> watched;  // numbers of the caller's weights, and what they were
};

// --- a pass ---

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

struct Distances {  // what a head adds to scores by distance, each at the query's own place; null: nothing
    const float *bias = nullptr, *keys = nullptr, *queries = nullptr;  // the latter are tables
    const int32_t *rows = nullptr;
};

struct Batch {  // flat: T tokens of some texts
    long texts;
    const int32_t *cu;  // texts + 1
    const int64_t *ids, *segments, *positions;  // no ids: x is embedded already
    float *x;                                   // (T, D) in and out
    const float *const *cos, *const *sin;       // (T, d) for each rotation
    // For the place of a key, from the longest text's length - 1 before the query on:
    const float *bias;    // (H, distances) what is added to a score; null: nothing
    const int32_t *rows;  // (distances,) the row of a table that both meet; null: none
    long distances, middle;  // how many, with a panel to spare; which of them is the query's own place

    Distances of_head(const Block &b, long h, long size) const {
        Distances out;
        if (bias) out.bias = bias + h * distances + middle;
        if (!rows) return out;
        out.rows = rows + middle;
        if (!b.relative_keys.empty()) out.keys = b.relative_keys.data() + h * size;
        if (!b.relative_queries.empty()) out.queries = b.relative_queries.data() + h * size;
        return out;
    }
};

struct Job {  // some of its texts and the threads that see to them
    const Batch *batch;
    long start, texts;  // the first token
    const int32_t *cu;  // texts + 1, from 0
    float *x;
    int team;
    float *qkv, *seen, *sum, *sum2, *ff;
    std::atomic<int> arrived{0}, round{0};

    void barrier() { meet(team); }

    void meet(int team) {  // nobody goes on before all are here
        if (team == 1) return;
        int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == team - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            spins < 20000 ? pause() : std::this_thread::yield();
    }
};

namespace plain {
#define VW 4
#define TALL 4
#define DOT 0
#include "kernels.h"
#undef VW
#undef TALL
#undef DOT
}  // namespace plain

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define VW 8
#define TALL 6
#define DOT 2
#include "kernels.h"
#undef VW
#undef TALL
#undef DOT
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
namespace avx512 {
#define VW 16
#define TALL 12
#define DOT 2
#include "kernels.h"
#undef VW
#undef TALL
#undef DOT
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,fma,prefer-vector-width=512")
namespace vnni {  // its products of bf16 are called only where bertie_halves says so
#define VW 16
#define TALL 12
#define DOT 4
#define HALVES 1
#include "kernels.h"
#undef VW
#undef TALL
#undef DOT
#undef HALVES
}  // namespace vnni
#pragma GCC pop_options
#endif

// --- threads ---

// Those of the framework's own OpenMP: a second set of threads would fight with it for the cores.
struct Threads {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned) = nullptr;  // GOMP_parallel
    int (*rank)() = nullptr;                                                  // omp_get_thread_num
    int (*count)() = nullptr;                                                 // omp_get_num_threads
} openmp;

// Runs f(rank, team) on about `count` threads, the caller one of them.
template <class F> void together(int count, F &f) {
    if (count == 1 || !openmp.parallel) return f(0, 1);
    openmp.parallel([](void *g) { (*(F *)g)(openmp.rank(), openmp.count()); }, &f, count, 0);
}

// Memory of passes, kept for the next one.
struct Memory {
    std::vector<std::unique_ptr<Worker>> workers;
    std::vector<std::vector<float>> buffers;
};

void buffers_for(const Encoder &e, Job &job, std::vector<float> &at) {
    long T = job.cu[job.texts], inner = e.heads * e.head_width, wide = (e.heads + 2 * e.kv_heads) * e.head_width;
    long few = job.team > 1 ? T : 0;  // what only threads that share columns need
    at.resize(T * (wide + inner) + few * (2 * e.width + e.ff_width));
    job.qkv = at.data();
    job.seen = job.qkv + T * wide;
    job.sum = job.seen + T * inner;
    job.sum2 = job.sum + few * e.width;
    job.ff = job.sum2 + few * e.width;
}

constexpr long TOKENS = 256;  // of the texts that a thread takes at a time

std::vector<long> portions(long texts, const int32_t *cu, int threads) {
    long most = std::max(64L, std::min(TOKENS, (long)cu[texts] / (threads * 3)));
    std::vector<long> out{0};
    for (long t = 1; t <= texts; t++)
        if (t == texts || cu[t + 1] - cu[out.back()] > most) out.push_back(t);
    return out;
}

void run(const Encoder &e, const Batch &batch, int threads) {
    auto job_for = [&](Job &job, long first, long last, std::vector<int32_t> &ends, int team) {
        ends.clear();
        for (long t = first; t <= last; t++) ends.push_back(batch.cu[t] - batch.cu[first]);
        job.batch = &batch;
        job.start = batch.cu[first];
        job.texts = last - first;
        job.cu = ends.data();
        job.x = batch.x + job.start * e.width;
        job.team = team;
    };
    static thread_local Memory memories[4];
    Memory &kept = memories[e.level];  // the caller's, also in the other threads
    kept.buffers.resize(std::max(kept.buffers.size(), (size_t)threads));
    while ((int)kept.workers.size() < threads) kept.workers.emplace_back(e.new_worker());
    std::vector<long> parts = portions(batch.texts, batch.cu, threads);
    long count = parts.size() - 1;
    if (count < threads) {
        Job job;
        std::vector<int32_t> ends;
        job_for(job, 0, batch.texts, ends, threads);
        buffers_for(e, job, kept.buffers[0]);
        auto share = [&](int rank, int team) {
            if (rank == 0) job.team = team;  // may be fewer than were asked for
            job.meet(team);
            kept.workers[rank]->run(e, job, rank);
        };
        return together(threads, share);
    }
    std::atomic<long> next{0};
    auto deal = [&](int rank, int) {
        std::vector<int32_t> ends;
        for (long i; (i = next.fetch_add(1)) < count;) {
            Job job;
            job_for(job, parts[i], parts[i + 1], ends, 1);
            buffers_for(e, job, kept.buffers[rank]);
            kept.workers[rank]->run(e, job, 0);
        }
    };
    together(threads, deal);
}

}  // namespace

// --- what Python calls ---

extern "C" {

void bertie_calls_4() {}  // see native.CALLS

// 0: plain, 1: AVX2, 2: AVX-512, 3: AVX-512 with VNNI.
int bertie_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
        return __builtin_cpu_supports("avx512vnni") ? 3 : 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

void bertie_threads(void *parallel, void *rank, void *count) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.rank = (int (*)())rank;
    openmp.count = (int (*)())count;
}

void *bertie_new(int level, const int64_t *shape, double scale) {
    auto *e = new Encoder();
    e->level = level;
    e->width = shape[0], e->heads = shape[1], e->kv_heads = shape[2], e->head_width = shape[3], e->ff_width = shape[4];
    e->activation = (int)shape[5], e->gated = shape[6] != 0, e->blocks.resize(shape[7]), e->scale = (float)scale;
#define USE(set) \
    (e->pack = set::pack, e->pack_relative = set::pack_relative, e->new_worker = set::new_thread, e->panel = set::NR)
    USE(plain);
#if defined(__x86_64__)
    if (level == 1) USE(avx2), e->pack_codes = avx2::pack_codes;
    if (level == 2) USE(avx512), e->pack_codes = avx512::pack_codes;
    if (level == 3) USE(vnni), e->pack_codes = vnni::pack_codes, e->pack_halves = vnni::pack_halves;
#endif
#undef USE
    return e;
}

void bertie_layer(void *encoder, int block, int64_t window, int rotation) {
    ((Encoder *)encoder)->layers.push_back({block, rotation, (long)window});
}

// Whether the chip multiplies pairs of bf16, and how well: only to be asked where a crash does no harm.
int bertie_halves() {
#if defined(__x86_64__)
    return bertie_level() == 3 && __builtin_cpu_supports("avx512bf16");
#else
    return 0;
#endif
}

double bertie_trial() {
#if defined(__x86_64__)
    if (bertie_halves()) return vnni::trial();
#endif
    return 0.0;
}

// `which`: query, key and value; out; up; gate; down. The weight is float or bf16 (n, k), or codes with a scale a row.
void bertie_matrix(void *encoder, int block, int which, int64_t n, int64_t k, const float *weight,
                   const uint16_t *halves, const int8_t *codes, const float *scales, const float *bias) {
    auto *e = (Encoder *)encoder;
    Block &b = e->blocks[block];
    Matrix &m = *(Matrix *[]){&b.qkv, &b.out, &b.up, &b.gate, &b.down}[which];
    m.n = n, m.k = k;
    if (bias) {
        m.bias.assign((n + e->panel - 1) / e->panel * e->panel, 0.0f);
        std::copy(bias, bias + n, m.bias.begin());
    }
    if (codes) e->pack_codes(e->arena, m, codes, scales);
    else if (halves) e->pack_halves(e->arena, m, halves);
    else e->pack(e->arena, m, weight);
}

// `slot`: before and after attention, before and after the feed-forward; of block -1: of the embeddings, of the end.
void bertie_norm(void *encoder, int block, int slot, const float *weight, const float *bias, int rms, double eps) {
    auto *e = (Encoder *)encoder;
    Norm &norm = block >= 0 ? e->blocks[block].norms[slot] : slot == 0 ? e->embeddings.norm : e->norm;
    norm.weight.assign(weight, weight + e->width);
    if (bias) norm.bias.assign(bias, bias + e->width);
    norm.rms = rms != 0;
    norm.eps = (float)eps;
}

// Tables (rows, H d) of relative positions, as a block's queries meet them and as its keys do; null: they do not.
void bertie_relative(void *encoder, int block, int64_t rows, const float *keys, const float *queries) {
    auto *e = (Encoder *)encoder;
    Block &b = e->blocks[block];
    e->relative_rows = rows;
    if (keys) e->pack_relative(b.relative_keys, keys, rows, e->heads, e->head_width);
    if (queries) e->pack_relative(b.relative_queries, queries, rows, e->heads, e->head_width);
}

// The encoder reads the tables where they lie.
void bertie_embeddings(void *encoder, const float *words, const float *segments, const float *positions,
                       const float *all, double scale) {
    Embeddings &at = ((Encoder *)encoder)->embeddings;
    at.words = words, at.segments = segments, at.positions = positions, at.all = all, at.scale = (float)scale;
}

void bertie_run(void *encoder, int64_t texts, const int32_t *cu, const int64_t *ids, const int64_t *segments,
                const int64_t *positions, float *x, const float *const *cos, const float *const *sin, const float *bias,
                const int32_t *rows, int64_t distances, int64_t middle, int threads) {
    Batch batch{(long)texts, cu, ids, segments, positions, x, cos, sin, bias, rows, (long)distances, (long)middle};
    run(*(Encoder *)encoder, batch, std::max(1, threads));
}

// Of n weights of the caller's that were packed, two are looked at by bertie_same: a step of training changes all.
void bertie_watch(void *encoder, const float *weights, int64_t n) {
    for (const float *at : {weights + n / 2, weights + n - 1}) ((Encoder *)encoder)->watched.push_back({at, *at});
}

int bertie_same(void *encoder) {
    for (auto [at, was] : ((Encoder *)encoder)->watched)
        if (memcmp(at, &was, sizeof was)) return 0;
    return 1;
}

void bertie_free(void *encoder) { delete (Encoder *)encoder; }
}
