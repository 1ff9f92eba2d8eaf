// The only code with instructions of AVX512_BF16; levels.h includes it with that target.
//
// Its functions are not inlined into the kernels, and those are compiled without AVX512_BF16: a compiler may execute
// an instruction without side effects ahead of the check that guards it, and a CPU without it raises SIGILL.

constexpr Index LANES_512 = 16;

// Activations (rows, width) in bf16, each row padded with zeros to `stride`.
[[gnu::noinline]] static void round(const float *x, Index rows, Index width, Index stride, uint16_t *out) {
    for (Index r = 0; r < rows; r++, x += width, out += stride)
        for (Index i = 0; i < stride; i += LANES_512) {
            Index count = std::max(Index(0), std::min(LANES_512, width - i));
            auto v = _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), x + i);
            _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(v));
        }
}

// A tile of R rows by two registers of columns; the weight is in a panel of pack_bf16.
template <int R, class Register>
[[gnu::noinline]] static void microkernel(const uint16_t *a, Index lda, const uint16_t *b, Index pairs,
                                          Register (&out)[R][2]) {
    __m512 acc[R][2];
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (Index i = 0; i < pairs; i++, b += 4 * LANES_512) {
        auto b0 = (__m512bh)_mm512_loadu_si512(b), b1 = (__m512bh)_mm512_loadu_si512(b + 2 * LANES_512);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, a + r * lda + i * 2, 4);
            auto x = (__m512bh)_mm512_set1_epi32(pair);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x, b0);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x, b1);
        }
    }
    for (int r = 0; r < R; r++) out[r][0] = (Register)acc[r][0], out[r][1] = (Register)acc[r][1];
}
