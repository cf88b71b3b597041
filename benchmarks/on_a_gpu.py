"""Everything that only a GPU can show, in pieces: one file of results that lesson 03 can plot.

    python benchmarks/on_a_gpu.py --next                  # the first piece without a result
    python benchmarks/on_a_gpu.py --parts loss fp8        # some; the others keep their old results
    python benchmarks/on_a_gpu.py --small                 # tiny shapes, also without a GPU: a trial

A piece is ended after eight minutes, and its result is written when it ends: what a GPU has shown
stays, also if the next piece fails. They stand in the order of their worth. `--next` takes the
first that was not tried on this kind of GPU with this PyTorch, and when all were, the first that
failed.

A training is one of `python -m labcode.train`, as a user would run it: the median over the rows of
its metrics, without the first ones, in which compilation and warm-up happen.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from side_by_side import write

from labcode.measure import metrics, roofline
from labcode.measure.device_speed import device_speed
from labcode.perf import chrome_trace

HERE = Path(__file__).parent
RESULT = HERE.parent / "labcode" / "assets" / "on_a_gpu.json"  # lesson 03 shows it
LIMIT_S = 480  # of a piece
TRACES = HERE / "results" / "traces"
MOST_BYTES = 3_000_000  # of a trace that is kept
WARM_ROWS = 4  # of the metrics that are left out

Changes = Mapping[str, object]

ATTENTION = (16, 8, 4050, 48)  # batch, heads, tokens, size of a head: those of the ladder

FAST: Changes = {
    "train.dtype": "bfloat16",
    "train.compile": "model",
    "optim.implementation": "fused",
}
TEXT: Changes = {"data.tokenizer": "bpe", "train.sample_tokens": 0}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        name: In the table.
        recipe: Recipe of `python -m labcode.train`.
        changes: Changes of its fields.
        goal: The least MFU that we want, if there is one.
    """

    name: str
    recipe: str
    changes: Changes
    goal: float | None = None


def gpt(layers: int, heads: int, hidden: int, batch: int) -> Changes:
    """A GPT of 2048 tokens with GPT-2's vocabulary, a little larger so that 64 divides it."""
    return {
        "model.num_layers": layers,
        "model.num_heads": heads,
        "model.hidden_size": hidden,
        "model.context_length": 2048,
        "model.vocab_size": 50304,
        "model.positions": "learned",
        "train.global_batch": batch,
        "train.micro_batch": batch,
        **TEXT,
    }


MFU = (Run("GPT 124M", "gpt_10m", {**gpt(12, 12, 768, 32), **FAST}, goal=0.45),)
MFU_LARGE = (Run("GPT 1.3B", "gpt_10m", {**gpt(24, 16, 2048, 8), **FAST}, goal=0.55),)

# layers as in NERSC's published ladder (lesson 03): 4,050 patches, on the weather of the course
VIT: Changes = {
    "model.num_layers": 12,
    "model.num_heads": 8,
    "model.hidden_size": 384,
    "model.patch_size": 2,
    "train.global_batch": 16,
    "train.micro_batch": 16,
}
# each rung adds to those before it
RUNGS: tuple[tuple[str, Changes], ...] = (
    (
        "float32, optimizer as a loop",
        {"train.dtype": "float32", "optim.implementation": "for_loop"},
    ),
    ("tf32", {"train.dtype": "tf32"}),
    ("bfloat16", {"train.dtype": "bfloat16"}),
    ("foreach optimizer", {"optim.implementation": "foreach"}),
    ("fused optimizer", {"optim.implementation": "fused"}),
    ("compiled", {"train.compile": "model"}),
    ("two workers", {"loader.workers": 2}),
)


def ladder() -> list[Run]:
    """One run for each rung, with those below it."""
    runs = []
    changes = dict(VIT)
    for name, more in RUNGS:
        changes |= more
        runs.append(Run(name, "vit_tiny", dict(changes)))
    return runs


GRAPHS = (
    Run("gpt_tiny", "gpt_tiny", {"train.dtype": "bfloat16"}),
    Run(
        "gpt_tiny, CUDA graphs", "gpt_tiny", {"train.dtype": "bfloat16", "train.cuda_graphs": True}
    ),
)

SMALL: Changes = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 32,
    "train.global_batch": 2,
    "train.micro_batch": 2,
}
# what a CPU refuses, or takes too long for in a trial
ONLY_ON_A_GPU = ("train.compile", "train.cuda_graphs")


def changed(run: Run, small: bool) -> dict[str, object]:
    """The fields of a run; in a trial with tiny shapes, and without what only a GPU can do."""
    changes = dict(run.changes)
    if small:
        changes |= SMALL
        if "model.context_length" in changes:
            changes["model.context_length"] = 64
        if not torch.cuda.is_available():
            for name in ONLY_ON_A_GPU:
                changes.pop(name, None)
            if changes.get("train.dtype") == "tf32":
                changes["train.dtype"] = "float32"
    return changes


def command(run: Run, small: bool, out: Path) -> list[str]:
    """The command line of a training, after the recipe's module."""
    steps = 12 if small else 60
    if "profile.steps" in run.changes:
        steps = 6
    timing = {
        "train.steps": steps,
        "train.log_every": 2 if small else 5,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        "train.out": str(out),
    }
    words = [run.recipe]
    for name, value in {**changed(run, small), **timing}.items():
        words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


def measure(run: Run, small: bool) -> dict[str, Any]:
    """Train, and take the medians of what the run says of itself; keep its trace, if it has one."""
    with tempfile.TemporaryDirectory(prefix="labcode-gpu-") as folder:
        out = Path(folder) / "run"
        train = [sys.executable, "-m", "labcode.train", *command(run, small, out)]
        done = subprocess.run(train, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            return {"name": run.name, "failed": lines[-1] if lines else "no word"}
        rows = [row for row in metrics.read(out) if "loss" in row]
        traces = keep_traces(run, out)
    found: dict[str, Any] = {"name": run.name, "changes": changed(run, small)}
    late = rows[WARM_ROWS:] if len(rows) > WARM_ROWS else rows[-1:]
    for key in ("step_s", "samples_per_s", "tokens_per_s", "flops_per_s", "mfu", "matmul_share"):
        values = [row[key] for row in late if key in row]
        if values:
            found[key] = statistics.median(values)
    if traces:
        found["traces"] = traces
    found["memory_bytes"] = rows[-1]["memory_bytes"]
    found["loss"] = rows[-1]["loss"]
    if run.goal is not None:
        found["goal_mfu"] = run.goal
    return found


def keep_traces(run: Run, out: Path) -> list[str]:
    """Copy what the profiler has recorded to the results; the names of the copies.

    What is larger than MOST_BYTES is told and not kept, nor is a trial's, which is of no GPU.
    """
    kept = []
    for path in sorted((out / chrome_trace.FOLDER).glob("*.json.gz")):
        size = path.stat().st_size
        if size > MOST_BYTES or not torch.cuda.is_available():
            kept.append(f"not kept: {size} bytes")
            continue
        TRACES.mkdir(parents=True, exist_ok=True)
        name = f"{run.recipe}.pt.trace.json.gz"
        shutil.copyfile(path, TRACES / name)
        kept.append(name)
    return kept


def measured(runs: Sequence[Run]) -> Callable[[bool], list[dict[str, Any]]]:
    """A part that measures some runs and prints a line for each; those before a late one stay."""

    def part(small: bool) -> list[dict[str, Any]]:
        found = []
        for run in runs:
            try:
                row = measure(run, small)
            except TimeoutError as error:
                found.append({"name": run.name, "failed": str(error)})
                return found
            found.append(row)
            print(line(row), flush=True)
        return found

    return part


def on_the_roof(_small: bool) -> dict[str, Any]:
    """The operations of lesson 03, section 1, and its attention, in each dtype of this device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    found: dict[str, Any] = {"speed": {}, "dots": {}, "attention": []}
    for name in ("float32", "tf32", "bfloat16") if on_gpu else ("float32",):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        found["speed"][name] = asdict(device_speed(device, dtype))
        found["dots"][name] = [asdict(dot) for dot in roofline.dots(device, dtype)]
        print(f"  {name}: {found['speed'][name]}", flush=True)
        for kernel in roofline.KERNELS if on_gpu else ("plain", "fused"):
            for backward in (False, True):
                row = {"kernel": kernel, "dtype": name, "shape": ATTENTION, "backward": backward}
                try:
                    seconds = roofline.attention_s(
                        kernel, ATTENTION, device, dtype, backward=backward
                    )
                except RuntimeError as error:  # no such kernel for this dtype
                    row["failed"] = str(error).splitlines()[0]
                else:
                    row["seconds"] = seconds
                found["attention"].append(row)
                print(f"  {row}", flush=True)
    torch.set_float32_matmul_precision("highest")
    if on_gpu:
        torch.cuda.empty_cache()  # the next parts are processes of their own
    return found


def line(row: Mapping[str, Any]) -> str:
    """A result for people."""
    if "failed" in row:
        return f"  {row['name']}: failed: {row['failed']}"
    text = f"  {row['name']}: {1e3 * row['step_s']:.1f} ms a step"
    text += f", {row['samples_per_s']:.1f} samples/s, {row['memory_bytes'] / 1e9:.1f} GB"
    if "mfu" in row:
        text += f", MFU {row['mfu']:.1%}"
    if "goal_mfu" in row:
        text += f" (goal {row['goal_mfu']:.0%})"
    return text


def other_program(words: Sequence[str]) -> Callable[[bool], dict[str, Any]]:
    """A part that is another program, of one size: its code and its last lines."""

    def part(_small: bool) -> dict[str, Any]:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=HERE.parent,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = done.stdout.strip().splitlines()
        print("\n".join(lines[-30:]), flush=True)
        return {"code": done.returncode, "last_lines": lines[-30:]}

    return part


TRACED = tuple(
    Run(f"{recipe}, recorded", recipe, {"profile.steps": "3:5", **changes})
    for recipe, changes in (
        ("gpt_tiny", {}),
        ("vit_tiny", {}),
        ("gpt_10m", {"train.dtype": "bfloat16"}),
    )
)

# in the order of their worth
PARTS: dict[str, Callable[[bool], Any]] = {
    "tests": other_program(["-m", "pytest", "-q", "tests/gpu", "-m", "gpu"]),
    "loss": other_program([str(HERE / "gpt_loss.py")]),
    "mfu": measured(MFU),
    "fp8": other_program([str(HERE / "fp8_by_tokens.py")]),
    "mfu of 1.3B": measured(MFU_LARGE),
    "graphs": measured(GRAPHS),
    "traces": measured(TRACED),
    "roofline": on_the_roof,
    "ladder": measured(ladder()),
    "layers in fp8": other_program([str(HERE / "fp8.py")]),
    "peer": other_program([str(HERE / "step.py"), "--device=cuda", "--compile"]),
}


def next_part(record: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """The first piece not tried on this device with this PyTorch, else the first that failed.

    Returns:
        None: Each has a result.
    """
    failures = []
    for name in PARTS:
        old = record.get(name)
        if old is None or any(old["on"].get(key) != here.get(key) for key in ("device", "torch")):
            return name
        if failed(old["results"]):
            failures.append(name)
    return failures[0] if failures else None


def failed(results: Any) -> bool:
    """Whether a piece, or a run of it, came to no result."""
    rows = results if isinstance(results, list) else [results]
    return any("failed" in row or row.get("code") for row in rows)


def late(_number: int, _frame: object) -> None:
    """The handler of the alarm: whatever the piece waits for is ended."""
    raise TimeoutError(f"took more than {LIMIT_S} s")


def device() -> dict[str, Any]:
    """What the numbers belong to."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": "cpu",
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--next", action="store_true", help="the first piece without a result")
    parser.add_argument("--small", action="store_true", help="tiny shapes: a trial of the script")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.small:
        print("error: torch sees no CUDA device here: use --small for a trial", file=sys.stderr)
        return 2
    record = json.loads(options.out.read_text()) if options.out.is_file() else {}
    parts = options.parts
    if options.next:
        part = next_part(record, device())
        if part is None:
            print(f"every piece has a result on this device: {options.out}")
            return 0
        parts = [part]
    signal.signal(signal.SIGALRM, late)
    for name in parts:
        print(f"{name}:", flush=True)
        signal.alarm(LIMIT_S)
        try:
            found = PARTS[name](options.small)
        except TimeoutError as error:
            found = {"failed": str(error)}
            print(f"  {error}", flush=True)
        finally:
            signal.alarm(0)
        record[name] = {"on": device(), "results": found}
        write(options.out, record)
    print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
