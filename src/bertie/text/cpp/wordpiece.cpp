// BERT's WordPiece tokenizer for batches of ASCII texts. text/wordpiece.py is the only caller.
//
// A text is normalized (lower case, control characters removed, ...), split at whitespace and around punctuation, and
// each word is matched greedily against the vocabulary, longest piece first. The caller supplies the normalization of
// each character as a table. A WordPiece object is immutable once created, so threads may share it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

namespace {

using Byte = uint8_t;

enum CharClass : Byte { LETTER, SPACE, PUNCTUATION };
constexpr Byte REMOVED = 255;
constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15;  // 2^64 / golden ratio: mixes well into the upper bits

// Rolling hash of a piece; the seed separates word-initial pieces from continuations (##piece).
uint64_t hash_seed(bool continuation) { return continuation ? 0x2545F4914F6CDD1D : 0x6A09E667F3BCC909; }
uint64_t hash_step(uint64_t hash, Byte letter) { return (hash ^ letter) * MULTIPLIER; }

struct Slot {  // of an open-addressing hash table
    uint64_t hash;
    uint32_t offset, key;  // offset into `letters`; length * 2 + continuation, 0: free
    int64_t id;
};

struct WordPiece {
    std::array<Byte, 256> normalized{};          // per character; REMOVED: none
    std::array<Byte, 256> classes{};             // CharClass per normalized character
    std::array<Byte, 256> starts_added_token{};  // whether an added token starts with the character
    std::vector<Byte> letters;                   // all pieces, concatenated
    std::vector<Slot> slots;                     // at least twice the number of pieces, a power of two
    int shift = 0;
    size_t longest_piece[2] = {0, 0};            // word-initial, continuation
    // Trie of the added tokens in lower case. Entries: 0 no match, -1 a token ends here, otherwise the next node.
    std::vector<std::array<int32_t, 128>> added_tokens;
    std::vector<int64_t> prefix_ids, suffix_ids;  // e.g. [CLS] and [SEP]
    int64_t unknown_id = 0;
    size_t max_word_length = 0;

    const Slot *find(uint64_t hash, const Byte *piece, size_t length, bool continuation) const {
        uint32_t key = (uint32_t)(length * 2 + continuation);
        for (size_t i = hash >> shift;; i = (i + 1) & (slots.size() - 1)) {
            const Slot &slot = slots[i];
            if (!slot.key) return nullptr;
            if (slot.hash == hash && slot.key == key && !memcmp(&letters[slot.offset], piece, length)) return &slot;
        }
    }

    void insert(size_t offset, size_t length, bool continuation, int64_t id) {
        if (!length) return;
        uint64_t hash = hash_seed(continuation);
        for (size_t i = 0; i < length; ++i) hash = hash_step(hash, letters[offset + i]);
        size_t i = hash >> shift;
        while (slots[i].key) i = (i + 1) & (slots.size() - 1);
        slots[i] = {hash, (uint32_t)offset, (uint32_t)(length * 2 + continuation), id};
        longest_piece[continuation] = std::max(longest_piece[continuation], length);
    }

    void insert_added_token(const Byte *token, size_t length) {
        int32_t node = 0;
        for (size_t i = 0; i < length; ++i) {
            int32_t next = added_tokens[node][token[i] & 127];
            if (next < 0) return;  // a prefix of this token is a token, and matches first
            if (i + 1 == length) {
                added_tokens[node][token[i] & 127] = -1;
            } else if (!next) {
                next = (int32_t)added_tokens.size();
                added_tokens[node][token[i] & 127] = next;
                added_tokens.push_back({});
            }
            node = next;
        }
    }

    bool matches_added_token(const Byte *text, const Byte *end) const {
        for (int32_t node = 0; text < end; ++text) {
            Byte lower = *text >= 'A' && *text <= 'Z' ? *text + 32 : *text;
            node = added_tokens[node][lower & 127];
            if (node <= 0) return node < 0;
        }
        return false;
    }

    // Greedy longest-match-first pieces of a word; `hashes` has room for the longest piece.
    int64_t *split_word(const Byte *word, size_t length, uint64_t *hashes, int64_t *out) const {
        int64_t *first = out;
        for (size_t start = 0; start < length;) {
            bool continuation = start > 0;
            size_t size = std::min(length - start, longest_piece[continuation]);
            uint64_t hash = hash_seed(continuation);
            for (size_t i = 0; i < size; ++i) hashes[i] = hash = hash_step(hash, word[start + i]);
            const Slot *slot = nullptr;
            for (; size && !(slot = find(hashes[size - 1], word + start, size, continuation)); --size) {}
            if (!slot) {
                *first = unknown_id;
                return first + 1;
            }
            *out++ = slot->id;
            start += size;
        }
        return out;
    }

    // Writes at most one id per character, plus prefix and suffix, and returns the end of the ids. Returns null if the
    // text is not ASCII or contains an added token. `clean` has room for the normalized text.
    int64_t *encode(const Byte *text, size_t length, Byte *clean, uint64_t *hashes, int64_t *out) const {
        Byte *end = clean, high = 0;
        for (size_t i = 0; i < length; ++i) {
            Byte c = normalized[text[i]];
            high |= text[i];
            *end = c;
            end += c != REMOVED;
        }
        if (high & 128) return nullptr;
        out = std::copy(prefix_ids.begin(), prefix_ids.end(), out);
        for (const Byte *c = clean; c < end;) {
            const Byte *word = c;
            uint64_t hash = hash_seed(false);
            for (; c < end && classes[*c] == LETTER; ++c) {
                if (starts_added_token[*c] && matches_added_token(c, end)) return nullptr;
                hash = hash_step(hash, *c);
            }
            if (c == word) {  // whitespace, or punctuation, which is a word of its own
                if (starts_added_token[*c] && matches_added_token(c, end)) return nullptr;
                hash = hash_step(hash, *c++);
                if (classes[*word] == SPACE) continue;
            }
            size_t n = c - word;
            if (n > max_word_length) {
                *out++ = unknown_id;
            } else if (const Slot *slot = n <= longest_piece[0] ? find(hash, word, n, false) : nullptr) {
                *out++ = slot->id;
            } else {
                out = split_word(word, n, hashes, out);
            }
        }
        return std::copy(suffix_ids.begin(), suffix_ids.end(), out);
    }
};

}  // namespace

extern "C" {

EXPORT void bertie_wordpiece_abi_2() {}  // ABI_VERSION in text/wordpiece.py

// `tokens` is the concatenated vocabulary, with the end offset and id of each token; those that start with
// `continuation_prefix` continue a word. `added_tokens` are normalized and in lower case. `template_ids` are `n_prefix`
// ids before and `n_suffix` ids after each text. Returns null if out of memory.
EXPORT void *bertie_wordpiece_create(const Byte *normalized, const Byte *classes, const Byte *tokens,
                                     const int64_t *token_ends, const int64_t *ids, int64_t n_tokens,
                                     const Byte *continuation_prefix, int64_t prefix_length, const Byte *added_tokens,
                                     const int64_t *added_ends, int64_t n_added, const int64_t *template_ids,
                                     int64_t n_prefix, int64_t n_suffix, int64_t unknown_id, int64_t max_word_length) try {
    if (n_tokens && token_ends[n_tokens - 1] > INT32_MAX) return nullptr;
    auto self = std::make_unique<WordPiece>();
    std::copy(normalized, normalized + 256, self->normalized.begin());
    std::copy(classes, classes + 256, self->classes.begin());
    self->letters.assign(tokens, tokens + (n_tokens ? token_ends[n_tokens - 1] : 0));
    int bits = 4;
    while ((int64_t(1) << bits) < 4 * n_tokens) ++bits;
    self->shift = 64 - bits;
    self->slots.assign(size_t(1) << bits, Slot{0, 0, 0, 0});
    for (int64_t i = 0, start = 0; i < n_tokens; start = token_ends[i++]) {
        int64_t length = token_ends[i] - start;
        self->insert(start, length, false, ids[i]);
        if (length > prefix_length && !memcmp(tokens + start, continuation_prefix, prefix_length))
            self->insert(start + prefix_length, length - prefix_length, true, ids[i]);
    }
    self->added_tokens.push_back({});
    for (int64_t i = 0, start = 0; i < n_added; start = added_ends[i++])
        self->insert_added_token(added_tokens + start, added_ends[i] - start);
    for (int c = 0; c < 128; ++c) {
        if (!self->added_tokens[0][c]) continue;
        self->starts_added_token[c] = 1;
        if (c >= 'a' && c <= 'z') self->starts_added_token[c - 32] = 1;
    }
    self->prefix_ids.assign(template_ids, template_ids + n_prefix);
    self->suffix_ids.assign(template_ids + n_prefix, template_ids + n_prefix + n_suffix);
    self->unknown_id = unknown_id;
    self->max_word_length = (size_t)max_word_length;
    return self.release();
} catch (const std::bad_alloc &) {
    return nullptr;
}

// Writes the concatenated ids of all texts, and each text's length: -1 where it is not ASCII or contains an added token.
// Returns the number of ids; -1 if out of memory, if `capacity` is too small, or if `ends` is invalid.
EXPORT int64_t bertie_wordpiece_encode(const void *handle, const Byte *texts, int64_t size, const int64_t *ends,
                                       int64_t n_texts, int64_t *ids, int64_t capacity, int64_t *lengths) try {
    const auto &self = *(const WordPiece *)handle;
    int64_t longest_text = 0, start = 0;
    for (int64_t i = 0; i < n_texts; start = ends[i++]) {
        if (ends[i] < start || ends[i] > size) return -1;
        longest_text = std::max(longest_text, ends[i] - start);
    }
    int64_t template_length = self.prefix_ids.size() + self.suffix_ids.size();
    if (capacity < start || (n_texts && (capacity - start) / n_texts < template_length)) return -1;
    std::vector<Byte> clean(longest_text);
    std::vector<uint64_t> hashes(std::max(self.longest_piece[0], self.longest_piece[1]));
    int64_t *out = ids;
    start = 0;
    for (int64_t i = 0; i < n_texts; start = ends[i++]) {
        int64_t *next = self.encode(texts + start, ends[i] - start, clean.data(), hashes.data(), out);
        lengths[i] = next ? next - out : -1;
        if (next) out = next;
    }
    return out - ids;
} catch (const std::bad_alloc &) {
    return -1;
}

EXPORT void bertie_wordpiece_destroy(void *handle) { delete (WordPiece *)handle; }
}
