"""How far `labcode.perf.estimate` is off on published training runs, beside what else there is.

    python benchmarks/planner.py [--stacks] [--runs SOURCE]

One table over the runs in labcode/perf/hardware_data: errors of the step time without calibration
and with one factor for each (source, GPU, precision), which is fitted on all other runs of the
stack; the regret of the layout that would be chosen inside one (model, GPUs, batch); errors of the
memory after one number of bytes for each stack. The peers are the rule of thumb "45 % of the peak"
and, if it is installed, llm-analysis from PyPI with its efficiency at the value of its examples.

In-sample are two constants, one for all runs: `layer_time.SUSTAINED` and `layer_time.LAUNCH_S`. The
first line of the table is without the first of them. What the runs of a source share and its table
does not say, which software and which network, is in `perf.published.STACKS`.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side import write

from labcode.perf import accuracy, estimate, layer_time
from labcode.perf.accuracy import Predictor, Spread
from labcode.perf.published import PublishedRun, published_runs, rows

RESULT = Path(__file__).parent / "results" / "planner.json"
SWEEPS = ("vtrain_single", "bigscience")
LLM_ANALYSIS_EFFICIENCY = 0.5  # flops_efficiency of its README


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stacks", action="store_true", help="a line for each stack as well")
    parser.add_argument("--runs", metavar="SOURCE", help="every run of a source, with its parts")
    words = parser.parse_args()
    runs = published_runs()
    left_out = len(rows()) - len(runs)
    print(
        f"{len(accuracy.timed(runs))} timed runs; {left_out} rows are no whole run or lack a size"
    )
    print("absolute error of the step time in %, median / p90; regret in %, mean (worst)\n")
    print("| predictor | runs | uncalibrated | one factor a stack | vTrain | BigScience |")
    print("|---|---:|---:|---:|---:|---:|")
    record = {"estimate": _row("estimate", runs, accuracy.predicted_s)}
    record["without SUSTAINED"] = _row("estimate, SUSTAINED = 1", runs, _as_the_best_shape)
    record["rule of thumb"] = _row("45 % of the peak", runs, accuracy.rule_of_thumb_s)
    peer = _llm_analysis()
    if peer is None:
        print("| llm-analysis | skipped: `pip install llm-analysis` brings it | | | | |")
    else:
        known = [run for run in accuracy.timed(runs) if peer(run) > 0]
        record["llm-analysis"] = _row("llm-analysis", known, peer)
        record["estimate, the same runs"] = _row(
            "estimate on those runs", known, accuracy.predicted_s
        )
    print("| *goal* | | *15 / 35* | *6 / 20* | *5* | *10* |")
    record["memory"] = _memory(runs)
    if words.stacks:
        _stacks(runs)
    if words.runs:
        _single_runs(runs, words.runs)
    write(RESULT, record)


def _row(name: str, runs: Sequence[PublishedRun], predictor: Predictor) -> dict[str, Any]:
    """Print a line of the table and return its numbers."""
    plain = accuracy.spread(accuracy.ratios(runs, predictor))
    calibrated = accuracy.spread(accuracy.calibrated_ratios(runs, predictor))
    found: dict[str, Any] = {"runs": plain.count}
    cells = []
    for what, spread in (("uncalibrated", plain), ("calibrated", calibrated)):
        cells.append(_percent(spread))
        found[what] = {"median": round(spread.median, 4), "p90": round(spread.p90, 4)}
    for source in SWEEPS:
        sweep = [run for run in runs if run.source_key == source]
        regret = accuracy.regrets(sweep, predictor)
        if not regret:
            cells.append("")
            continue
        cells.append(f"{100 * statistics.mean(regret):.1f} ({100 * max(regret):.0f})")
        found[f"regret {source}"] = round(statistics.mean(regret), 4)
    print(f"| {name} | {plain.count} | {' | '.join(cells)} |", flush=True)
    return found


def _percent(spread: Spread) -> str:
    return f"{100 * spread.median:.1f} / {100 * spread.p90:.1f}"


def _as_the_best_shape(run: PublishedRun) -> float:
    """Seconds if products reached in a training what the best shape reaches alone."""
    kept = layer_time.SUSTAINED
    try:
        layer_time.SUSTAINED = 1.0
        _forget()
        return accuracy.predicted_s(run)
    finally:
        layer_time.SUSTAINED = kept
        _forget()


def _forget() -> None:
    """Forget every number that was computed with another SUSTAINED."""
    for module in (layer_time, estimate):
        for kept in vars(module).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


def _memory(runs: Sequence[PublishedRun]) -> dict[str, Any]:
    found = accuracy.memory_accuracy(runs)
    print(f"\nmemory of {found.raw.count} runs: {_percent(found.raw)} % uncalibrated,")
    print(f"{_percent(found.calibrated)} % after one number of bytes a stack (goal: 5)\n")
    record: dict[str, Any] = {
        "raw": round(found.raw.median, 4),
        "calibrated": round(found.calibrated.median, 4),
    }
    pairs = (("uncalibrated", found.verdicts), ("calibrated", found.calibrated_verdicts))
    for name, verdict in pairs:
        print(
            f"- {name}: {verdict.found} of {verdict.out_of_memory} out-of-memory runs found, "
            f"{verdict.refused} of {verdict.fitting} fitting runs refused"
        )
        record[name] = vars(verdict)
    for stack, offset in found.offsets.items():
        print(f"- {', '.join(stack)}: {offset:+.1f} GiB")
    return record


def _stacks(runs: Sequence[PublishedRun]) -> None:
    print("\n| stack | runs | uncalibrated | predicted / measured | one factor |")
    print("|---|---:|---:|---:|---:|")
    for stack in dict.fromkeys(run.stack for run in runs):
        own = [run for run in accuracy.timed(runs) if run.stack == stack]
        if not own:
            continue
        plain = accuracy.spread(accuracy.ratios(own))
        calibrated = ""
        if len(own) > 1:
            calibrated = _percent(accuracy.spread(accuracy.calibrated_ratios(own)))
        name = ", ".join(stack)
        print(f"| {name} | {plain.count} | {_percent(plain)} | {plain.ratio:.2f} | {calibrated} |")


def _single_runs(runs: Sequence[PublishedRun], source: str) -> None:
    print()
    for run in accuracy.timed(runs):
        if run.source_key != source:
            continue
        assert run.step_s is not None
        parts = accuracy.step_parts(run.model, run.shape, run.cluster, run.settings)
        total = sum(parts.values())
        shares = [f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds]
        print(
            f"H={run.model.hidden_size} L={run.model.num_layers} {run.shape} "
            f"b={run.settings.micro_batch}: {run.step_s:.3g} s, predicted / measured "
            f"{total / run.step_s:.2f}: {', '.join(shares)}"
        )


# ---- the peer


def _llm_analysis() -> Predictor | None:
    """llm-analysis as a predictor that gives 0 for what it cannot describe; None: not installed."""
    try:
        from llm_analysis import analysis, config  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    import logging

    logging.disable(logging.WARNING)
    gpus = {
        "a100-80gb": "a100-sxm-80gb",
        "a100-40gb": "a100-sxm-40gb",
        "h100-80gb": "h100-sxm-80gb",
        "v100-32gb": "v100-sxm-32gb",
    }

    def seconds(run: PublishedRun) -> float:
        name = gpus.get(run.cluster.gpu.name)
        if name is None or run.settings.dtype == "fp8" or run.model.gated:
            return 0.0
        checkpointing = analysis.ActivationRecomputation[
            run.settings.activation_checkpointing.upper()
        ]
        model = config.ModelConfig(
            name="published",
            num_layers=run.model.num_layers,
            n_head=run.model.num_heads,
            hidden_dim=run.model.hidden_size,
            vocab_size=run.model.outputs,
            max_seq_len=run.model.sequence_length,
            ffn_embed_dim=run.model.ffn,
        )
        layout = config.ParallelismConfig(
            tp_size=run.shape.tp,
            pp_size=run.shape.pp,
            dp_size=run.shape.dp,
            sp_size=run.shape.tp if run.settings.sequence_parallel else 1,
        )
        whole = analysis.LLMAnalysis(
            model,
            config.get_gpu_config_by_name(name),
            config.get_dtype_config_by_name("w16a16e16"),
            layout,
            flops_efficiency=LLM_ANALYSIS_EFFICIENCY,
            hbm_memory_efficiency=1.0,
        )
        try:
            found = whole.training(
                batch_size_per_gpu=run.settings.micro_batch,
                global_batch_size=run.settings.global_batch,
                seq_len=run.model.sequence_length,
                total_num_tokens=run.settings.global_batch * run.model.sequence_length,
                activation_recomputation=checkpointing,
                ds_zero=analysis.DSZeRO(run.settings.zero_stage),
                flash_attn=run.settings.attention != "unfused",
            )
        except AssertionError:  # how it refuses a layout
            return 0.0
        return found["total_training_latency"]

    return seconds


if __name__ == "__main__":
    main()
