"""Words on the command line: fields, values, types, duplicates, recipes."""

import random

from ..cases import EITHER, TRAINS, WEATHER, Case

OUT = "--train.out=out"

# field: values that must be refused
REFUSED_VALUES = {
    "model.vocab_size": ["0", "-1", "5", "1.5", "abc", "1000000000000", "nan"],
    "model.context_length": ["0", "-3", "2.5", "1e3", "100000000", "abc", "10000000000000"],
    "model.num_layers": ["0", "-1", "0.5", "abc", "1000000000000", "nan"],
    "model.num_heads": ["0", "-2", "3", "32", "abc", "inf"],
    "model.hidden_size": ["0", "-16", "15", "16.5", "1000000000000", "abc", "100000000"],
    "model.num_kv_heads": ["0", "-1", "3", "4", "abc"],
    "model.ffn_size": ["0", "-1", "2.5", "1000000000000000", "abc"],
    "model.positions": ["", "rotory", "none", "1"],
    "model.tie_embeddings": ["maybe", "2", "nein", ""],
    "model.dropout": ["1", "-0.1", "nan", "inf", "abc", "1.5"],
    "data.path": ["", "nowhere.txt", ".", "/dev/null", "/proc/self/mem", "~nobody-here/x.txt"],
    "data.tokenizer": ["", "bpee", "word", "1"],
    "data.val_fraction": ["0", "1", "-1", "nan", "inf", "1.5", "abc", "0.9999999", "1e-30"],
    "parallel.dp": ["0", "-1", "2", "7", "abc", "1.5", "99999999999999999999"],
    "parallel.pp": ["0", "-1", "2", "99", "abc"],
    "parallel.cp": ["0", "-1", "2", "abc"],
    "parallel.tp": ["0", "-1", "2", "3", "abc", "1000000000000"],
    "parallel.order": ["", "tp", "tp-cp-dp", "tp-tp-dp-pp", "tp,cp,dp,pp", "tp-cp-dp-pp-ep"],
    "parallel.data_parallel": ["", "fsdp", "zero", "1"],
    "parallel.bucket_mb": ["0", "-1", "nan", "inf", "1e300", "abc"],
    "parallel.sequence_parallel": ["perhaps", "2"],
    "parallel.context_attention": ["", "rings", "none"],
    "parallel.pipeline_schedule": ["", "2f2b", "zero-bubble"],
    "parallel.stages_per_rank": ["0", "-1", "2", "99", "abc"],
    "parallel.layers_per_stage": ["", "0", "1", "3", "-1", "abc", "1.5"],
    "parallel.activation_checkpointing": ["", "half", "true"],
    "optim.lr": ["0", "-1", "nan", "inf", "abc", "1e309", ""],
    "optim.min_lr": ["-1", "1", "nan", "inf", "abc"],
    "optim.warmup_steps": ["-1", "1.5", "abc", "nan"],
    "optim.weight_decay": ["-1", "nan", "inf", "abc"],
    "optim.beta1": ["1", "1.5", "-0.1", "nan", "inf", "abc"],
    "optim.beta2": ["1", "1.5", "-0.1", "nan", "inf", "abc"],
    "optim.clip_norm": ["-1", "nan", "inf", "abc"],
    "optim.implementation": ["", "fast", "for-loop"],
    "train.steps": ["0", "-1", "1.5", "nan", "abc", "", "1e3"],
    "train.global_batch": ["0", "-4", "1000000", "2.5", "99999999999999999999", "abc"],
    "train.micro_batch": ["0", "-1", "3", "8", "abc", "1e20"],
    "train.seed": ["-1", "1.5", "abc", "nan", "18446744073709551616", "-99999999999999999999"],
    "train.dtype": ["", "half", "fp32", "int8", "tf32"],
    "train.compile": ["", "yes", "layers"],
    "train.powersgd_rank": ["-1", "1.5", "abc"],
    "train.powersgd_exact_steps": ["1", "0", "-1", "abc"],
    "train.cuda_graphs": ["", "perhaps", "true"],
    "train.reduce_dtype": ["", "float64", "auto"],
    "train.eval_every": ["-1", "1.5", "abc"],
    "train.eval_batches": ["0", "-1", "abc", "1e20"],
    "train.log_every": ["0", "-1", "abc", "nan"],
    "train.sample_tokens": ["-1", "1.5", "abc"],
    "train.overwrite": ["ja", "2"],
    "checkpoint.every": ["-1", "1.5", "abc"],
    "checkpoint.keep": ["0", "-1", "abc", "1.5"],
    "checkpoint.resume": ["perhaps", "7"],
}
# field: values that are odd, and may be refused or not; what they may not do is to hang or to crash
ODD_VALUES = {
    "model.vocab_size": ["10000", "66", "None"],
    "model.context_length": ["1", "2", "1000"],
    "model.num_kv_heads": ["1", "2", "None"],
    "model.ffn_size": ["1", "7", "None"],
    "model.dropout": ["0.999999", "1e-300", "-0.0"],
    "data.val_fraction": ["0.99", "1e-9", "0.5"],
    "data.path": ["None"],
    "parallel.bucket_mb": ["1e-300", "1e-9", "1000000"],
    "parallel.layers_per_stage": ["2", "None"],
    "parallel.stages_per_rank": ["1"],
    "optim.lr": ["1e-300", "1e-45", "1e10"],
    "optim.min_lr": ["0", "1e-300"],
    "optim.warmup_steps": ["0", "99999999999999999999", "1000000"],
    "optim.weight_decay": ["0", "1e10", "1e300"],
    "optim.beta1": ["0", "0.9999999999999999"],
    "optim.beta2": ["0", "0.9999999999999999"],
    "optim.clip_norm": ["0", "1e-300", "1e300"],
    "train.global_batch": ["1", "5000"],
    "train.micro_batch": ["1", "2", "None"],
    "train.seed": ["18446744073709551615", "9223372036854775808", "4294967296"],
    "train.dtype": ["bfloat16", "float64"],
    "train.eval_every": ["0", "1", "99999999999999999999"],
    "train.log_every": ["99999999999999999999"],
    "train.sample_tokens": ["0", "1"],
    "train.out": ["a b", "-", "é/ü", "out/deep/er", "None"],
    "checkpoint.every": ["1", "99999999999999999999"],
    "checkpoint.keep": ["99999999999999999999"],
}
RECIPES = [
    "",
    "gpt_tini",
    "GPT_TINY",
    "gpt",
    "--train.steps",
    "-1",
    "gpt_tiny ",
    "../gpt_tiny",
    "gpt_tiny.py",
    "vit",
    "None",
    "🐍",
]
# words that no field has, or that are written in a wrong way
PHRASES = [
    ["--train.stepz", "1"],
    ["--steps", "1"],
    ["--train", "1"],
    ["--trian.steps", "1"],
    ["--train.", "1"],
    ["--.steps", "1"],
    ["--", "1"],
    ["--=", "1"],
    ["train.steps", "1"],
    ["-train.steps", "1"],
    ["--train.steps"],
    ["--train.steps", "1", "2"],
    ["--train.steps", "1,2"],
    ["--train.steps=", "1"],
    ["--train.steps==1"],
    ["--train.no_steps"],
    ["--train.no-overwrite", "true"],
    ["--train.no-overwrite=1"],
    ["--model.name", "x"],
    ["--model", "vit"],
    ["--data.variables", "t2m"],
    ["--data.roll"],
    ["--model.patch_size", "2"],
    ["--checkpoint.resume", "--train.overwrite"],
    ["--grid.tp", "2"],
    ["--pipeline.layers"],
    ["--parallel.layers_per_stage"],
    ["--train.steps.more", "1"],
    ["--train.steps\n", "1"],
    ["--train.stepsé", "1"],
    ["--__class__", "1"],
    ["--train.__class__", "1"],
    ["--train.accumulation", "1"],
    ["--train._x", "1"],
    ["--model.positions", "rotary", "--model.num_heads", "16"],
    ["--checkpoint.resume", "--train.out", "None"],
    ["--optim.min_lr", "0.5", "--optim.lr", "0.1"],
    ["--train.micro_batch", "4", "--train.global_batch", "6"],
    ["--parallel.tp", "2", "--parallel.dp", "2"],
    ["--name"],
]
GOOD_PHRASES = [
    ["--train.steps", "1", "--train.steps", "2"],
    ["--train.no-overwrite"],
    ["--train.overwrite", "false"],
    ["--train.global-batch=4"],
    ["--model.no_tie_embeddings"],
    ["--name", "other"],
    ["--parallel.share_gpus"],
]
WEATHER_PHRASES = [
    ["--data.variables"],
    ["--data.variables", "t2m", "t2m"],
    ["--data.variables", "t2m", "nothing"],
    ["--data.variables", ""],
    ["--data.variables", "None"],
    ["--data.variables=t2m,u10"],
    ["--model.patch_size", "0"],
    ["--model.patch_size", "7"],
    ["--model.patch_size", "-5"],
    ["--model.patch_size", "1000000"],
    ["--model.lat", "3"],
    ["--model.lon", "5"],
    ["--model.num_variables", "9"],
    ["--model.num_forcings", "9"],
    ["--model.num_forcings", "-1"],
    ["--data.path", ""],
    ["--data.path", "nowhere.zarr"],
    ["--data.val_fraction", "nan"],
    ["--train.global_batch", "1000000"],
    ["--model.hidden_size", "1000000000"],
    ["--data.tokenizer", "char"],
    ["--model.context_length", "8"],
]


def cases(rng: random.Random) -> list[Case]:
    made = []
    for field, values in REFUSED_VALUES.items():
        for value in values:
            # every fifth of two ranks, which must say it once
            ranks = 2 if rng.random() < 0.2 and not _is_grid(field) else 1
            made.append(_value(field, value, ranks=ranks))
    for field, values in ODD_VALUES.items():
        for value in values:
            made.append(_value(field, value, answer=EITHER))
    for recipe in RECIPES:
        made.append(Case(f"recipe {recipe!r}", [OUT], ["recipe"], base=(recipe,)))
    for words in PHRASES:
        made.append(Case(f"words {' '.join(words)}", [OUT, *words]))
    for words in GOOD_PHRASES:
        made.append(Case(f"words {' '.join(words)}", [OUT, *words], answer=TRAINS))
    for words in WEATHER_PHRASES:
        name = words[0].removeprefix("--").partition("=")[0].rpartition(".")[2]
        name = name.removesuffix("s")  # "has no variable nothing" names what was typed
        made.append(Case(f"weather: words {' '.join(words)}", [OUT, *words], [name], base=WEATHER))
    return made


def _value(field: str, value: str, *, answer: str = "refused", ranks: int = 1) -> Case:
    words = [f"--{field}={value}"]
    if field != "train.out":
        words.append(OUT)
    if field == "model.num_kv_heads":
        words.append("--model.num_heads=2")
    if field == "model.positions" or field.startswith("model.num_heads"):
        words.append("--model.dropout=0")
    name = field.rpartition(".")[2]
    # a path is named itself
    names = [name] if not field.endswith("path") or not value else [value.partition("/")[0], name]
    return Case(
        f"--{field}={value}" + (f" on {ranks} ranks" if ranks > 1 else ""),
        words,
        names,
        answer,
        ranks,
    )


def _is_grid(field: str) -> bool:
    return field.rpartition(".")[2] in ("dp", "pp", "cp", "tp", "layers_per_stage")
