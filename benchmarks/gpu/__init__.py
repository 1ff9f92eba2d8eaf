"""Inference speed on a GPU, side by side with transformers and sentence-transformers in the same run.

    python -m benchmarks.gpu [--models minilm,bert-base,…] [--parts mix,compiled,requests,text,…] [--json FILE]

Models have the real shapes and vocabularies, and random weights, the same on both sides. Everything is in bfloat16
(float32 on a CPU), for inference.

mix         4,096 texts of mixed length (mean 117, median 87, 95th percentile 324, at most 512 tokens), from token ids
            to the last hidden state. Bertie: flat batches, several token budgets. transformers: texts sorted by length,
            batches padded to their longest, several sizes; sdpa where available; no mask where nothing is padded.
            Batches are on the device before the clock starts, on both sides. The best setting of each is measured
            again, interleaved; medians are reported.
compiled    after `mix`, in the remaining time: transformers under torch.compile(dynamic=True), each model in a process
            of its own, interleaved with Bertie and uncompiled transformers. `--compile` lists the models.
requests    a classifier of the largest model listed, on requests of 16 tokens, by batch size; Bertie with and without
            CUDA-graph replay, in bf16 and fp8.
fp8         bf16 and fp8 on the texts of `mix`, interleaved, and the relative error of the hidden states.
fixed       DeBERTa models on texts of one length, 16 to 2,048 tokens, 65,536 in all, against FlashDeBERTa (PyPI
            flashdeberta, which must be installed).
text        from text to normalized embeddings: `--folder` is a sentence-transformers model, `--texts` a file with one
            text per line.
lengths     time against total tokens, and against text length at a fixed total; peak memory of one long text.
invariance  the largest difference between a text alone and in a batch, by precision; and the cost of running each text
            alone.

"TF" is 2 × weights of the blocks × real tokens / s: padding does not count as work. The share is of the throughput of a
large GEMM, measured at the start. `--seconds` is a limit: what does not fit is skipped and reported. Results are
written after each model.
"""
