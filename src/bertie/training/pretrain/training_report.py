"""The callback of a pretraining run: curves, fill-mask samples, throughput and model FLOPs utilization."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.training.callbacks import LogRow
from bertie.training.mfu import flops_per_token, peak_flops
from bertie.training.pretrain.curves import Curves
from bertie.training.pretrain.monitoring import fill_mask_samples, write_samples
from bertie.training.sampling import BatchSampler


class TrainingReport:
    """Writes curves and samples to a folder while a run trains."""

    def __init__(
        self, folder: Path, checkpoint: Checkpoint, sampler: BatchSampler, dtype: torch.dtype, tensorboard: bool
    ) -> None:
        self.folder, self.checkpoint, self.sampler = folder, checkpoint, sampler
        self._dtype, self._tensorboard = dtype, tensorboard
        self._curves: Curves | None = None
        self._last: tuple[float, float] | None = None  # time and tokens of the last row
        self._flops: float | None = None
        self.tokens = self.seconds = 0.0
        self.mfu: float | None = None

    def on_start(self, rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> None:
        """As `TrainingCallback.on_start`."""
        if self._curves is not None:
            self._curves.close()
        self._curves = Curves(self.folder, rows, evaluations, tensorboard=self._tensorboard)
        self._last = None

    def on_log(self, row: LogRow) -> None:
        """As `TrainingCallback.on_log`; adds the throughput since the last row, if there is one."""
        assert self._curves is not None
        now, tokens = time.monotonic(), row["tokens"]
        speed = {}
        if self._last is not None:
            seconds, read = max(1e-9, now - self._last[0]), tokens - self._last[1]
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + read
            speed["tokens_per_second"] = round(read / seconds, 1)
            device = self.checkpoint.model.device
            if device.type == "cuda" and self.sampler.single_head:
                peak = peak_flops(device, self._dtype)
                if self._flops is None:
                    self._flops = self._flops_per_token()
                speed["mfu"] = round(self._flops * read / seconds / peak, 4)
                self.mfu = round(self._flops * self.tokens / self.seconds / peak, 4)
        self._last = (time.monotonic(), tokens)
        self._curves.log({**row, **speed})

    def on_evaluation(self, row: LogRow) -> None:
        """As `TrainingCallback.on_evaluation`; writes fill-mask samples too."""
        assert self._curves is not None
        self._curves.log_evaluation(row)
        model, tokenizer = self.checkpoint.model, self.checkpoint.tokenizer
        if "mlm" in model.heads and tokenizer is not None and tokenizer.mask_token is not None:
            write_samples(self.folder, int(row["step"]), fill_mask_samples(model, tokenizer))
        self._last = None  # the time of an evaluation is no training time

    def on_save(self) -> None:
        """As `TrainingCallback.on_save`."""
        assert self._curves is not None
        self._curves.write()
        self._last = None

    def close(self) -> None:
        """Write and close the files."""
        if self._curves is not None:
            self._curves.close()

    def _flops_per_token(self) -> float:
        """Of a step in the middle of the run."""
        _, examples = self.sampler.read(self.sampler.total_steps // 2)
        lengths = [len(example) for example in examples]
        rows = sum(len(w.rows) for example in examples for w in example.windows if w.rows is not None)
        return flops_per_token(self.checkpoint.model, lengths, rows / sum(lengths))
