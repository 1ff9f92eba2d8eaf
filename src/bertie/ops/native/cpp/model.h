// Data structures: the packed model, and one forward pass over a flat batch.

// Bump allocator backed by huge pages: streaming weights through 4 KiB pages stalls on TLB misses.
class Arena {
  public:
    Arena() = default;
    Arena(const Arena &) = delete;
    ~Arena() {
        for (void *chunk : chunks) free_pages(chunk);
    }
    void *allocate(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > available) {
            available = std::max(bytes, CHUNK_SIZE);
            available = (available + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
            cursor = (uint8_t *)allocate_pages(HUGE_PAGE, available);
            if (!cursor) throw std::bad_alloc();
            chunks.push_back(cursor);
            advise_huge_pages(cursor, available);
        }
        cursor += bytes;
        available -= bytes;
        return cursor - bytes;
    }

  private:
    static constexpr size_t HUGE_PAGE = 2 << 20, CHUNK_SIZE = 16 << 20;
    std::vector<void *> chunks;
    uint8_t *cursor = nullptr;
    size_t available = 0;
};

struct Linear {  // weight (n, k), packed in one of three formats; the others are null
    Index n = 0, k = 0;
    float *f32 = nullptr;
    uint16_t *bf16 = nullptr;
    void *int8 = nullptr;
    std::vector<float> bias, scales, row_sums;  // int8: scale and sum of each output row
};

struct Norm {
    std::vector<float> weight, bias;  // no weight: identity
    bool rms = false;
    float eps = 0;
};

struct Block {
    Linear qkv, out, up, gate, down;
    Norm pre_attention, post_attention, pre_ff, post_ff;
    Norm attention_output, ff_output;  // of what is added to the residual
    Norm q_norm, k_norm;               // of each head's queries and keys
    std::vector<float> c2p_table, p2c_table;  // packed relative position keys and queries
};

struct Embeddings {  // tables (rows, D) in the caller's memory; null: not used
    const float *words = nullptr, *segments = nullptr, *positions = nullptr, *constant = nullptr;
    float scale = 1;
    Norm norm;
};

struct Layer {
    int block, rotary;  // index of the cos/sin tables; -1: no rotary embeddings
    Index before, after;  // how many tokens on either side a query attends to; -1: all
};

struct Pass;
struct Encoder;

struct Worker {  // a thread's scratch memory, reused by later passes
    virtual ~Worker() = default;
    virtual void run(const Encoder &, Pass &, int rank) = 0;
};

struct Encoder {
    Index width, heads, kv_heads, head_width, ff_width, relative_rows = 0;
    int activation;
    bool gated;
    float scale;  // of attention scores
    std::vector<Layer> layers;
    std::vector<Block> blocks;
    Embeddings embeddings;
    Norm final_norm;
    Arena arena;
    void (*pack_f32)(Arena &, Linear &, const float *);
    void (*pack_int8)(Arena &, Linear &, const int8_t *, const float *) = nullptr;
    void (*pack_bf16)(Arena &, Linear &, const uint16_t *) = nullptr;
    void (*pack_relative)(std::vector<float> &, const float *, Index, Index, Index);
    Worker *(*new_worker)();
    Index panel_width;
    int isa_level;
    std::vector<std::pair<const float *, float>> samples;  // addresses in the caller's weights, and their values
};

// One head's relative position terms. `bias` and `rows` point at distance 0 and are indexed by key - query.
struct RelativePosition {
    const float *bias = nullptr;                   // added to the scores; null: none
    const int32_t *rows = nullptr;                 // rows of the tables below; null: no disentangled attention
    const float *c2p = nullptr, *p2c = nullptr;    // the head's packed tables; null: term not used
};

struct Batch {  // flat: T tokens of B texts
    Index texts;
    const int32_t *cu_seqlens;                  // (B + 1,)
    const int64_t *ids, *segments, *positions;  // null ids: x holds the embeddings
    float *x;                                   // (T, D) hidden states, updated in place
    const float *const *cos, *const *sin;       // (T, d) for each rotary base
    // By distance of key from query, starting at -(max_len - 1):
    const float *bias;         // (H, distances) relative position bias; null: none
    const int32_t *rows;       // (distances,) rows of the relative position tables; null: none
    Index distances, zero_distance;  // count, including one panel of padding; index of distance 0

    RelativePosition relative_position(const Block &block, Index head, Index table_size) const {
        RelativePosition relative;
        if (bias) relative.bias = bias + head * distances + zero_distance;
        if (!rows) return relative;
        relative.rows = rows + zero_distance;
        if (!block.c2p_table.empty()) relative.c2p = block.c2p_table.data() + head * table_size;
        if (!block.p2c_table.empty()) relative.p2c = block.p2c_table.data() + head * table_size;
        return relative;
    }
};

// A thread that waits for its team spins for less than a GEMM takes, then sleeps: if another process has the core of
// the thread that it waits for, spinning would keep that core from it.
constexpr int BARRIER_SPINS = 2000;

struct Pass {  // some texts of a batch, and the team of threads that runs them through all layers
    const Batch *batch;
    Index first_token, texts;
    const int32_t *cu_seqlens;  // (texts + 1,), from 0
    float *x;
    int team_size;
    float *qkv, *context, *attention_out, *ff_out, *ff;
    std::atomic<int> arrived{0}, generation{0}, sleeping{0};

    void barrier() { barrier(team_size); }

    void barrier(int threads) {
        if (threads == 1) return;
        int current = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            generation.store(current + 1);
            if (sleeping.load()) wake_all(generation);  // each sees the other's store: both are seq_cst
            return;
        }
        for (int spins = 0; spins < BARRIER_SPINS; spins++) {
            if (generation.load(std::memory_order_acquire) != current) return;
            cpu_pause();
        }
        sleeping.fetch_add(1);
        while (generation.load() == current) sleep_while(generation, current);
        sleeping.fetch_sub(1);
    }
};
