"""The command line of the planner.

    python -m labcode.perf fits --model config.json --gpus 8 --gpu a100-40gb
    python -m labcode.perf estimate --model gpt3-175b --cluster selene --dp 8 --pp 16 --tp 8 \\
        --global-batch 1536 --attention unfused --checkpointing full
    python -m labcode.perf plan --model llama3-70b --cluster dgx-h100 --gpus 1024 \\
        --global-batch 1024
    python -m labcode.perf compare --model llama3-8b --cluster dgx-h100,selene --gpus 64,256 \\
        --global-batch 512
    python -m labcode.perf calibrate --out this_machine.toml

A model is a published one by name, a recipe of the course, the config.json of anybody's model, or
numbers: --layers 32 --hidden 4096 --heads 32 --vocab-size 32000 --sequence-length 2048. A cluster
is one by name, or a file of your own (.toml).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from labcode.perf.cluster import cluster_names, gpu_names, load_cluster
from labcode.perf.estimate import estimate
from labcode.perf.find_model import (
    LIKE,
    NUMBERS,
    OTHER_WAYS,
    described,
    find_model,
    from_numbers,
)
from labcode.perf.fits import answer, gpu_memory
from labcode.perf.hub_config import FAMILIES, NamedModel
from labcode.perf.layer_time import ATTENTION_KERNELS, WIDTHS
from labcode.perf.plan import Plan, plan
from labcode.perf.settings import CHECKPOINTING, STATES, Settings
from labcode.perf.tables import columns, estimate_text, layout_row, plan_text
from labcode.perf.transformer import Transformer, model_names
from labcode.recipes import RECIPES
from labcode.runtime.arguments import Parser, count, factor, new_file
from labcode.runtime.files import print_out
from labcode.runtime.units import seconds
from labcode.topology import GridShape

PROGRAM = "python -m labcode.perf"
OF_MIXTURES = (
    "a router that spreads tokens evenly is taken for granted, and the interval is that of dense "
    "models: no published run of a mixture has been compared"
)
AXES = {
    "dp": "data-parallel ranks (1)",
    "pp": "pipeline stages (1)",
    "cp": "ranks that share a sequence (1)",
    "tp": "tensor-parallel ranks (1)",
}
CALIBRATES = "labcode.run.calibrate"  # measures, so it needs torch: a program of its own


def main(words: Sequence[str]) -> int:
    """Run the program; returns its exit code.

    Args:
        words: Arguments of the command line.
    """
    parser = _parser()
    try:
        if words and words[0] in (*model_names(), *RECIPES):
            raise ValueError(
                f"a command comes before {words[0]}: "
                f"{PROGRAM} fits --model {words[0]} --gpus 8 --gpu h100-80gb"
            )
        options = parser.parse_args(words)
        if options.command is None:
            parser.print_help()
            return 0
        options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    description = "predict seconds and memory of a training step"
    parser = Parser(prog=PROGRAM, description=description)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_fits(commands.add_parser("fits", help="does it fit on so many GPUs, and how, in words"))
    one = commands.add_parser("estimate", help="one layout, with all parts of time and memory")
    _add_what(one)
    for axis, meaning in AXES.items():
        one.add_argument(f"--{axis}", type=count, default=1, help=meaning)
    one.add_argument(
        "--ep", type=count, default=1, help="how many of the dp ranks share the experts"
    )
    one.add_argument("--order", default=GridShape().order, help="order of the axes, fastest first")
    one.add_argument("--micro-batch", type=count, default=1, help="samples of a micro-batch (1)")
    one.add_argument("--zero", type=int, default=0, choices=range(4), help="stage of ZeRO (0)")
    one.add_argument(
        "--checkpointing", default="none", choices=CHECKPOINTING, help="of activations (none)"
    )
    one.add_argument(
        "--stages-per-rank", type=count, default=1, help="above 1: interleaved pipeline stages (1)"
    )
    one.add_argument(
        "--sequence-parallel", action="store_true", help="cut norms and dropout over tp as well"
    )
    one.set_defaults(run=_estimate)
    search = commands.add_parser("plan", help="every layout of so many GPUs, the fastest first")
    _add_what(search)
    search.add_argument("--gpus", type=count, required=True, help="how many GPUs the job has")
    search.add_argument("--top", type=count, default=10, help="how many layouts to show (10)")
    search.add_argument(
        "--every", action="store_true", help="show all layouts, not only the best of each grid"
    )
    search.set_defaults(run=_plan)
    several = commands.add_parser("compare", help="the best layout on several clusters and sizes")
    _add_what(several)
    several.add_argument("--gpus", required=True, help="numbers of GPUs, such as 64,256,1024")
    several.set_defaults(run=_compare)
    measure = commands.add_parser("calibrate", help="measure this machine into a cluster file")
    measure.add_argument(
        "--ranks", type=count, default=2, help="how many processes communicate (2)"
    )
    measure.add_argument(
        "--out",
        type=new_file,
        default=Path("this_machine.toml"),
        help="cluster file to write (this_machine.toml)",
    )
    measure.set_defaults(run=_calibrate)
    return parser


def _add_fits(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--gpus", required=True, help="how many GPUs, or several numbers: 4,8")
    parser.add_argument(
        "--gpu", required=True, help=f"one of {', '.join(gpu_names())}, or a memory: 24gb"
    )
    parser.add_argument("--gpus-per-node", type=count, default=8, help="tp stays inside a node (8)")
    parser.add_argument(
        "--lora",
        type=count,
        default=0,
        metavar="RANK",
        help="train only LoRA adapters, of this rank",
    )
    parser.add_argument(
        "--four-bit",
        action="store_true",
        help="with --lora: keep the frozen model in 4 bits (QLoRA)",
    )
    _add_how(parser, state="mixed")
    parser.set_defaults(run=_fits)


def _add_what(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    clusters = ", ".join(cluster_names())
    parser.add_argument("--cluster", required=True, help=f"one of {clusters}, or a .toml file")
    parser.add_argument("--global-batch", type=count, required=True, help="samples in a step")
    _add_how(parser, state="megatron")
    parser.add_argument("--compiled", action="store_true", help="fuse elementwise operations")
    parser.add_argument(
        "--scale",
        type=factor,
        default=1.0,
        help="measured step time over predicted, from a run of yours (1)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    models = ", ".join((*model_names(), *RECIPES))
    parser.add_argument("--model", help=f"a config.json of the hub, or one of {models}")
    numbers = parser.add_argument_group("a model in numbers, in place of --model")
    for name, (_, meaning) in NUMBERS.items():
        numbers.add_argument(f"--{name.replace('_', '-')}", type=count, help=meaning)
    numbers.add_argument(
        "--like",
        default=LIKE,
        choices=FAMILIES,
        metavar="FAMILY",
        help=f"model family whose layers it has, such as gpt2 ({LIKE})",
    )
    parser.add_argument(
        "--vocab-size", type=count, help="tokens in the vocabulary, where the model does not say"
    )
    parser.add_argument("--sequence-length", type=count, help="tokens in a sample")


def _add_how(parser: argparse.ArgumentParser, *, state: str) -> None:
    parser.add_argument(
        "--dtype", default="bfloat16", choices=WIDTHS, help="of matrix products (bfloat16)"
    )
    parser.add_argument(
        "--attention", default="flash2", choices=ATTENTION_KERNELS, help="kernel (flash2)"
    )
    parser.add_argument(
        "--state",
        default=state,
        choices=STATES,
        help="what is kept of a weight, with its gradient and the optimizer's state: mixed, fsdp "
        f"and float32 16 bytes, megatron 18, bf16 8 ({state})",
    )


def _model(options: argparse.Namespace) -> NamedModel:
    numbers = {name: getattr(options, name) for name in NUMBERS}
    given = [name for name, value in numbers.items() if value is not None]
    sizes = {"vocab_size": options.vocab_size, "sequence_length": options.sequence_length}
    if options.model is None and not given:
        raise ValueError(f"--model missing: give {', '.join(model_names()[:3])} ..., {OTHER_WAYS}")
    if options.model is None:
        return from_numbers(numbers, like=options.like, **sizes)
    if given:
        option = given[0].replace("_", "-")
        raise ValueError(
            f"--model {options.model} and --{option}: a model has its own sizes, except for "
            "--vocab-size and --sequence-length; leave out one of the two"
        )
    return find_model(options.model, **sizes)


def _shape(options: argparse.Namespace) -> Transformer:
    """The model of the command line; what was taken for granted is said.

    Of a mixture of experts is said how large it is, and how much of it a token uses.
    """
    found = _model(options)
    if found.shape.experts:
        print_out(described(found))
        print(OF_MIXTURES, file=sys.stderr)
    for note in found.notes:
        print(f"{found.title}: {note}", file=sys.stderr)
    return found.shape


def _whole_numbers(option: str, words: str) -> list[int]:
    found = []
    for word in words.split(","):
        if not word.isdigit() or int(word) < 1:
            raise ValueError(f"{option} {words}: give whole numbers above 0, such as 64,256")
        found.append(int(word))
    return found


def _fits(options: argparse.Namespace) -> None:
    found = _model(options)
    gpu = gpu_memory(options.gpu)
    if WIDTHS[options.dtype] >= 4 and options.state != "float32":
        raise ValueError(
            f"--dtype {options.dtype} and --state {options.state}, whose weights have 16 bits in "
            "a product: add --state float32"
        )
    if options.four_bit and not options.lora:
        raise ValueError("--four-bit without --lora: 4 bits cannot be trained, add --lora 16")
    settings = Settings(
        1,
        dtype=options.dtype,
        attention=options.attention,
        adapter_rank=options.lora,
        four_bit=options.four_bit,
    )
    answers = []
    for gpus in _whole_numbers("--gpus", options.gpus):
        answers.append(
            answer(
                found,
                gpus,
                gpu,
                state=options.state,
                base=settings,
                gpus_per_node=options.gpus_per_node,
            )
        )
    print_out("\n\n".join(answers))
    if options.lora:
        return  # `plan` knows nothing of adapters
    print_out(
        f"How fast: {PROGRAM} plan with the same model, --cluster NAME, --gpus {gpus}, "
        f"--global-batch N and --state {options.state}."
    )


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        global_batch=options.global_batch,
        dtype=options.dtype,
        attention=options.attention,
        compiled=options.compiled,
        **STATES[options.state],
    )


def _estimate(options: argparse.Namespace) -> None:
    sizes = (options.dp, options.pp, options.cp, options.tp)
    shape = GridShape(*sizes, order=options.order, ep=options.ep)
    settings = replace(
        _settings(options),
        micro_batch=options.micro_batch,
        activation_checkpointing=options.checkpointing,
        sequence_parallel=options.sequence_parallel,
        stages_per_rank=options.stages_per_rank,
        zero_stage=options.zero,
    )
    cluster = load_cluster(options.cluster)
    model = _shape(options)
    print_out(estimate_text(estimate(model, shape, cluster, settings, scale=options.scale), shape))


def _search(options: argparse.Namespace, model: Transformer, cluster: str, gpus: int) -> Plan:
    return plan(
        model,
        load_cluster(cluster),
        gpus=gpus,
        global_batch=options.global_batch,
        settings=_settings(options),
        scale=options.scale,
    )


def _plan(options: argparse.Namespace) -> None:
    found = _search(options, _shape(options), options.cluster, options.gpus)
    print_out(plan_text(found, top=options.top, every=options.every))


def _compare(options: argparse.Namespace) -> None:
    sizes = _whole_numbers("--gpus", options.gpus)
    model = _shape(options)
    rows = [["cluster", "GPUs", "dp x pp x cp x tp", "ZeRO", "checkpointing", "memory", "step"]]
    rows[0].append("samples/s")
    for cluster in options.cluster.split(","):
        for gpus in sizes:
            found = _search(options, model, cluster, gpus)
            if not found.ranked:
                rows.append([cluster, str(gpus), "nothing fits", *[""] * 5])
                continue
            best = found.ranked[0]
            grid, _, _, _, zero, checkpointing, memory, _ = layout_row(best)
            per_s = options.global_batch / best.step_s
            rows.append([cluster, str(gpus), grid, zero, checkpointing, memory])
            rows[-1] += [seconds(best.step_s), f"{per_s:.1f}"]
    print_out(columns(rows))


def _calibrate(options: argparse.Namespace) -> None:
    from labcode.runtime import launch

    try:
        launch.run(CALIBRATES, str(options.out.resolve()), nproc=options.ranks)
    except launch.LaunchError as error:
        raise ValueError(str(error)) from None
