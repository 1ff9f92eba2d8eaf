"""The checks of `bertie doctor`. Each yields its results; `all_checks` catches what they raise."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import url2pathname

from bertie import compiled, threads
from bertie._version import __version__
from bertie.cli import settings
from bertie.errors import BertieError
from bertie.switches import VARIABLE as DISABLE
from bertie.switches import is_disabled

Status = Literal["ok", "note", "warning", "error"]
GIB = 1 << 30
MIN_MEMORY, MIN_DISK = GIB, GIB
REQUIRED = {"torch": (2, 11), "numpy": (2, 0), "tokenizers": (0, 22), "safetensors": (0, 6), "huggingface_hub": (1, 0)}
EXTRAS = {  # extras of the package: their modules, and what needs them
    "data": (("pyarrow",), "Parquet files"),
    "train": (("sklearn", "seqeval", "ir_measures"), "training reports and bertie eval"),
    "search": (("faiss", "bm25s", "Stemmer", "pypdf"), "bertie index and bertie search"),
    "serve": (("greenlet", "httptools", "pydantic", "orjson"), "bertie serve"),
    "ray": (("ray",), "--ray"),
}
CPU_FEATURES = {
    "AVX2": "avx2", "AVX-512": "avx512f", "VNNI": "avx512_vnni", "bf16": "avx512_bf16", "AMX": "amx_tile",
    "NEON": "asimd",
}  # fmt: skip
REINSTALL = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary bertie bertie"
INSTALL_COMPILER = {"darwin": "xcode-select --install", "win32": "winget install LLVM.LLVM"}  # by platform
HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check."""

    section: str
    name: str
    status: Status
    text: str
    fix: str = ""


def all_checks(*, network: bool = False) -> Iterator[Check]:
    """Run all checks, one after the other."""
    functions: list[Callable[[], Iterator[Check]]] = [
        versions, extras, processor, thread_counts, memory, compiled_parts, gpu, disk, built_in, user_settings,
    ]  # fmt: skip
    for function in [*functions, *([hub] if network else [])]:
        try:
            yield from function()
        except Exception as error:
            # A broken installation may raise anything, and the other checks must still run.
            name = function.__name__.replace("_", " ")
            yield Check("errors", name, "error", f"{type(error).__name__}: {str(error)[:200]}")


def versions() -> Iterator[Check]:
    """Python, and the packages that Bertie needs."""
    where = Path(__file__).parents[1]
    yield Check("versions", "bertie", "ok", f"{__version__} in {where}")
    system = f"{platform.system()} {platform.machine()}"
    is_old = sys.version_info < (3, 11)
    yield Check(
        *("versions", "python", "error" if is_old else "ok"),
        f"{platform.python_version()} on {system}, {sys.executable}",
        "install Python 3.11 or later" if is_old else "",
    )
    for name, minimum in REQUIRED.items():
        wanted = ".".join(map(str, minimum))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check("versions", name, "error", "not installed", f"pip install '{name}>={wanted}'")
            continue
        is_old = _numbers(version) < minimum
        fix = f"pip install --upgrade '{name}>={wanted}'" if is_old else ""
        yield Check("versions", name, "error" if is_old else "ok", version, fix)
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    if encoding != "utf8":
        yield Check("versions", "encoding", "warning", f"standard output is {encoding}", "export PYTHONUTF8=1")


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> _numbers("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])


def extras() -> Iterator[Check]:
    """Optional packages."""
    for name, (modules, purpose) in EXTRAS.items():
        missing = [module for module in modules if util.find_spec(module) is None]
        if not missing:
            yield Check("optional packages", name, "ok", f"for {purpose}")
        else:
            text = f"{', '.join(missing)} not installed, for {purpose}: pip install 'bertie[{name}]'"
            yield Check("optional packages", name, "note", text)


def processor() -> Iterator[Check]:
    """The CPU, and the instructions that it has."""
    info = _read("/proc/cpuinfo")
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in info.splitlines()}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    features = [feature for feature, flag in CPU_FEATURES.items() if flag in flags]
    yield Check("machine", "CPU", "ok", name + (f": {', '.join(features)}" if features else ""))


def thread_counts() -> Iterator[Check]:
    """CPUs, quotas, and the threads that are used."""
    allowed, quota, usable = len(threads.allowed_cpus()), threads.cpu_quota(), threads.available()
    total = os.cpu_count() or allowed
    parts = [f"{usable} used", f"{total} CPUs", f"{allowed} allowed" if allowed < total else ""]
    parts.append("" if quota is None else f"a quota of {quota:g}")
    given = os.environ.get("OMP_NUM_THREADS", "") if threads.count_is_given() else ""
    text, status, fix = ", ".join(filter(None, parts)), "ok", ""
    if given.isdecimal():
        text += f"; OMP_NUM_THREADS={given}"
        if int(given) > max(allowed, usable):
            status, fix = "warning", f"unset OMP_NUM_THREADS, or set it to {usable}: more threads than CPUs are slower"
        elif int(given) < usable:
            status = "note"
    yield Check("machine", "threads", status, text, fix)  # type: ignore[arg-type]
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 1.5 * allowed:
        text = f"{load:.1f} on {allowed} CPUs: other programs are running, so speeds are lower"
        yield Check("machine", "load", "warning", text, "run top to see which processes are busy")


def memory() -> Iterator[Check]:
    """Main memory, and the limit of the container."""
    lines = (line.partition(":") for line in _read("/proc/meminfo").splitlines())
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.split()[:1]}
    if not sizes:
        return
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    limit = _read("/sys/fs/cgroup/memory.max").strip() or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes").strip()
    text = f"{_gib(free)} available of {_gib(total)}"
    if limit.isdecimal() and int(limit) < total:
        used = _read("/sys/fs/cgroup/memory.current").strip()
        free = min(free, int(limit) - int(used or 0))
        text += f"; limited to {_gib(int(limit))} by the container"
    low = free < MIN_MEMORY
    fix = "close other programs, or use a smaller model or --precision int8" if low else ""
    yield Check("machine", "memory", "warning" if low else "ok", text, fix)


def compiled_parts() -> Iterator[Check]:
    """The compiled encoder, training kernels and tokenizer, or why they are not used."""
    from bertie.ops.native import encoder, training
    from bertie.text import wordpiece

    for name, module, file, backend in (
        ("encoder", encoder, "_encoder", "native.encoder"),
        ("training", training, "_training", "native.training"),
        ("tokenizer", wordpiece, "_wordpiece", "native.wordpiece"),
    ):
        path = compiled.library_path(str(module.__file__), file)
        level = encoder.instruction_level()
        if is_disabled(backend):
            yield Check("compiled extensions", name, "note", f"disabled by {DISABLE}={os.environ.get(DISABLE, '')}")
        elif not path.exists():
            error = compiled.build_error(str(module.__file__), file).splitlines()
            reason = error[-1] if error else "there was no C++ compiler when Bertie was installed"
            yield Check(
                "compiled extensions", name, "warning", f"not built, slower code runs instead: {reason}", _rebuild()
            )
        elif module.library() is None:
            text = f"{path.name} was built for another platform or by another version of Bertie"
            yield Check("compiled extensions", name, "warning", text, _rebuild())
        elif name == "tokenizer":
            yield Check("compiled extensions", name, "ok", "in use for WordPiece")
        elif not level:
            yield Check("compiled extensions", name, "note", "this CPU has neither AVX2 nor NEON; PyTorch runs instead")
        else:
            yield Check("compiled extensions", name, "ok", f"in use, with {encoder.LEVELS[level - 1]}")


def _rebuild() -> str:
    """The commands that install a compiler, and Bertie again from where it was installed from."""
    compiler = INSTALL_COMPILER.get(sys.platform, "apt install g++")
    caching = "pip keeps the wheel that it built without one"
    return f"install a C++ compiler ({compiler}), then {reinstall_command()} ({caching})"


def reinstall_command() -> str:
    """The command that builds Bertie again: from its checkout if it was installed from one, else from the registry."""
    try:
        origin = json.loads(metadata.distribution("bertie").read_text("direct_url.json") or "{}")  # PEP 610
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH
        return f"python {shlex.quote(str(compiled.PACKAGE.parents[1] / 'build_libraries.py'))}"
    if "dir_info" not in origin:
        return REINSTALL
    folder = shlex.quote(url2pathname(urlsplit(origin["url"]).path))
    editable = "--editable " if origin["dir_info"].get("editable") else ""
    return f"pip install --force-reinstall --no-deps --no-cache-dir {editable}{folder}"


def gpu() -> Iterator[Check]:
    """GPUs that PyTorch can use, or why it cannot use any."""
    import torch

    has_driver = shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            major, minor = torch.cuda.get_device_capability(number)
            text = (
                f"{torch.cuda.get_device_name(number)}, {_gib(free)} free of {_gib(total)}, capability {major}.{minor}"
            )
            yield Check("GPU", f"cuda:{number}", "ok", text)
        if util.find_spec("triton") is None:
            yield Check("GPU", "triton", "warning", "not installed; slower kernels run", "pip install triton")
    elif not has_driver:
        yield Check("GPU", "none", "note", "no NVIDIA driver: everything runs on the CPU")
    elif torch.version.cuda is None:
        text = f"this build of torch ({torch.__version__}) is for CPUs only"
        yield Check("GPU", "none", "warning", text, "install a CUDA build of torch: https://pytorch.org/get-started")
    else:
        text = f"torch was built for CUDA {torch.version.cuda}, and cannot use the driver"
        yield Check("GPU", "none", "warning", text, "update the NVIDIA driver, and check CUDA_VISIBLE_DEVICES")


def disk() -> Iterator[Check]:
    """Free disk space for models, temporary files and results."""
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = {"current folder": Path.cwd(), "model cache": cache, "temporary files": Path(tempfile.gettempdir())}
    for name, folder in places.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            fix = "export HF_HOME=FOLDER" if name == "model cache" else "use a folder that you may write to"
            yield Check("disk", name, "warning", f"{folder} is not writable", fix)
        elif free < MIN_DISK:
            text = f"{folder} has only {_gib(free)} left"
            yield Check("disk", name, "warning", text, "delete files, or use another disk")
        else:
            yield Check("disk", name, "ok", f"{_gib(free)} free in {folder}")


def built_in() -> Iterator[Check]:
    """The files of the built-in model, and a forward pass."""
    from bertie.checkpoints import hub, storage
    from bertie.tasks import Embedder

    fix = "pip install --force-reinstall --no-deps bertie"
    if hub.DEFAULT not in hub.built_in():
        yield Check("built-in model", hub.DEFAULT, "warning", "not in this installation; pass -m to every command", fix)
        return
    try:
        storage.verify(hub.BUILT_IN / hub.DEFAULT)
    except BertieError as error:
        yield Check("built-in model", hub.DEFAULT, "error", f"the files are damaged: {error}", fix)
        return
    start = time.perf_counter()
    embedder = Embedder.load(device="cpu")
    loaded = time.perf_counter()
    cat, feline, stocks = embedder.embed(["A cat sat on the mat.", "The feline rested on the rug.", "Stocks fell."])
    seconds = time.perf_counter() - loaded
    if not float(cat @ feline) > float(cat @ stocks) + 0.2:  # also if one is nan
        yield Check("built-in model", hub.DEFAULT, "error", "similarities are wrong", f"export {DISABLE}=native")
        return
    text = f"files intact, results correct; loaded in {loaded - start:.1f} s, 3 texts in {seconds * 1000:.0f} ms"
    yield Check("built-in model", hub.DEFAULT, "ok", text)


def user_settings() -> Iterator[Check]:
    """The configuration file, and the variables that change what commands do."""
    path = settings.config_path()
    try:
        read = settings.read_settings()
    except BertieError as error:
        yield Check("settings", "configuration", "error", str(error), f"edit {path}, or delete it")
        return
    exists = path.exists()
    yield Check("settings", "config.toml", "ok" if exists else "note", str(path) if exists else f"none ({path})")
    for name in settings.KEYS:
        if name in read.sources:
            yield Check("settings", name, "ok", f"{getattr(read, name)} (from {read.sources[name]})")
    if read.model is not None:
        yield from _model_exists(read.model, read.sources["model"])
    for name in (DISABLE, "BERTIE_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"):
        if value := os.environ.get(name):
            yield Check("settings", name, "note", value)


def _model_exists(model: str, source: str) -> Iterator[Check]:
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if is_path and not Path(model).expanduser().is_dir():
        yield Check("settings", "model", "error", f"{model} is not a folder", f"change {source}")


def hub() -> Iterator[Check]:
    """Whether the Hugging Face hub can be reached."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    address = os.environ.get("HF_ENDPOINT") or HUB
    start = time.perf_counter()
    try:
        urlopen(Request(address, method="HEAD"), timeout=5).close()
    except HTTPError:  # it answered
        pass
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        fix = "set HTTPS_PROXY, or HF_ENDPOINT to a mirror; local folders and the built-in model work without it"
        yield Check("network", "hub", "warning", f"{address} cannot be reached: {reason}", fix)
        return
    yield Check("network", "hub", "ok", f"{address} answered in {(time.perf_counter() - start) * 1000:.0f} ms")


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"


def _read(name: str) -> str:
    try:
        return Path(name).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
