"""Weights of a GPT in files as the Hugging Face hub has them, out of a run and into one.

    DIR/
        model.safetensors    the weights under their names in `transformers`
        config.json          which model it is, and its shape

`AutoModelForCausalLM.from_pretrained(DIR)` reads it, and so does `--train.start_from DIR`, on any
grid: each rank maps the files into its memory and copies the boxes of the weights that it has. Read
are also several safetensors files with an index, `pytorch_model.bin`, and nanoGPT's `ckpt.pt`. What
is pickled is opened by `torch.load(weights_only=True)`, which runs nothing of it.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labcode.config import Config, GPTConfig, LoraConfig, ViTConfig
from labcode.data.paths import user_path
from labcode.data.tokenizer import AnyTokenizer, BPETokenizer
from labcode.models import hub, hub_adapter
from labcode.models.hub import BUFFERS, HEAD, NANOGPT, Described, Piece
from labcode.models.lora import is_adapter
from labcode.parallel.boxes import Box, boxes_of
from labcode.parallel.model import ParallelModel
from labcode.runtime.file_kinds import kind_of
from labcode.runtime.files import CONFIG_NAME, sync_folder
from labcode.runtime.units import type_in_words
from labcode.train.checkpoint.folder import read_about, read_index, verify
from labcode.train.checkpoint.tensors import read_whole

WEIGHTS = "model.safetensors"
ADAPTERS = "adapters.pt"  # of a run with `lora.rank` that has ended, beside weights.pt
MODEL = "model/"  # in front of a weight's name in a checkpoint
FIELD = "train.start_from"
# in a folder the first of them that is there
# safetensors before what is pickled: they hold numbers and nothing else
WEIGHT_FILES = (
    WEIGHTS,
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "ckpt.pt",
)
# a dtype of PyTorch or of safetensors whose numbers are the weights themselves
PLAIN_DTYPES = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
ONE_OF_SEVERAL = re.compile(r"-\d{5}-of-\d{5}\.")
GLOBAL = re.compile(r"GLOBAL (\S+)|add_safe_globals\(\[(\S+?)\]\)")
# where the file of a trainer has the weights
STATE_DICTS = ("model", "state_dict", "model_state_dict", "module")
TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model")
# {a name in a folder of another format: (what it is, how its weights are had)}
OTHER_FORMATS = {
    "adapter_config.json": (
        "an adapter (PEFT), which is no whole model",
        "put it into its model, peft.AutoPeftModelForCausalLM.from_pretrained('{path}')"
        ".merge_and_unload().save_pretrained('OUT')",
    ),
    ".metadata": (
        "a distributed checkpoint of PyTorch",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} "
        "OUT/pytorch_model.bin, and put its config.json there",
    ),
    "*.distcp": (
        "a distributed checkpoint of PyTorch without its .metadata",
        "copy it again with .metadata, a name that `cp *` leaves out",
    ),
    "pytorch_model_fsdp_0": (
        "a sharded checkpoint of Accelerate",
        "accelerate merge-weights {path}/pytorch_model_fsdp_0 OUT, and put its config.json there",
    ),
    "zero_to_fp32.py": (
        "a checkpoint of DeepSpeed",
        "python {path}/zero_to_fp32.py {path} OUT, and put its config.json there",
    ),
    "*_model_states.pt": (
        "a checkpoint of DeepSpeed",
        "run zero_to_fp32.py, which lies one folder up, and put its config.json into OUT",
    ),
    "latest_checkpointed_iteration.txt": (
        "a checkpoint of Megatron-LM",
        "convert it there, with tools/checkpoint/convert.py --saver, or with Megatron Bridge",
    ),
    "consolidated*.pth": (
        "Llama as Meta writes it",
        "take the folder of the same name with -hf from the hub, or run "
        "convert_llama_weights_to_hf.py of transformers",
    ),
    "consolidated*.safetensors": (
        "a model as Mistral writes it",
        "take the files of the hub without `consolidated` in their names",
    ),
    "*.gguf": (
        "a model in llama.cpp's format (GGUF), whose numbers are rounded",
        "take the original weights from the hub",
    ),
    "flax_model.msgpack": (
        "weights of Flax",
        "with transformers below 5: AutoModelForCausalLM.from_pretrained('{path}', from_flax=True)"
        ".save_pretrained('OUT')",
    ),
    "tf_model.h5": (
        "weights of TensorFlow",
        "with transformers below 5: AutoModelForCausalLM.from_pretrained('{path}', from_tf=True)"
        ".save_pretrained('OUT')",
    ),
    "mp_rank_*": (
        "one step of a checkpoint of Megatron-LM",
        "convert the folder above it there, with tools/checkpoint/convert.py --saver",
    ),
    "lit_model.pth": (
        "a checkpoint of LitGPT",
        "litgpt convert_from_litgpt {path} OUT, name its model.pth pytorch_model.bin, and put its "
        "config.json there",
    ),
    "*-00001-of-*": (
        "several files of weights without their index",
        "copy it again with the file whose name ends in .index.json",
    ),
    "*/.metadata": (
        "a folder of distributed checkpoints of PyTorch",
        "name one of them",
    ),
    "model.ckpt.index": (
        "a checkpoint of TensorFlow",
        "take the same model from the hub, or convert it with transformers below 5",
    ),
    "snapshots": ("a folder of the hub's cache", "name the folder in {path}/snapshots"),
    "checkpoint-*": ("a folder of checkpoints", "name one of them, as {path}/checkpoint-1000"),
}


# ---- out of a run


def export(run: Path, to: Path, *, adapter: bool = False) -> str:
    """Write the weights of a run, of its end or else of its newest checkpoint.

    Args:
        run: Folder of the run.
        to: Folder to be made.
        adapter: Write the adapters of the run alone, for `peft`, and not the model with them.

    Returns:
        What was written, and where it is from, as "a Llama, from runs/gpt-001/weights.pt".

    Raises:
        ValueError: It is no run of a GPT that the hub has, or `to` exists.
        DamagedError: The checkpoint is not as it was written.
        OSError: A file cannot be read or written; nothing of it is left.
    Held by: tests/ranks/test_gpt2_files.py
    """
    if to.exists():
        raise ValueError(f"{to} exists: choose another folder")
    config = _model_of(run)
    family = hub.family_of(config)  # refuses before anything is read
    if adapter:
        return _export_adapter(run, to, config)
    weights, source = _weights_of(run)
    if "embed.weight" not in weights:
        raise ValueError(
            f"{source} holds adapters alone: let the run come to its end, whose weights.pt has the "
            "model with them, or write them alone (--adapter)"
        )
    config = dataclasses.replace(config, vocab_size=weights["embed.weight"].shape[0])
    with _made_at_once(to) as unfinished:
        tensors = hub.state_dict(config, weights)
        save_file(tensors, unfinished / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(hub.config_json(config), indent=2) + "\n"
        (unfinished / CONFIG_NAME).write_text(text)
        tokenizer = _tokenizer_of(run)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, unfinished / TOKENIZERS[0])
    return f"a {family.title}, from {source}"


def _export_adapter(run: Path, to: Path, config: GPTConfig) -> str:
    """Write adapter_model.safetensors and adapter_config.json."""
    tree = json.loads((run / CONFIG_NAME).read_text())
    lora = LoraConfig(**tree.get("lora", {}))
    if not lora.rank:
        raise ValueError(f"{run} has no adapters: it trained the model itself, without lora.rank")
    final = run / ADAPTERS
    if final.is_file():
        adapters = torch.load(final, map_location="cpu", weights_only=True)
        source = final
    else:
        adapters, source = _weights_of(run)
    tensors = hub_adapter.adapter_state_dict(config, adapters)
    content = hub_adapter.adapter_config(config, lora, tree["train"].get("start_from"))
    with _made_at_once(to) as unfinished:
        save_file(tensors, unfinished / "adapter_model.safetensors", metadata={"format": "pt"})
        text = json.dumps(content, indent=2) + "\n"
        (unfinished / "adapter_config.json").write_text(text)
    return f"adapters of rank {lora.rank}, from {source}"


@contextlib.contextmanager
def _made_at_once(to: Path) -> Iterator[Path]:
    """A folder to be filled that gets its name when it is whole; else nothing of it is left."""
    to.parent.mkdir(parents=True, exist_ok=True)
    # beside the folder that it becomes: a rename does not leave its file system
    unfinished = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # that of a folder of mkdtemp is for its owner alone
        os.replace(unfinished, to)
    # Ctrl-C too
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(to.parent)


def _model_of(run: Path) -> GPTConfig:
    """The shape of the model of a run."""
    path = run / CONFIG_NAME
    try:
        tree = json.loads(path.read_text())
        return GPTConfig(**tree["model"])
    except FileNotFoundError:
        raise ValueError(f"{run} is no run: it has no {CONFIG_NAME}") from None
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not that of a GPT: only those have this format") from None


def _tokenizer_of(run: Path) -> Path | None:
    """The tokenizer.json that a run was given; None where it made a tokenizer from its text."""
    data = json.loads((run / CONFIG_NAME).read_text()).get("data", {})
    path = Path(str(data.get("tokenizer"))).expanduser()
    return path if path.suffix == ".json" and path.is_file() else None


def _weights_of(run: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """The whole weights of a run, and the file or folder that they are from."""
    final = run / "weights.pt"
    if final.is_file():
        return torch.load(final, map_location="cpu", weights_only=True), final
    folder = run / "checkpoints"
    names = sorted(path.name for path in folder.glob("step-*") if path.name[5:].isdigit())
    if not names:
        raise ValueError(f"{run} has neither weights.pt nor a checkpoint: let it come to one")
    newest = folder / names[-1]
    about = read_about(newest)
    verify(newest, about.files, about.files)
    index = read_index(newest, about)
    weights = {}
    for key in index:
        if key.startswith(MODEL):
            weights[key.removeprefix(MODEL)] = read_whole(newest, index, key)
    return weights, newest


# ---- into a run


def open_start(
    config: Config, model: GPTConfig | ViTConfig, tokenizer: AnyTokenizer | None = None
) -> "HubCheckpoint":
    """The checkpoint that `train.start_from` names, of the model of this run.

    Args:
        config: The config of the run.
        model: The model config of the run; without a vocabulary while that is unknown.
        tokenizer: The tokenizer of the run, when it is known.

    Raises:
        ValueError: It cannot be read, or is of another model.
    """
    assert config.train.start_from
    if not isinstance(model, GPTConfig):
        raise ValueError(f"{FIELD} is for a GPT, and {config.name} is none: leave it out")
    found = HubCheckpoint(user_path(config.train.start_from, FIELD))
    found.check(config, model, tokenizer)
    return found


class HubCheckpoint:
    """A checkpoint from elsewhere: what it says of itself, and its weights.

    Opening it reads the description and the names; weights are read box by box.

    Args:
        path: A folder, or one of its files.

    Raises:
        ValueError: It is none that can be read, in one line that says what it is.

    Held by: tests/unit/test_hub_files.py, tests/ranks/test_gpt2_files.py
    """

    def __init__(self, path: Path) -> None:
        self.path = _weight_file(path)
        self.folder = self.path.parent
        args = None
        found: dict[str, _Tensor] = {}
        for file in _files_of(self.path):
            if kind_of(file).name == "safetensors":
                found |= _slices(file)
            else:
                tensors, args = _pickled(file)
                found |= tensors
        _check_index(self.path, found)
        self._tensors: dict[str, _Tensor] = {}  # by bare name
        for name, tensor in hub.bare_names(found).items():
            if not name.endswith(BUFFERS):
                self._tensors[name] = tensor
        self.described, self.source = self._description(args)

    def _description(self, args: Mapping[str, Any] | None) -> tuple[Described, Path]:
        """(What the checkpoint says that it is, and where)."""
        if args is not None:
            return _described_by_nanogpt(self.path, args), self.path
        source = self.folder / CONFIG_NAME
        try:
            content = json.loads(source.read_text())
        except FileNotFoundError:
            raise ValueError(
                f"{FIELD}: {self.folder} has no {CONFIG_NAME}, and weights alone do not say how "
                "many heads they have, or which activation: copy it from where they come from"
            ) from None
        except ValueError:
            raise _refused(source, "a config.json") from None
        if not isinstance(content, dict):
            raise ValueError(
                f"{FIELD}: {source} holds {type_in_words(content)}, and a config.json is names "
                "and values: copy it again"
            )
        try:
            return hub.describe(content), source
        except ValueError as error:
            raise ValueError(f"{FIELD}: {source}: {error}") from None

    def check(
        self, config: Config, model: GPTConfig, tokenizer: AnyTokenizer | None = None
    ) -> None:
        """That a run's model is the one that the checkpoint is of, and its tokens are the same.

        Args:
            config: The config of the run.
            model: The model config of the run; without a vocabulary while that is unknown.
            tokenizer: The tokenizer of the run, when it is known.

        Raises:
            ValueError: It is not.
        """
        differ = self.described.differences(model)
        if differ.keys() - {"vocab_size"}:
            # A model of other sizes is another model: that its tokens differ as well helps nobody
            # to find it.
            differ.pop("vocab_size", None)
        theirs = [self.described.theirs.get(name, self._kind(name)) for name in differ]
        ours = [f"model.{name}={_shown(getattr(model, name))}" for name in differ]
        if differ == {} or tokenizer is not None:
            self._check_tokenizer(config, tokenizer)
        if "vocab_size" in differ:
            raise ValueError(
                f"{FIELD}: {self.source} says {theirs[0]} and this run has {ours[0]}: its tokens "
                f"are others; give the tokenizer that it was trained with "
                f"(--data.tokenizer FILE.json), or --model.vocab_size {differ['vocab_size']} "
                "if it was rounded up"
            )
        if differ:
            options = " ".join(f"--model.{name} {_shown(value)}" for name, value in differ.items())
            raise ValueError(
                f"{FIELD}: {self.source} says {', '.join(theirs)} and this run has "
                f"{', '.join(ours)}: give {options}"
            )
        self._check_names(model)

    def _check_names(self, model: GPTConfig) -> None:
        """That the files have all weights of the model, no others, and a head as it has."""
        pieces = self.described.family.pieces(model)
        try:
            hub.check_names(pieces, self._tensors)
            self._check_dtypes()
            head = self._tensors.get(HEAD)
            embedding = self._tensors.get(pieces["embed.weight"][0].name)
            hub.check_head(model, _whole(head), _whole(embedding))
        except ValueError as error:
            raise ValueError(f"{FIELD}: {self.path}: {error}") from None

    def _check_dtypes(self) -> None:
        """That the numbers are weights, and not what some scale turns into weights."""
        for name, tensor in self._tensors.items():
            if tensor.dtype not in PLAIN_DTYPES:
                raise ValueError(
                    f"{name} has the dtype {tensor.dtype}, which is no weight without its scale: "
                    "take the original weights, of 16 or 32 bits"
                )

    def _kind(self, name: str) -> str:
        """What every model of the family has, and config.json need not say."""
        value = self.described.fields[name]
        return f"model_type={self.described.family.model_type} ({name}={value})"

    def _check_tokenizer(self, config: Config, tokenizer: AnyTokenizer | None) -> None:
        """That token numbers mean in this run what they meant in the training of the weights."""
        names = [name for name in TOKENIZERS if (self.folder / name).is_file()]
        if not names:
            return
        own = self.folder / TOKENIZERS[0]
        kind = getattr(config.data, "tokenizer", "char")
        if kind not in ("char", "bpe") and Path(kind).expanduser().resolve() == own.resolve():
            return
        if own.is_file() and isinstance(tokenizer, BPETokenizer):
            theirs = BPETokenizer.read(own).model
            if theirs.get_vocab() == tokenizer.model.get_vocab():
                return
        if tokenizer is None and kind != "char":
            return  # it is compared when it has been made
        what = f"makes one from its text (data.tokenizer={kind})"
        if kind not in ("char", "bpe"):
            what = f"has another one (data.tokenizer={kind})"
        do = f"give --data.tokenizer {own}"
        if not own.is_file():
            do = (
                f"make {own} with transformers, AutoTokenizer.from_pretrained('{self.folder}')"
                f".save_pretrained('{self.folder}'), and {do}"
            )
        raise ValueError(
            f"{FIELD}: {self.folder} has a tokenizer of its own ({names[0]}) and this run {what}: "
            f"the same numbers would mean other tokens; {do}"
        )

    def read_into(self, model: ParallelModel) -> None:
        """Fill this rank's part of every weight of a model that was checked.

        Nothing is communicated.

        Raises:
            ValueError: A weight has another shape; the model is as it was.
        """
        config = model.config
        assert isinstance(config, GPTConfig)
        pieces = self.described.family.pieces(config)
        # adapters begin as they are drawn
        weights = {name: weight for name, weight in model.weights.items() if not is_adapter(name)}
        for ours in weights:
            self._check_shape(ours, pieces[ours], list(model.shardings[ours].shape))
        with torch.no_grad():
            for ours, param in weights.items():
                # Put together on the CPU and copied once: a box of a GPU's weight would be a small
                # copy of its own.
                own = torch.empty(param.shape, dtype=param.dtype)
                for box in boxes_of(model.shardings[ours], model.grid):
                    self._read_box(pieces[ours], box, box.view(own))
                param.copy_(own)

    def _check_shape(self, ours: str, pieces: list[Piece], shape: list[int]) -> None:
        for piece in pieces:
            found = self._tensors[piece.name].shape
            if piece.transposed:
                found = found[::-1]
            expected = list(shape)
            if piece.rows is not None:
                expected[0] = piece.rows
            if found != expected:
                raise ValueError(
                    f"{FIELD}: {piece.name} in {self.path} gives {ours} the shape {found}, and "
                    f"this model has {expected}: change the model's sizes"
                )

    def _read_box(self, pieces: list[Piece], box: Box, into: torch.Tensor) -> None:
        """Fill the view `into` with a box of a weight; no more of the files is read."""
        begin = box.offsets[0]
        end = begin + box.sizes[0]
        for piece in pieces:
            last = end if piece.rows is None else piece.first + piece.rows
            low = max(begin, piece.first)
            high = min(end, last)
            if low >= high:
                continue
            ranges = [slice(low - piece.first, high - piece.first)]
            for offset, size in zip(box.offsets[1:], box.sizes[1:]):
                ranges.append(slice(offset, offset + size))
            tensor = self._tensors[piece.name]
            # the file has [in, out]: the same box with its sides exchanged is read, and turned
            if piece.transposed:
                part = tensor.read(tuple(reversed(ranges))).t()
            else:
                part = tensor.read(tuple(ranges))
            into.narrow(0, low - begin, high - low).copy_(part)


class _Tensor:
    """A tensor in a file: its shape and dtype, and its numbers where they are asked for.

    Args:
        place: A slice of a safetensors file, or a tensor that is mapped into memory.
    """

    def __init__(self, place: Any) -> None:
        self.place = place
        whole = isinstance(place, torch.Tensor)
        self.shape = list(place.shape if whole else place.get_shape())
        self.dtype = str(place.dtype if whole else place.get_dtype()).removeprefix("torch.")

    def read(self, ranges: tuple[slice, ...]) -> torch.Tensor:
        """A part of it."""
        return self.place[ranges]


def _whole(tensor: _Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return tensor.read(tuple(slice(0, size) for size in tensor.shape))


def _shown(value: Any) -> str:
    return "None" if value is None else str(value)


def _weight_file(path: Path) -> Path:
    """The file of weights that a path means, or the index of several.

    Raises:
        ValueError: There is none, in words that say what is there.
    """
    if path.is_file():
        if ONE_OF_SEVERAL.search(path.name):
            raise ValueError(
                f"{FIELD}: {path} is one of several files that hold the weights: name the folder"
            )
        return path
    if not path.is_dir():
        do = "give the path of a folder with config.json and the weights"
        name = str(path)
        if name.count("/") <= 1 and not name.startswith((".", "/", "~")):
            do += f"; for a model of the hub first run: hf download {name} --local-dir DIR"
        raise ValueError(f"{FIELD}: there is no {path}: {do}")
    for name in WEIGHT_FILES:
        if (path / name).is_file():
            return path / name
    if (path / "weights.pt").is_file() or (path / "checkpoints").is_dir():
        raise ValueError(
            f"{FIELD}: {path} is a run of this course: write its weights first, with "
            f"python -m labcode.run.export {path} OUT, or go on with it (--checkpoint.resume)"
        )
    # what else people have on their disks: the way from there is worth more than "no weights found"
    for pattern, (what, do) in OTHER_FORMATS.items():
        if any(path.glob(pattern)):
            raise ValueError(f"{FIELD}: {path} is {what}: {do.format(path=path)}")
    others = []
    for pattern in ("*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.bin"):
        others += sorted(path.glob(pattern))
    if len(others) == 1:
        return others[0]
    there = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"{FIELD}: {path} has no weights that can be read, which are {', '.join(WEIGHT_FILES)}; "
        f"there is {there}: name the file of the weights"
    )


def _files_of(path: Path) -> list[Path]:
    """The files that an index names, or the file itself; all of them are there, and hold weights.

    Raises:
        ValueError: One is missing, or is something else.
    """
    files = [path]
    if path.name.endswith(".index.json"):
        # each file once, though it is named for every weight in it
        files = [path.parent / name for name in sorted(set(_index(path).values()))]
    for file in files:
        if kind_of(file).name not in ("safetensors", "torch", "old torch", "pickle"):
            raise _refused(file, "a file of weights")
    return files


def _index(path: Path) -> dict[str, str]:
    """{name of a weight: the file that has it}, from an index."""
    try:
        found = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        raise _refused(path, "an index of weights") from None


def _check_index(path: Path, found: Mapping[str, Any]) -> None:
    """That the files have every weight that an index names."""
    if not path.name.endswith(".index.json"):
        return
    missing = sorted(_index(path).keys() - found.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{FIELD}: {path} names {missing[0]}{more}, which its files have not: they are not "
            "those that the index was written for; copy all of them again"
        )


def _refused(path: Path, expected: str) -> ValueError:
    kind = kind_of(path)
    if kind.name == "missing":
        return ValueError(f"{FIELD}: {path} is missing, which the index names: copy it again")
    remedies = {
        "gguf": "take the original weights from the hub",
        "unknown": "it is damaged, or only a part of it: copy or download it again",
        "text": "copy it again",
        "hdf5": "it may be of TensorFlow: take the weights of PyTorch from the hub",
    }
    return ValueError(f"{FIELD}: {kind.is_not(path, expected, remedies)}")


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ValueError(
        f"{FIELD}: {path} cannot be read ({reason}): it is damaged, or only a part of it; copy or "
        "download it again"
    )


def _slices(path: Path) -> dict[str, _Tensor]:
    """The tensors of a safetensors file."""
    try:
        file = safe_open(path, framework="pt")
        return {name: _Tensor(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from None


def _pickled(path: Path) -> tuple[dict[str, _Tensor], Mapping[str, Any] | None]:
    """(The tensors of a file of torch.save, what it says of the model); nothing of it is run."""
    content = _load(path)
    args = content.get("model_args") if isinstance(content, dict) else None
    while inner := _state_dict_in(content):
        content = inner
    if not isinstance(content, dict):
        raise ValueError(
            f"{FIELD}: {path} holds {type_in_words(content)} and no weights by name: save "
            "model.state_dict()"
        )
    tensors = {key: _Tensor(value) for key, value in content.items() if torch.is_tensor(value)}
    if not tensors:
        keys = ", ".join(map(str, list(content)[:6]))
        raise ValueError(
            f"{FIELD}: {path} has no weights by name, but {keys}: save model.state_dict()"
        )
    return tensors, args


def _state_dict_in(content: Any) -> dict[str, Any] | None:
    """What a trainer's file holds as weights, if it is one; some are nested twice."""
    if not isinstance(content, dict):
        return None
    held = [content[name] for name in STATE_DICTS if isinstance(content.get(name), dict)]
    return held[0] if held else None


def _load(path: Path) -> Any:
    is_new = kind_of(path).name == "torch"  # the older format cannot be mapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other protocols
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_new)
    except pickle.UnpicklingError as error:
        # torch names the first global that it will not import
        named = GLOBAL.search(str(error))
        what = f" ({named[1] or named[2]})" if named else ""
        raise ValueError(
            f"{FIELD}: {path} holds Python objects beside numbers{what}, which would be run by "
            "reading them: where you trust it, save its weights alone, "
            "torch.save(model.state_dict(), 'pytorch_model.bin')"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise _damaged(path, error) from None


def _described_by_nanogpt(path: Path, args: Mapping[str, Any]) -> Described:
    """The model of a nanoGPT checkpoint, from its `model_args`.

    Raises:
        ValueError: The arguments are those of another program.
    """
    if "n_layers" in args or "dim" in args:
        raise ValueError(
            f"{FIELD}: {path} is a checkpoint of llama2.c: convert it there, with "
            f"python export.py OUT --version -1 --checkpoint {path}"
        )
    known = {*NANOGPT.shape.values(), "dropout"}
    unknown = sorted(set(args) - known)
    missing = sorted(known - {"dropout"} - set(args))
    if unknown or missing:
        what = f"has {unknown[0]}={args[unknown[0]]}" if unknown else f"lacks {missing[0]}"
        raise ValueError(
            f"{FIELD}: model_args in {path} {what}, unlike nanoGPT's: it is of a program that "
            "computes something else"
        )
    return NANOGPT.describe(args)
