"""`python -m labcode.run.export RUN DIR`: the weights of a run of a GPT, for `transformers`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from labcode.runtime.arguments import Parser, UsageError
from labcode.runtime.suggest import run_near


def main(args: Sequence[str]) -> int:
    """Run the program; returns its exit code: 0, or 2 after an error of one line."""
    parser = Parser(prog="python -m labcode.run.export", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run of a GPT")
    parser.add_argument("to", type=Path, help="folder to be made: model.safetensors, config.json")
    parser.add_argument(
        "--adapter", action="store_true", help="write its adapters alone, as peft has them"
    )
    try:
        given = parser.parse_args(args)
        if not os.path.isdir(given.run):
            raise UsageError(f"{given.run} does not exist: {run_near(given.run)}")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # imports torch: `--help` need not wait for it
    from labcode.train.checkpoint.hub_files import export
    from labcode.train.checkpoint.tensors import DamagedError

    try:
        source = export(given.run, given.to, adapter=given.adapter)
    except (ValueError, OSError, DamagedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {given.to}: {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
