"""A line of a job's output: its text, and who wrote it when, as far as that can be told.

Launchers write in front of a line which rank it comes from, in forms of their own, and loggers when
it was written. Both are taken off or read here, once, for all who read logs:

    [rank3]: ValueError: ...                    PyTorch's own hook for exceptions
    [default1]:ValueError: ...                  torchrun --tee: a rank of the node
    3: ValueError: ...                          srun --label: a task
    [1,3]<stderr>:ValueError: ...               mpirun; horovodrun leaves out the job
    (Worker pid=71, ip=10.0.0.2) ValueError     Ray
    gpu01:700:900 [0] NCCL WARN ...             NCCL: host, process, thread, GPU
    10.0.0.2: ValueError: ...                   pdsh, under DeepSpeed: a host
    2026-11-28T10:00:01.5Z ValueError: ...      what stores the output, such as Kubernetes: a time
    [rank3]:[E321 02:07:08.408 Process...]      PyTorch's log: month and day, then the time

Source: torch/_utils_internal.py and torch/distributed/elastic/multiprocessing/tail_log.py (2.13);
    srun(1), --label; c10/util/Logging.cpp, `[EWI]MMDD HH:MM:SS`; NCCL, src/debug.cc.
Held by: tests/unit/test_job_log.py
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

# of NCCL's lines; warnings name the place in its source, new versions the time in front
NCCL = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):(?P<thread>\d+) "
    r"\[-?\d+\] "
    r"(?:\S+:\d+ )?"
    r"NCCL (?P<kind>\w+) (?P<text>.*)"
)
# of a terminal, ECMA-48, 5.4: colours, and what moves or hides the cursor of a progress bar
_COLOUR = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_DATE = r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PREFIXES = (
    re.compile(rf"(?:\| )?(?:\[{_DATE}\]|{_DATE}(?:Z| ?[+-]\d\d:?\d\d)?:?)(?: \|)?(?: |$)"),
    re.compile(r"\[rank:? ?(?P<rank>\d+)\]:? ?", re.IGNORECASE),
    re.compile(r"\[(?:\d+,)?(?P<rank>\d+)\]<std(?:out|err)>: ?"),
    re.compile(r"\[(?:[A-Za-z_]+)(?P<local>\d+)\]: ?"),
    re.compile(r"\[(?P<rank>\d{1,5})\]:(?: |$)"),
    re.compile(r"\([\w ]*\bpid=\d+(?:, ip=(?P<host>[\w.:-]+))?\) "),
)
_IN_TEXT = re.compile(r"\[(?:(?:PG [^\]]*)?Rank|rank:) (\d+)\]")
_LABEL = re.compile(
    r"\s*(?P<label>\d{1,5}|\d{1,3}(?:\.\d{1,3}){3}|[A-Za-z][\w.-]*\d[\w.-]*):(?: |$)"
)
_LEAST_LABELLED = 0.6  # of the lines of a file: then it is what the launcher wrote
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d(?:[.,]\d+)?)")
_GLOG = re.compile(r"\b[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d(?:\.\d+)?)")
_RANK_OF_FILE = re.compile(r"rank[-_ ]?(\d+)|/(\d+)/std(?:out|err)\b|[-_.](\d{1,4})\.\w+$")
_ELASTIC = re.compile(r"torchelastic|torch[./]distributed[./](?:elastic|run\b|launch)|\btorchrun\b")
_DAY_S = 86_400.0


@dataclass(frozen=True)
class LogLine:
    """One line of a job's output; what cannot be told is None.

    Args:
        file: Name of the file, for a person.
        number: Number of the line there, from 1.
        text: The line without what launchers wrote before it.
        rank: Rank of the process that wrote it.
        host: Name of its machine.
        time_s: When it, or the last line before it that says so, was written: seconds since some
            moment, the same for all lines.
    """

    file: str
    number: int
    text: str
    rank: int | None = None
    host: str | None = None
    time_s: float | None = None

    @property
    def place(self) -> str:
        """ "job.err, line 12"."""
        return f"{self.file}, line {self.number}" if self.file else f"line {self.number}"

    @property
    def source(self) -> tuple[str, int | None]:
        """What is written in order: the lines of one rank in one file."""
        return self.file, self.rank


def read_lines(files: Mapping[str, str]) -> list[LogLine]:
    """The lines of all files, one file after the other; empty lines are left out.

    Args:
        files: {name: text}.
    """
    of_files = _ranks_of_files(list(files))
    short = Counter(PurePath(name).name for name in files)
    lines = []
    for name, text in files.items():
        last = PurePath(name).name
        shown = last if short[last] == 1 else name
        lines += _of_file(shown, text, of_files.get(name))
    return lines


def is_elastic(text: str) -> bool:
    """Whether torchrun has started the ranks, so that a task of srun is its agent and no rank."""
    return _ELASTIC.search(text) is not None


def _of_file(shown: str, text: str, rank: int | None) -> list[LogLine]:
    raw: list[tuple[int, str]] = []
    for number, line in enumerate(_COLOUR.sub("", text).split("\n"), start=1):
        # a progress bar goes back to the start of its line, and an editor counts one
        raw += [(number, part) for part in line.split("\r") if part.strip()]
    labels = _labels([line for _, line in raw])
    elastic = is_elastic(text)
    time_s = None
    lines = []
    for number, line in raw:
        own = LogLine(shown, number, line, rank)
        if labels:
            own = _without_label(own, elastic)
        stamp_s = _time_s(line)
        own = _without_prefixes(own)
        if stamp_s is not None and (time_s is None or stamp_s > time_s):
            time_s = stamp_s
        lines.append(replace(own, time_s=time_s))
    return lines


def _labels(raw: list[str]) -> bool:
    """Whether most lines begin with a task's number or a host's name, few different ones."""
    found = [match for line in raw if (match := _LABEL.match(line))]
    different = {match["label"] for match in found}
    most = len(found) >= _LEAST_LABELLED * max(1, len(raw))
    return most and len(found) > 1 and len(different) <= max(1, len(found) // 2)


def _without_label(line: LogLine, elastic: bool) -> LogLine:
    found = _LABEL.match(line.text)
    if not found:
        return line
    label = found["label"]
    text = line.text[found.end() :]
    if not label.isdigit():
        return replace(line, text=text, host=label)
    if elastic:  # a task is an agent, and no rank
        return replace(line, text=text, host=f"the node of task {label}")
    return replace(line, text=text, rank=int(label))


def _without_prefixes(line: LogLine) -> LogLine:
    while True:
        for prefix in _PREFIXES:
            found = prefix.match(line.text)
            if found:
                named = found.groupdict()
                line = replace(line, text=line.text[found.end() :])
                if named.get("rank"):
                    line = replace(line, rank=int(named["rank"]))
                if named.get("local") and line.rank is None:
                    line = replace(line, rank=int(named["local"]))
                if named.get("host"):
                    line = replace(line, host=named["host"])
                break
        else:
            break
    of_nccl = NCCL.search(line.text) if " NCCL " in line.text else None
    if of_nccl:
        line = replace(line, host=of_nccl["host"])
    in_text = _IN_TEXT.search(line.text) if line.rank is None else None
    if in_text:
        line = replace(line, rank=int(in_text[1]))
    return line


def _time_s(text: str) -> float | None:
    """When a line was written; the year is left out, because some do not write it."""
    found = _ISO.search(text)
    if found:
        month, day, hour, minute, second = found.groups()[1:]
    else:
        found = _GLOG.search(text)
        if not found:
            return None
        month, day, hour, minute, second = found.groups()
    days = 31 * int(month) + int(day)
    of_day_s = 3600 * int(hour) + 60 * int(minute) + float(second.replace(",", "."))
    return days * _DAY_S + of_day_s


def _ranks_of_files(names: list[str]) -> dict[str, int]:
    """The rank that each of several files belongs to, where their names say so."""
    found = {}
    for name in names:
        match = _RANK_OF_FILE.search(name)
        if match:
            found[name] = int(next(number for number in match.groups() if number))
    is_sure = any("rank" in PurePath(name).name or "/std" in name for name in found)
    # "train-4711.out" and "train-4711.err" are of one job and not of one rank
    return found if is_sure or len(set(found.values())) > 1 else {}
