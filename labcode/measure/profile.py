"""What the recording of chosen steps says. No torch; `train.observers.step_profiler` makes it.

python -m labcode.train gpt_tiny --profile.steps 10:13
python -m labcode.measure.profile runs/gpt_tiny-001
"""

import sys
from collections.abc import Sequence

from labcode.perf.summary import summary
from labcode.runtime.arguments import Parser

# what starts a run with --profile.nvtx, for Nsight Systems to record; before `torchrun ...`
NSYS = (
    "nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi "
    "--capture-range-end=stop --output=profile"
)


def main(words: Sequence[str]) -> int:
    """Print what the profiles of a run say; returns the exit code."""
    parser = Parser(
        prog="python -m labcode.measure.profile",
        description="What the profile of a run says: where the time of a step goes, and what to do",
        epilog=f"For Nsight Systems start a run with --profile.nvtx by: {NSYS} torchrun ...",
    )
    parser.add_argument("run", help="the folder of a run, or a trace")
    parser.add_argument("--rank", type=int, default=None, help="whose profile; the first there is")
    try:
        asked = parser.parse_args(words)
        print(summary(asked.run, rank=asked.rank))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
