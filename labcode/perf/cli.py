"""The command line of the planner.

    python -m labcode.perf estimate --model gpt3-175b --cluster selene --dp 8 --pp 16 --tp 8 \\
        --global-batch 1536 --attention unfused --checkpointing full
    python -m labcode.perf plan --model llama3-70b --cluster dgx-h100 --gpus 1024 \\
        --global-batch 1024
    python -m labcode.perf compare --model llama3-8b --cluster dgx-h100,selene --gpus 64,256 \\
        --global-batch 512
    python -m labcode.perf calibrate --out this_machine.toml

A model is a published one by name, or a recipe of the course; a cluster one by name, or a file of
your own (.toml). `--plot FILE` draws.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf.cluster import cluster_names, load_cluster
from labcode.perf.estimate import estimate
from labcode.perf.layer_time import ATTENTION_KERNELS, WIDTHS
from labcode.perf.plan import Plan, plan
from labcode.perf.settings import CHECKPOINTING, Settings
from labcode.perf.tables import best_of_each_grid, columns, estimate_text, layout_row, plan_text
from labcode.perf.transformer import Transformer, load_model, model_names
from labcode.recipes import RECIPES
from labcode.suggest import unknown
from labcode.topology import GridShape
from labcode.units import seconds

PROGRAM = "python -m labcode.perf"
CALIBRATES = "labcode.train.calibrate"  # measures, so it needs torch: a program of its own


def main(words: Sequence[str]) -> int:
    """Run the program; returns its exit code.

    Args:
        words: Of the command line.
    """
    parser = _parser()
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "predict seconds and memory of a training step"
    parser = argparse.ArgumentParser(prog=PROGRAM, description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    one = commands.add_parser("estimate", help="one layout, with all parts of time and memory")
    _add_what(one)
    for axis in ("dp", "pp", "cp", "tp"):
        one.add_argument(f"--{axis}", type=int, default=1)
    one.add_argument("--order", default=GridShape().order, help="of the axes, fastest first")
    one.add_argument("--micro-batch", type=int, default=1)
    one.add_argument("--zero", type=int, default=0, choices=range(4))
    one.add_argument("--checkpointing", default="none", choices=CHECKPOINTING)
    one.add_argument("--stages-per-rank", type=int, default=1)
    one.add_argument("--sequence-parallel", action="store_true")
    one.set_defaults(run=_estimate)
    search = commands.add_parser("plan", help="every layout of so many GPUs, the fastest first")
    _add_what(search)
    search.add_argument("--gpus", type=int, required=True)
    search.add_argument("--top", type=int, default=10, help="lines of the table")
    search.add_argument(
        "--every", action="store_true", help="all layouts, not the best of each grid"
    )
    search.add_argument("--plot", type=Path, help="draw memory against time into this file")
    search.set_defaults(run=_plan)
    several = commands.add_parser("compare", help="the best layout on several clusters and sizes")
    _add_what(several)
    several.add_argument("--gpus", required=True, help="numbers of GPUs, such as 64,256,1024")
    several.add_argument("--plot", type=Path, help="draw the speed-up into this file")
    several.set_defaults(run=_compare)
    measure = commands.add_parser("calibrate", help="measure this machine into a cluster file")
    measure.add_argument("--ranks", type=int, default=2, help="processes that communicate")
    measure.add_argument("--out", type=Path, default=Path("this_machine.toml"))
    measure.set_defaults(run=_calibrate)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    models = ", ".join((*model_names(), *RECIPES))
    parser.add_argument("--model", required=True, help=f"one of {models}")
    clusters = ", ".join(cluster_names())
    parser.add_argument("--cluster", required=True, help=f"one of {clusters}, or a .toml file")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    parser.add_argument("--vocab-size", type=int, help="of a recipe that takes it from its data")
    parser.add_argument("--dtype", default="bfloat16", choices=WIDTHS)
    parser.add_argument("--attention", default="flash2", choices=ATTENTION_KERNELS)
    parser.add_argument("--compiled", action="store_true", help="elementwise operations are fused")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="measured over predicted, from a run of yours"
    )


def find_model(name: str, vocab_size: int | None = None) -> Transformer:
    """A published model, or the model of a recipe.

    Args:
        name: Of either.
        vocab_size: For a recipe that takes it from its data.

    Raises:
        ValueError: An unknown name, or a recipe that leaves sizes to its data.
    """
    if name in model_names():
        return load_model(name)
    if name not in RECIPES:
        raise ValueError(unknown("model", name, (*model_names(), *RECIPES)))
    model = recipes.get(name).model
    if isinstance(model, GPTConfig) and vocab_size is not None:
        model = replace(model, vocab_size=vocab_size)
    try:
        return Transformer.of(model)
    except ValueError as error:
        missing = str(error).partition("=")[0]
        cure = "add --vocab-size" if missing == "vocab_size" else "name another model"
        raise ValueError(f"{name} takes {missing} from its data: {cure}") from None


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        global_batch=options.global_batch,
        dtype=options.dtype,
        attention=options.attention,
        compiled=options.compiled,
    )


def _estimate(options: argparse.Namespace) -> None:
    shape = GridShape(options.dp, options.pp, options.cp, options.tp, options.order)
    settings = replace(
        _settings(options),
        micro_batch=options.micro_batch,
        activation_checkpointing=options.checkpointing,
        sequence_parallel=options.sequence_parallel,
        stages_per_rank=options.stages_per_rank,
        zero_stage=options.zero,
    )
    cluster = load_cluster(options.cluster)
    model = find_model(options.model, options.vocab_size)
    print(estimate_text(estimate(model, shape, cluster, settings, scale=options.scale), shape))


def _search(options: argparse.Namespace, cluster: str, gpus: int) -> Plan:
    return plan(
        find_model(options.model, options.vocab_size),
        load_cluster(cluster),
        gpus=gpus,
        global_batch=options.global_batch,
        settings=_settings(options),
        scale=options.scale,
    )


def _plan(options: argparse.Namespace) -> None:
    found = _search(options, options.cluster, options.gpus)
    print(plan_text(found, top=options.top, every=options.every))
    if options.plot:
        from labcode.perf.plots import memory_against_time

        title = f"{options.model} on {options.gpus} GPUs of {options.cluster}"
        memory_against_time(best_of_each_grid(found), options.plot, title=title)
        print(f"drawn into {options.plot}")


def _compare(options: argparse.Namespace) -> None:
    sizes = []
    for word in options.gpus.split(","):
        if not word.isdigit():
            raise ValueError(f"--gpus {options.gpus}: give whole numbers, such as 64,256")
        sizes.append(int(word))
    rows = [["cluster", "GPUs", "dp x pp x cp x tp", "ZeRO", "checkpointing", "memory", "step"]]
    rows[0].append("samples/s")
    speeds: dict[str, list[tuple[int, float]]] = {}
    for cluster in options.cluster.split(","):
        for gpus in sizes:
            found = _search(options, cluster, gpus)
            if not found.ranked:
                rows.append([cluster, str(gpus), "nothing fits", *[""] * 5])
                continue
            best = found.ranked[0]
            grid, _, _, _, zero, checkpointing, memory, _ = layout_row(best)
            per_s = options.global_batch / best.step_s
            speeds.setdefault(cluster, []).append((gpus, per_s))
            rows.append([cluster, str(gpus), grid, zero, checkpointing, memory])
            rows[-1] += [seconds(best.step_s), f"{per_s:.1f}"]
    print(columns(rows))
    if options.plot:
        from labcode.perf.plots import strong_scaling

        strong_scaling(speeds, options.plot, title=f"{options.model}, fixed global batch")
        print(f"drawn into {options.plot}")


def _calibrate(options: argparse.Namespace) -> None:
    from labcode import launch

    try:
        launch.run(CALIBRATES, str(options.out.resolve()), nproc=options.ranks)
    except launch.LaunchError as error:
        raise ValueError(str(error)) from None
