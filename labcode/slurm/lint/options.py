"""The options of sbatch and srun 22.05 to 25.05: their names, and how a line of them is read.

Source: slurm.schedmd.com/sbatch.html and srun.html; pyxis, shifter and uenv add some.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LETTERS = """
A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir d=dependency
e=error F=nodefile G=gpus H=hold i=input J=job-name k=no-kill L=licenses M=clusters m=distribution
N=nodes n=ntasks O=overcommit o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time
v=verbose W=wait w=nodelist x=exclude
"""
_WITH_VALUE = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
consolidate-segments constraint container container-env container-id container-image
container-mounts container-name container-save container-workdir core-spec cores-per-socket
cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
environment export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
gpus-per-socket gpus-per-task gres gres-flags hint image input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus module network
nice nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
ntasks-per-socket oom-kill-step open-mode output partition power prefer priority profile propagate
qos reservation segment signal sockets-per-node switches thread-spec threads-per-core time time-min
tmp tres-bind tres-per-task uenv uid view volume wait-all-nodes wckey wrap
"""
_ALONE = """
container-mount-home container-writable contiguous exclusive get-user-env help hold ignore-pbs
no-bell no-container-mount-home no-container-remap-root no-kill no-requeue overcommit
oversubscribe parsable quiet reboot requeue spread-job stepmgr test-only usage use-min-nodes
verbose version wait
"""
SHORT: dict[str, str] = dict(re.findall(r"(\w)=(\S+)", _LETTERS))
WITH_VALUE = frozenset(_WITH_VALUE.split())
OPTIONS = WITH_VALUE | frozenset(_ALONE.split())
# options of srun that people write for sbatch, which refuses them
_SRUN_ONLY = """
accel-bind cpu-bind cpus-per-node epilog exact immediate label mpi multi-prog ntasks-per-tres
overlap prolog pty resv-ports task-epilog task-prolog unbuffered workdir
"""
SRUN_ONLY = frozenset(_SRUN_ONLY.split())
# those of srun that stand alone; all others take a value
_SRUN_ALONE = """
contiguous container-mount-home container-remap-root container-writable debugger-test
disable-status exact exclusive external get-user-env help hold immediate interactive
kill-on-bad-exit label multi-prog no-allocate no-container-mount-home no-container-remap-root
no-kill no-shell overcommit overlap oversubscribe preserve-env pty quiet quit-on-interrupt reboot
resv-ports send-libs share spread-job stepmgr test-only unbuffered usage use-min-nodes verbose
version whole
"""
_SRUN_LETTERS = SHORT | {"K": "kill-on-bad-exit", "O": "overcommit", "r": "relative", "l": "label"}
_SRUN_LETTERS |= {"u": "unbuffered", "E": "preserve-env", "X": "disable-status", "s": "share"}


@dataclass(frozen=True)
class Options:
    """How a command reads its options.

    Args:
        letters: What each short one means.
        with_value: Options that take a value; None: all but `alone`.
        alone: Options that take none.
        whole: All names, where any beginning that only one of them has is taken for it.
    """

    letters: dict[str, str]
    alone: frozenset[str]
    with_value: frozenset[str] | None = None
    whole: frozenset[str] = frozenset()

    def take(self, words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
        """((name, value) of each option in the first word, the words behind it).

        Reads `--nodes=2`, `--nodes 2`, `-N 2`, `-N2` and `-lu`; what is no option is passed over.
        """
        word, *rest = words
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            # sbatch takes no `_`; srun takes it in these two
            name = self._name("cpu-bind" if name == "cpu_bind" else name.replace("mem_b", "mem-b"))
            if not equals and self._takes_value(name) and rest:
                value, *rest = rest
            return [(name, value)], rest
        found: list[tuple[str, str]] = []
        letters = word[1:] if word.startswith("-") else ""
        for at, letter in enumerate(letters):
            name = self.letters.get(letter, letter)
            value = letters[at + 1 :]
            if name == "kill-on-bad-exit" and value.isdigit():  # -K1
                return [*found, (name, value)], rest
            if not self._takes_value(name):
                found.append((name, ""))
                continue
            if not value and rest and not rest[0].startswith("--"):
                value, *rest = rest
            return [*found, (name, value.removeprefix("="))], rest
        return found, rest

    def _takes_value(self, name: str) -> bool:
        return name in self.with_value if self.with_value is not None else name not in self.alone

    def _name(self, name: str) -> str:
        if name == "tasks-per-node":
            return "ntasks-per-node"
        meant = [option for option in self.whole if option.startswith(name)]
        return meant[0] if len(meant) == 1 and name not in self.whole else name


SBATCH = Options(SHORT, frozenset(_ALONE.split()), WITH_VALUE, OPTIONS)
SRUN = Options(_SRUN_LETTERS, frozenset(_SRUN_ALONE.split()))
