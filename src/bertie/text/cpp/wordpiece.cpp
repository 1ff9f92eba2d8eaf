// BERT's WordPiece for ASCII texts: many texts in, their ids out. text/wordpiece.py is its only caller.
//
// A text is written anew as the normalizer would (letters in lower case, control characters left out, ...), cut at
// white space and around punctuation, and each word is looked up: whole, and if it is not there, its longest beginning,
// then the longest beginning of what is left. What one character becomes is the caller's to say; nothing here depends
// on neighbours. Nothing changes after the vocabulary is read, so threads may share it.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

using Byte = uint8_t;

enum Kind : Byte { LETTER, SPACE, PUNCTUATION };
constexpr Byte DROPPED = 255;
constexpr uint64_t MULTIPLIER = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio: mixes well in the upper bits

// The hash of a piece, letter by letter; pieces that begin a word and those that go on with one are told apart.
uint64_t start(bool goes_on) { return goes_on ? 0x2545F4914F6CDD1D : 0x6A09E667F3BCC909; }
uint64_t step(uint64_t hash, Byte letter) { return (hash ^ letter) * MULTIPLIER; }

struct Slot {
    uint64_t hash;
    uint32_t at, shape;  // where its letters lie; length * 2 + goes_on, 0: free
    int64_t id;
};

struct WordPiece {
    std::array<Byte, 256> becomes{};  // DROPPED: nothing
    std::array<Byte, 256> kinds{};    // of what it became
    std::array<Byte, 256> opens{};    // whether an added token begins with it
    std::vector<Byte> letters;        // of all pieces
    std::vector<Slot> slots;          // at least twice as many as pieces, a power of two
    int shift = 0;
    size_t longest[2] = {0, 0};
    // Added tokens in lower case: 0 none goes on like that, -1 one ends here, else the next row.
    std::vector<std::array<int32_t, 128>> added;
    std::vector<int64_t> before, after;
    int64_t unknown = 0;
    size_t longest_word = 0;

    const Slot *find(uint64_t hash, const Byte *word, size_t length, bool goes_on) const {
        uint32_t shape = (uint32_t)(length * 2 + goes_on);
        for (size_t i = hash >> shift;; i = (i + 1) & (slots.size() - 1)) {
            const Slot &slot = slots[i];
            if (!slot.shape) return nullptr;
            if (slot.hash == hash && slot.shape == shape && !memcmp(&letters[slot.at], word, length)) return &slot;
        }
    }

    void put(size_t at, size_t length, bool goes_on, int64_t id) {
        if (!length) return;
        uint64_t hash = start(goes_on);
        for (size_t i = 0; i < length; ++i) hash = step(hash, letters[at + i]);
        size_t i = hash >> shift;
        while (slots[i].shape) i = (i + 1) & (slots.size() - 1);
        slots[i] = {hash, (uint32_t)at, (uint32_t)(length * 2 + goes_on), id};
        longest[goes_on] = std::max(longest[goes_on], length);
    }

    void add(const Byte *token, size_t length) {
        int32_t row = 0;
        for (size_t i = 0; i < length; ++i) {
            int32_t next = added[row][token[i] & 127];
            if (next < 0) return;  // a shorter one is found before it
            if (i + 1 == length) {
                added[row][token[i] & 127] = -1;
            } else if (!next) {
                next = (int32_t)added.size();
                added[row][token[i] & 127] = next;
                added.push_back({});
            }
            row = next;
        }
    }

    bool begins_added(const Byte *at, const Byte *end) const {
        for (int32_t row = 0; at < end; ++at) {
            Byte lower = *at >= 'A' && *at <= 'Z' ? *at + 32 : *at;
            row = added[row][lower & 127];
            if (row <= 0) return row < 0;
        }
        return false;
    }

    // The pieces of a word that is not one itself; `hashes` has room for the longest piece.
    int64_t *split(const Byte *word, size_t length, uint64_t *hashes, int64_t *out) const {
        int64_t *first = out;
        for (size_t at = 0; at < length;) {
            bool goes_on = at > 0;
            size_t most = std::min(length - at, longest[goes_on]);
            uint64_t hash = start(goes_on);
            for (size_t i = 0; i < most; ++i) hashes[i] = hash = step(hash, word[at + i]);
            const Slot *found = nullptr;
            for (; most && !(found = find(hashes[most - 1], word + at, most, goes_on)); --most) {}
            if (!found) {
                *first = unknown;
                return first + 1;
            }
            *out++ = found->id;
            at += most;
        }
        return out;
    }

    // Never more ids than characters, beside `before` and `after`; null: the text is not ASCII, or has an added token.
    int64_t *encode(const Byte *text, size_t length, Byte *clean, uint64_t *hashes, int64_t *out) const {
        Byte *end = clean, high = 0;
        for (size_t i = 0; i < length; ++i) {
            Byte now = becomes[text[i]];
            high |= text[i];
            *end = now;
            end += now != DROPPED;
        }
        if (high & 128) return nullptr;
        out = std::copy(before.begin(), before.end(), out);
        for (const Byte *at = clean; at < end;) {
            const Byte *word = at;
            uint64_t hash = start(false);
            for (; at < end && kinds[*at] == LETTER; ++at) {
                if (opens[*at] && begins_added(at, end)) return nullptr;
                hash = step(hash, *at);
            }
            if (at == word) {  // no letter: white space, or punctuation, which is a word by itself
                if (opens[*at] && begins_added(at, end)) return nullptr;
                hash = step(hash, *at++);
                if (kinds[*word] == SPACE) continue;
            }
            size_t n = at - word;
            if (n > longest_word) {
                *out++ = unknown;
            } else if (const Slot *found = n <= longest[0] ? find(hash, word, n, false) : nullptr) {
                *out++ = found->id;
            } else {
                out = split(word, n, hashes, out);
            }
        }
        return std::copy(after.begin(), after.end(), out);
    }
};

}  // namespace

extern "C" {

void bertie_wordpiece_1() {}  // CALLS in fast.py

// `tokens` lie one behind the other, with their `ends` and `ids`; those that begin with `prefix` go on with a word.
// `specials` are added tokens, cleaned and in lower case. Null: no memory.
void *bertie_wordpiece_new(const Byte *becomes, const Byte *kinds, const Byte *tokens, const int64_t *ends,
                           const int64_t *ids, int64_t n, const Byte *prefix, int64_t prefix_length,
                           const Byte *specials, const int64_t *special_ends, int64_t n_specials,
                           const int64_t *template_ids, int64_t n_before, int64_t n_after, int64_t unknown,
                           int64_t longest_word) try {
    if (n && ends[n - 1] > INT32_MAX) return nullptr;
    auto self = std::make_unique<WordPiece>();
    std::copy(becomes, becomes + 256, self->becomes.begin());
    std::copy(kinds, kinds + 256, self->kinds.begin());
    self->letters.assign(tokens, tokens + (n ? ends[n - 1] : 0));
    int bits = 4;
    while ((int64_t(1) << bits) < 4 * n) ++bits;
    self->shift = 64 - bits;
    self->slots.assign(size_t(1) << bits, Slot{0, 0, 0, 0});
    for (int64_t i = 0, at = 0; i < n; at = ends[i++]) {
        int64_t length = ends[i] - at;
        self->put(at, length, false, ids[i]);
        if (length > prefix_length && !memcmp(tokens + at, prefix, prefix_length))
            self->put(at + prefix_length, length - prefix_length, true, ids[i]);
    }
    self->added.push_back({});
    for (int64_t i = 0, at = 0; i < n_specials; at = special_ends[i++]) self->add(specials + at, special_ends[i] - at);
    for (int c = 0; c < 128; ++c) {
        if (!self->added[0][c]) continue;
        self->opens[c] = 1;
        if (c >= 'a' && c <= 'z') self->opens[c - 32] = 1;
    }
    self->before.assign(template_ids, template_ids + n_before);
    self->after.assign(template_ids + n_before, template_ids + n_before + n_after);
    self->unknown = unknown;
    self->longest_word = (size_t)longest_word;
    return self.release();
} catch (const std::bad_alloc &) {
    return nullptr;
}

// The ids of all texts that are taken, one behind the other, and how many each has: -1 where it is not taken. Returns
// how many ids there are; -1: no memory, or not enough room, or ends that are none.
int64_t bertie_wordpiece_run(const void *handle, const Byte *texts, int64_t size, const int64_t *ends, int64_t n,
                             int64_t *ids, int64_t room, int64_t *lengths) try {
    const auto &self = *(const WordPiece *)handle;
    int64_t longest = 0, at = 0;
    for (int64_t i = 0; i < n; at = ends[i++]) {
        if (ends[i] < at || ends[i] > size) return -1;
        longest = std::max(longest, ends[i] - at);
    }
    int64_t around = self.before.size() + self.after.size();
    if (room < at || (n && (room - at) / n < around)) return -1;
    std::vector<Byte> clean(longest);
    std::vector<uint64_t> hashes(std::max(self.longest[0], self.longest[1]));
    int64_t *out = ids;
    at = 0;
    for (int64_t i = 0; i < n; at = ends[i++]) {
        int64_t *next = self.encode(texts + at, ends[i] - at, clean.data(), hashes.data(), out);
        lengths[i] = next ? next - out : -1;
        if (next) out = next;
    }
    return out - ids;
} catch (const std::bad_alloc &) {
    return -1;
}

void bertie_wordpiece_free(void *handle) { delete (WordPiece *)handle; }
}
