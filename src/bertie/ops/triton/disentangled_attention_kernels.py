# mypy: ignore-errors
"""The Triton programs behind `disentangled.py`, which says what they compute. Only that file calls them.

A program has a tile of B rows of one text and head, and meets the text's other rows a tile of B at a time. Between row
a of its own tile and row b of the other, whose first places lie `gap` apart, the distance is gap + b − a: of 2 B − 1
distances each row needs B in a run, from B − 1 − a on. So its products with the table's rows, two tiles of B of them,
are merged into one of (B, B) by `late`, and then each row is turned by its own number (`tl.gather`: warp shuffles).
The second of the two tiles is the first of the next two. Products of the other tile with a table are the same mirrored.

Values are read in the precision they lie in. Products are summed, and the softmax is taken, in float32.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl

    jit = triton.jit
    program = triton.jit(do_not_specialize=["total", "distances", "dropped"])  # else compiled anew for some of them
except ImportError:  # then nothing here is called

    def jit(function):
        """The function as it stands."""
        return function

    program = jit


@program
def forward(
    q_at, k_at, v_at, out_at, level_at, keys_at, queries_at, scores_at, tiles_at, seed_at,
    q_stride, k_stride, v_stride, total, distances, factor, dropped, kept_scale,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, SCORES: tl.constexpr, DROP: tl.constexpr, PACK: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A program: a tile of queries. `level` is the logarithm (base 2) of what its weights were divided by."""
    head, start, length, first, own, there = _place(tiles_at, HEADS, B)
    q = _load(q_at, start + own, q_stride, head, there, WIDTH, D)
    keys_at += head * distances * WIDTH
    queries_at += head * distances * WIDTH
    scores_at += head * B * _span(distances, B)
    if DROP:
        own_bits, _ = _bits(seed_at, start + own, head, HEADS)
    top = tl.full((B,), -1e30, tl.float32)
    sums = tl.zeros((B,), tl.float32)
    out = tl.zeros((B, D), tl.float32)
    met = _before(q, keys_at, -first, distances, KEYS, PACK, WIDTH, D, B)
    for at in range(0, length, B):
        other = at + tl.arange(0, B)
        k = _load(k_at, start + other, k_stride, head, other < length, WIDTH, D)
        score, met = _score(
            q, k, met, keys_at, queries_at, scores_at, at - first, distances, factor,
            KEYS, QUERIES, SCORES, PACK, WIDTH, D, B,
        )  # fmt: skip
        score = tl.where((other < length)[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        weights = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        sums = sums * shrink + tl.sum(weights, 1)
        top = higher
        if DROP:
            _, other_bits = _bits(seed_at, start + other, head, HEADS)
            weights = tl.where(_kept(own_bits, other_bits, dropped), weights, 0.0)
        v = _load(v_at, start + other, v_stride, head, other < length, WIDTH, D)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None])
    sums = tl.where(there, sums, 1.0)
    _store(out_at, start + own, HEADS * WIDTH, head, there, out * (kept_scale / sums)[:, None], WIDTH, D)
    tl.store(level_at + head * total + start + own, top + tl.log2(sums), mask=there)


@program
def backward_queries(
    q_at, k_at, v_at, out_at, up_at, level_at, delta_at, dq_at, keys_at, queries_at, scores_at, dkeys_at, dscores_at,
    tiles_at, seed_at, q_stride, k_stride, v_stride, total, distances, scale, factor, dropped, kept_scale,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, SCORES: tl.constexpr, DROP: tl.constexpr, PACK: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A program: a tile of queries. Their gradients, what they add to those of keys and scores by distance, and `delta`
    for the keys' program: the sum over a row of gradient · output."""
    head, start, length, first, own, there = _place(tiles_at, HEADS, B)
    q = _load(q_at, start + own, q_stride, head, there, WIDTH, D)
    up = _load(up_at, start + own, HEADS * WIDTH, head, there, WIDTH, D)
    out = _load(out_at, start + own, HEADS * WIDTH, head, there, WIDTH, D)
    delta = tl.sum(out.to(tl.float32) * up.to(tl.float32), 1)
    tl.store(delta_at + head * total + start + own, delta, mask=there)
    level = tl.load(level_at + head * total + start + own, mask=there, other=0.0)
    keys_at += head * distances * WIDTH
    queries_at += head * distances * WIDTH
    scores_at += head * B * _span(distances, B)
    dkeys_at += head * distances * WIDTH
    dscores_at += head * distances
    if DROP:
        own_bits, _ = _bits(seed_at, start + own, head, HEADS)
    dq = tl.zeros((B, D), tl.float32)
    met = _before(q, keys_at, -first, distances, KEYS, PACK, WIDTH, D, B)
    rest = tl.zeros((B, B), q.dtype if KEYS else tl.float32)
    for at in range(0, length, B):
        other = at + tl.arange(0, B)
        k = _load(k_at, start + other, k_stride, head, other < length, WIDTH, D)
        score, met = _score(
            q, k, met, keys_at, queries_at, scores_at, at - first, distances, factor,
            KEYS, QUERIES, SCORES, PACK, WIDTH, D, B,
        )  # fmt: skip
        seen = there[:, None] & (other < length)[None, :]
        weights = tl.where(seen, tl.exp2(score - level[:, None]), 0.0)
        v = _load(v_at, start + other, v_stride, head, other < length, WIDTH, D)
        down = tl.dot(up, tl.trans(v))
        if DROP:
            _, other_bits = _bits(seed_at, start + other, head, HEADS)
            down = tl.where(_kept(own_bits, other_bits, dropped), down * kept_scale, 0.0)
        down = weights * (down - delta[:, None])
        dq = tl.dot(down.to(k.dtype), k, dq)
        if KEYS or SCORES:
            block, rest = _turned_back(down.to(rest.dtype), rest, at - first, B)
            dq = _give(
                block, q, dq, keys_at, dkeys_at, dscores_at, at - first, distances, scale, KEYS, SCORES, WIDTH, D, B
            )
    if KEYS or SCORES:
        gap = (length + B - 1) // B * B - first
        dq = _give(rest, q, dq, keys_at, dkeys_at, dscores_at, gap, distances, scale, KEYS, SCORES, WIDTH, D, B)
    _store(dq_at, start + own, HEADS * WIDTH, head, there, dq * scale, WIDTH, D)


@program
def backward_keys(
    q_at, k_at, v_at, up_at, level_at, delta_at, dk_at, dv_at, keys_at, queries_at, scores_at, dqueries_at,
    tiles_at, seed_at, q_stride, k_stride, v_stride, total, distances, scale, factor, dropped, kept_scale,
    KEYS: tl.constexpr, QUERIES: tl.constexpr, SCORES: tl.constexpr, DROP: tl.constexpr, PACK: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A program: a tile of keys. Their gradients, their values', and what they add to that of queries by distance.

    All is seen from the keys: a score is (key, query), and `scores` are in the order of query − key.
    """
    head, start, length, first, own, there = _place(tiles_at, HEADS, B)
    k = _load(k_at, start + own, k_stride, head, there, WIDTH, D)
    v = _load(v_at, start + own, v_stride, head, there, WIDTH, D)
    keys_at += head * distances * WIDTH
    queries_at += head * distances * WIDTH
    scores_at += head * B * _span(distances, B)
    dqueries_at += head * distances * WIDTH
    if DROP:
        _, own_bits = _bits(seed_at, start + own, head, HEADS)
    dk = tl.zeros((B, D), tl.float32)
    dv = tl.zeros((B, D), tl.float32)
    met = _before(k, queries_at, -first, distances, QUERIES, PACK, WIDTH, D, B)
    rest = tl.zeros((B, B), k.dtype)
    for at in range(0, length, B):
        other = at + tl.arange(0, B)
        inside = other < length
        q = _load(q_at, start + other, q_stride, head, inside, WIDTH, D)
        score, met = _score(
            k, q, met, queries_at, keys_at, scores_at, at - first, distances, factor,
            QUERIES, KEYS, SCORES, PACK, WIDTH, D, B,
        )  # fmt: skip
        up = _load(up_at, start + other, HEADS * WIDTH, head, inside, WIDTH, D)
        level = tl.load(level_at + head * total + start + other, mask=inside, other=0.0)
        delta = tl.load(delta_at + head * total + start + other, mask=inside, other=0.0)
        seen = there[:, None] & inside[None, :]
        weights = tl.where(seen, tl.exp2(score - level[None, :]), 0.0)
        down = tl.dot(v, tl.trans(up))
        if DROP:
            other_bits, _ = _bits(seed_at, start + other, head, HEADS)
            kept = _kept(own_bits, other_bits, dropped)
            down = tl.where(kept, down * kept_scale, 0.0)
            dv = tl.dot(tl.where(kept, weights, 0.0).to(up.dtype), up, dv)
        else:
            dv = tl.dot(weights.to(up.dtype), up, dv)
        down = (weights * (down - delta[None, :])).to(q.dtype)
        dk = tl.dot(down, q, dk)
        if QUERIES:
            block, rest = _turned_back(down, rest, at - first, B)
            dk = _give(
                block, k, dk, queries_at, dqueries_at, scores_at, at - first, distances, scale,
                True, False, WIDTH, D, B,
            )  # fmt: skip
    if QUERIES:
        gap = (length + B - 1) // B * B - first
        dk = _give(rest, k, dk, queries_at, dqueries_at, scores_at, gap, distances, scale, True, False, WIDTH, D, B)
    _store(dk_at, start + own, HEADS * WIDTH, head, there, dk * scale, WIDTH, D)
    _store(dv_at, start + own, HEADS * WIDTH, head, there, dv * kept_scale, WIDTH, D)


# --- scores ---


@jit
def _score(
    own, other, met, own_table_at, other_table_at, scores_at, gap, distances, factor,
    OWN: tl.constexpr, OTHER: tl.constexpr, SCORES: tl.constexpr, PACK: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """(B, B) scores in units of log 2, for tiles `gap` apart; and the products that the next tile needs too."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    late = row + column >= B - 1
    turn = _by(column - row - 1, gap, B)
    after = met
    terms = tl.zeros((B, B), tl.float32)
    if OTHER:
        one = _narrow(tl.dot(other, tl.trans(_rows(other_table_at, 1 - B - gap, distances, WIDTH, D, B))), PACK)
        two = _narrow(tl.dot(other, tl.trans(_rows(other_table_at, 1 - gap, distances, WIDTH, D, B))), PACK)
        theirs = tl.where(late, one, two)
    if OWN:
        after = _narrow(tl.dot(own, tl.trans(_rows(own_table_at, gap + 1, distances, WIDTH, D, B))), PACK)
        mine = tl.where(late, met, after)
    if OWN and OTHER and PACK:
        both = tl.gather(_word(mine) | (_word(theirs) << 16), turn, 1)  # they are turned alike
        terms = _half(both & 0xFFFF) + tl.trans(_half(both >> 16))
    else:
        if OWN:
            terms += tl.gather(mine, turn, 1).to(tl.float32)
        if OTHER:
            terms += tl.trans(tl.gather(theirs, turn, 1).to(tl.float32))
    # Not added afterwards: the compiler would take on their layout for all that follows.
    score = tl.dot(own, tl.trans(other), terms) * factor
    if SCORES:
        span = _span(distances, B)
        more = tl.load(scores_at + row * span + (span - B) // 2 + gap + column)
        score += more.to(tl.float32) * 1.4426950408889634
    return score, after


@jit
def _before(
    own, table_at, gap, distances,
    OWN: tl.constexpr, PACK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """What `_score` takes for `met` in the first tile."""
    if OWN:
        met = _narrow(tl.dot(own, tl.trans(_rows(table_at, gap + 1 - B, distances, WIDTH, D, B))), PACK)
    else:
        met = tl.zeros((B, B), tl.float32)
    return met


@jit
def _by(n, gap, B: tl.constexpr):
    """n modulo B. The gap, a multiple of B, is there only so that the compiler, which does not know that, will not keep
    all these numbers in registers for all turns of the loop, at the cost of others."""
    return (n + gap * gap) & (B - 1)


@jit
def _narrow(x, PACK: tl.constexpr):
    """Products with a table, as they are kept and turned: in float16 for models in half precision, bfloat16 too, for of
    numbers of this size it keeps more."""
    return tl.clamp(x, -65504.0, 65504.0).to(tl.float16) if PACK else x


@jit
def _word(x):
    return x.to(tl.uint16, bitcast=True).to(tl.uint32)


@jit
def _half(x):
    return x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# --- their way back ---


@jit
def _turned_back(down, rest, gap, B: tl.constexpr):
    """The gradient by products with the earlier of two tiles of a table's rows, whole with the `rest` of the last
    turn; and the rest of this one, by the later of the two."""
    row, column = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    turned = tl.gather(down, _by(column + row + 1, gap, B), 1)
    zeros = tl.zeros((B, B), down.dtype)
    late = row + column >= B - 1
    return tl.where(late, turned, rest), tl.where(late, zeros, turned)


@jit
def _give(
    block, own, down, table_at, dtable_at, dscores_at, gap, distances, scale,
    TABLE: tl.constexpr, SCORES: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """`down` with what products with the table's rows from gap + 1 − B on add; and what they add to those rows."""
    row = gap + 1 - B + distances // 2 + tl.arange(0, B)
    there = (row >= 0) & (row < distances)
    if TABLE:
        down = tl.dot(block, _rows(table_at, gap + 1 - B, distances, WIDTH, D, B), down)
        more = tl.dot(tl.trans(block), own) * scale
        column = tl.arange(0, D)
        mask = there[:, None] & (column < WIDTH)[None, :]
        tl.atomic_add(dtable_at + row[:, None] * WIDTH + column[None, :], more, mask=mask, sem="relaxed")
    if SCORES:
        tl.atomic_add(dscores_at + row, tl.sum(block.to(tl.float32), 0), mask=there, sem="relaxed")
    return down


# --- memory ---


@jit
def _place(tiles_at, HEADS: tl.constexpr, B: tl.constexpr):
    """Head; first token and length of the text; first place of the tile in it, all its places, and which exist."""
    number = tl.program_id(0)
    tile = number // HEADS * 3
    start, length, first = tl.load(tiles_at + tile), tl.load(tiles_at + tile + 1), tl.load(tiles_at + tile + 2)
    first = tl.multiple_of(first, B)
    own = first + tl.arange(0, B)
    return number % HEADS, start, length, first, own, own < length


@jit
def _span(distances, B: tl.constexpr):
    """Columns of a table of scores, see `disentangled._slanted`."""
    return distances // 2 // B * B * 2 + B


@jit
def _load(x_at, tokens, stride, head, there, WIDTH: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    at = x_at + tokens.to(tl.int64)[:, None] * stride + head * WIDTH + column[None, :]
    return tl.load(at, mask=there[:, None] & (column < WIDTH)[None, :], other=0.0)


@jit
def _store(x_at, tokens, stride, head, there, x, WIDTH: tl.constexpr, D: tl.constexpr):
    column = tl.arange(0, D)
    at = x_at + tokens.to(tl.int64)[:, None] * stride + head * WIDTH + column[None, :]
    tl.store(at, x.to(x_at.dtype.element_ty), mask=there[:, None] & (column < WIDTH)[None, :])


@jit
def _rows(table_at, first, distances, WIDTH: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """(B, D) a head's table from distance `first` on."""
    row = first + distances // 2 + tl.arange(0, B)
    column = tl.arange(0, D)
    mask = ((row >= 0) & (row < distances))[:, None] & (column < WIDTH)[None, :]
    return tl.load(table_at + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


# --- dropout ---


@jit
def _bits(seed_at, tokens, head, HEADS: tl.constexpr):
    """Two random words for each token of a head: one as a query, one as a key."""
    seed = tl.load(seed_at)
    number = (tokens * HEADS + head).to(tl.uint32)
    return _mixed(number ^ seed.to(tl.uint32)), _mixed(number ^ (seed >> 32).to(tl.uint32))


@jit
def _kept(own, other, dropped):
    """(B, B) by the upper bits of a product: both words are mixed already, and a proper draw for each weight would
    outlast all else."""
    return (own[:, None] ^ other[None, :]) * 0x9E3779B1 >= dropped.to(tl.uint32) << 16


@jit
def _mixed(x):
    """Words of which each bit depends on all of x (the end of murmur3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
