"""Peak memory of loading a checkpoint, beyond that of the imports, relative to the size of the weight files.

    python benchmarks/load_memory.py FOLDER [--json]

The measured load runs in a fresh process, because a peak never decreases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def measure(folder: str) -> dict[str, float]:
    """Load once, in this process."""
    import torch

    from bertie.checkpoints.checkpoint import Checkpoint

    torch.ones(8) @ torch.ones(8, 8)  # torch's one-time setup is not the model's
    before, start = peak_bytes(), time.perf_counter()
    checkpoint = Checkpoint.load(folder)
    seconds, rise = time.perf_counter() - start, peak_bytes() - before
    files = [p for p in Path(folder).rglob("*") if p.suffix in (".safetensors", ".bin")]
    weight_files = [p for p in files if p.suffix == ".safetensors"] or files
    size = sum(p.stat().st_size for p in weight_files)
    weights = sum(p.numel() * p.element_size() for p in checkpoint.model.parameters())
    return {
        "weight_file_mb": size / 2**20,
        "weights_in_memory_mb": weights / 2**20,
        "peak_increase_mb": rise / 2**20,
        "ratio": rise / size,
        "seconds": seconds,
    }


def main() -> None:
    """Measure in a fresh process and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.folder)))
        return
    command = [sys.executable, __file__, options.folder, "--here"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if options.json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:22} {value:10.2f}")


if __name__ == "__main__":
    main()
