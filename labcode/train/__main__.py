"""`python -m labcode.train RECIPE [--section.field value ...]`, run alone, by torchrun or by
srun.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from labcode.config import Config
from labcode.runtime import combinations
from labcode.runtime.arguments import UsageError
from labcode.runtime.command import parse
from labcode.runtime.ctrl_c import INTERRUPTED, CtrlC
from labcode.runtime.processes import Ending
from labcode.train.signals import StopSignals

REFUSED = 2  # the exit code after a user's error
# One of these is set in a process that is a rank of a job.
OF_A_JOB = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"}


def main(args: Sequence[str]) -> int:
    """Run the program.

    Args:
        args: The words of the command line, without the program.

    Returns:
        The exit code: 0, 2 after a user error, 130 after Ctrl-C.
    """
    started_by = os.getppid()  # asked now: it may end while torch is imported
    ctrl_c = CtrlC()
    ctrl_c.listen()
    try:
        return _main(args, ctrl_c, started_by)
    except KeyboardInterrupt:
        print("interrupted before the first step: nothing was written", file=sys.stderr)
        return INTERRUPTED


def _main(args: Sequence[str], ctrl_c: CtrlC, started_by: int) -> int:
    is_alone = not OF_A_JOB & set(os.environ)
    try:
        config = parse(args)
        if is_alone:
            _check_for_one_process(config, args)
    except UsageError as error:
        if is_alone:  # a mistake need not wait for torch
            print(f"error: {error}", file=sys.stderr)
            return REFUSED
        from labcode.run.failure import refuse_command

        return refuse_command(error)
    signals = StopSignals()
    if config.checkpoint.on:
        signals.listen_where_ignored()
    try:
        # imports torch, which takes seconds: `--help` need not wait for it
        from labcode.run.run import run
    except BaseException:
        if not ctrl_c.heard:
            raise
        raise KeyboardInterrupt from None  # an interrupted import may raise anything

    # what torch wraps around it may return None
    return run(config, ctrl_c, started_by, signals) or 0


def _check_for_one_process(config: Config, args: Sequence[str]) -> None:
    """Raises UsageError for what one process cannot run; where it takes more, how to start them.

    `run` asks again, for the ranks that there are. Here a mistake is told before torch is imported.

    Args:
        config: The run.
        args: Arguments of the command that asks for it.
    """
    parallel = config.parallel
    needed = parallel.replica.world_size * (parallel.dp or parallel.ep)
    try:
        combinations.check(config, needed)  # first what more ranks would not mend
    except ValueError as error:
        raise UsageError(str(error)) from None
    if needed > 1:
        command = f"torchrun --nproc-per-node={needed} -m labcode.train {shlex.join(args)}"
        try:
            parallel.shape(world_size=1)
        except ValueError as error:
            raise UsageError(f"{error}: {command}") from None


if __name__ == "__main__":
    # Threads that wait sleep instead of spinning: else a step of a small model takes ten times as
    # long on a busy machine. OpenMP reads it when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    ending = Ending()
    sys.exit(ending.with_code(main(sys.argv[1:])))
