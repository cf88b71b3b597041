"""What settings of NCCL, PyTorch, gloo, CUDA and SLURM mean together, as a table of rules.

A variable that is spelt well may still do nothing, or the opposite of what it is there for, since
another one is set or because of where the job runs:

    found = judge({"NCCL_NET": "Socket", "NCCL_IB_HCA": "mlx5"}, Where(nodes=2))
    found[0].text     # "NCCL_IB_HCA=mlx5: NCCL_NET=Socket takes no InfiniBand, so that this is ..."

`labcode.doctor` asks it about the environment of a shell and about the settings that a log of NCCL
names. A rule with a condition on the job is silent where the job is not known.

Source: "NCCL" is its user guide, page "Environment Variables", and source, version 2.30.7: files
    src/misc/socket.cc, src/plugin/net.cc, src/transport/net_ib/init.cc, src/transport/shm.cc,
    src/graph/paths.cc, src/graph/tuning.cc, src/debug.cc. "PyTorch" is version 2.13:
    torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and .cpp, FlightRecorder.hpp, Utils.hpp;
    torch/distributed/run.py and elastic/agent/server/local_elastic_agent.py. "SLURM" is the manual
    page srun(1), version 25.05. "CUDA" is the CUDA C++ Programming Guide, "CUDA Environment
    Variables".
Held by: tests/unit/test_variables.py
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Where:
    """Where the variables are set; what is not known is None, and no rule that asks it speaks.

    Args:
        nodes: Number of nodes of the job.
        cores: Cores that a task may use.
        interfaces: Names of the network interfaces.
        infiniband: Names of the InfiniBand or RoCE cards; empty: there is none.
        host: Name of this machine.
        is_shell: A person's shell, out of which jobs are started: what a launcher or a search for a
            fault has left there counts too.
    """

    nodes: int | None = None
    cores: int | None = None
    interfaces: Sequence[str] | None = None
    infiniband: Sequence[str] | None = None
    host: str | None = None
    is_shell: bool = False


Env = Mapping[str, str]
Test = Callable[[Env, Where], str | None]


@dataclass(frozen=True)
class Rule:
    """One sentence about variables that are set together.

    Args:
        when: {variable: expression for the whole of its value, whatever the case}; all must match.
        means: What follows, with {NAME} for a value and {found} for what `test` returned.
        cure: What to do.
        source: Source of the rule.
        unless: {variable: expression}: silent if one of them matches.
        nodes: The least number of nodes for which it is true; 0: for any, also where that is
            unknown.
        test: A condition that no expression can say, such as one on two values: it returns what it
            has found, None if the rule is not true.
        is_wrong: It does not work at all; else it works, but slowly or not as it seems.
        in_shell: Only what a person's own shell should not hand down.
    """

    when: Mapping[str, str]
    means: str
    cure: str
    source: str
    unless: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 0
    test: Test | None = None
    is_wrong: bool = False
    in_shell: bool = False


@dataclass(frozen=True)
class Meaning:
    """What a rule says of these variables.

    Args:
        names: The variables.
        text: "NAME=value: what follows".
        cure: What to do.
        is_wrong: Whether the value is wrong, as in the rule.
        source: Source of the rule.
    """

    names: tuple[str, ...]
    text: str
    cure: str
    is_wrong: bool
    source: str


def judge(env: Env, where: Where) -> list[Meaning]:
    """What the rules say of the variables that are set, in the order of the table.

    Args:
        env: {name: value}.
        where: The job and the machine.
    """
    found = []
    for rule in RULES:
        meaning = _apply(rule, env, where)
        if meaning is not None:
            found.append(meaning)
    return found


def _apply(rule: Rule, env: Env, where: Where) -> Meaning | None:
    if rule.in_shell and not where.is_shell:
        return None
    if rule.nodes and (where.nodes is None or where.nodes < rule.nodes):
        return None
    if not all(_matches(env, name, values) for name, values in rule.when.items()):
        return None
    if any(_matches(env, name, values) for name, values in rule.unless.items()):
        return None
    extra = rule.test(env, where) if rule.test else ""
    if extra is None:
        return None
    names = tuple(rule.when) if rule.when else tuple(extra.split())
    said = ", ".join(f"{name}={env[name]}" for name in names if name in env)
    values = {**env, "found": extra}
    text = f"{said}: {rule.means.format_map(values)}"
    return Meaning(names, text, rule.cure.format_map(values), rule.is_wrong, rule.source)


def _matches(env: Env, name: str, values: str) -> bool:
    value = env.get(name)
    return value is not None and re.fullmatch(values, value.strip(), re.IGNORECASE) is not None


# ---- conditions that no expression can say


def _no_such_interface(name: str) -> Test:
    """An interface that this machine does not have; gloo takes whole names, NCCL beginnings."""

    def test(env: Env, where: Where) -> str | None:
        value = env[name].strip()
        is_nccl = name.startswith("NCCL")
        if where.interfaces is None or not value or (is_nccl and value.startswith("^")):
            return None
        whole = not is_nccl or value.startswith("=")
        for wanted in value.removeprefix("=" if is_nccl else "").split(","):
            begins = [one for one in where.interfaces if one.startswith(wanted)]
            if not (wanted in where.interfaces if whole else begins):
                return f"{wanted}, but {', '.join(where.interfaces)}"
        return None

    return test


def _other_interface(env: Env, where: Where) -> str | None:
    """Whether gloo and NCCL are told interfaces of which none is the same."""
    nccl = env["NCCL_SOCKET_IFNAME"]
    if nccl.startswith("^"):
        return None
    beginnings = tuple(nccl.removeprefix("=").split(","))
    same = [one for one in env["GLOO_SOCKET_IFNAME"].split(",") if one.startswith(beginnings)]
    return None if same else ""


def _has_infiniband(env: Env, where: Where) -> str | None:
    return ", ".join(where.infiniband) if where.infiniband else None


def _may_have_infiniband(env: Env, where: Where) -> str | None:
    return "" if where.infiniband is None else None


def _may_have_interface(env: Env, where: Where) -> str | None:
    return "" if where.interfaces is None else None


def _has_no_thread_count(env: Env, where: Where) -> str | None:
    return None if _first_number(env["OMP_NUM_THREADS"]) else ""


def _first_number(value: str) -> int:
    first = value.partition(",")[0].strip()  # of OMP_NUM_THREADS one for each nesting level
    return int(first) if re.fullmatch("[0-9]{1,9}", first) else 0


def _more_than_cores(env: Env, where: Where) -> str | None:
    threads = _first_number(env["OMP_NUM_THREADS"])
    return str(where.cores) if where.cores is not None and threads > where.cores else None


def _more_than_cores_of_task(env: Env, where: Where) -> str | None:
    threads = _first_number(env["OMP_NUM_THREADS"])
    return "" if threads > _first_number(env["SLURM_CPUS_PER_TASK"]) else None


def _exponent_too_large(env: Env, where: Where) -> str | None:
    return "" if int(env["NCCL_IB_TIMEOUT"]) > LARGEST_IB_TIMEOUT else None


def _of_another_machine(env: Env, where: Where) -> str | None:
    """Whether the variables of a job came here from another machine, over ssh or a `tmux`."""
    if where.host is None:
        return None
    own = where.host.partition(".")[0]
    return "" if env["SLURMD_NODENAME"].partition(".")[0] != own else None


def _launcher_left(env: Env, where: Where) -> str | None:
    """What torchrun sets for its ranks, in a shell."""
    left = [name for name in LAUNCHER if name in env]
    return " ".join(left) if left and "TORCHELASTIC_RUN_ID" not in env else None


def _proxy(env: Env, where: Where) -> str | None:
    """A proxy that is also asked for this machine's own addresses."""
    lower = {name.lower(): value for name, value in env.items()}
    own = {name.lower(): name for name in env}
    proxies = [own[name] for name in PROXIES if lower.get(name)]
    direct = [host.strip() for host in lower.get("no_proxy", "").split(",")]
    if not proxies or "*" in direct or {"localhost", "127.0.0.1"} <= set(direct):
        return None
    return proxies[0]


def _chosen(env: Env) -> list[str] | None:
    """The algorithms that NCCL_ALGO allows for all collectives; None if it is no plain list."""
    value = env["NCCL_ALGO"].strip()
    if value.startswith("^") or ":" in value:
        return None
    known = f"{ALGORITHMS}|CollNet"  # an older name for both of its kinds
    told = value.lower().split(",")
    return [name for name in told if re.fullmatch(known, name, re.IGNORECASE)]


def _no_algorithm(env: Env, where: Where) -> str | None:
    return "" if _chosen(env) == [] else None


def _no_ring(env: Env, where: Where) -> str | None:
    chosen = _chosen(env)
    return "" if chosen and "ring" not in chosen else None


def _ring_is_left(env: Env, where: Where) -> str | None:
    chosen = _chosen(env)
    return "" if chosen is None or "ring" in chosen else None


def _masked_twice(second: str) -> Test:
    """Numbers of AMD GPUs that are not there: the second variable counts what the first leaves."""

    def test(env: Env, where: Where) -> str | None:
        left = len(env["ROCR_VISIBLE_DEVICES"].split(","))
        return "" if any(int(one) >= left for one in env[second].split(",")) else None

    return test


def _masked_rules() -> list[Rule]:
    rules = []
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        rules.append(
            Rule(
                when={"ROCR_VISIBLE_DEVICES": ANY, name: "[0-9]{1,4}(,[0-9]{1,4})*"},
                means="the second counts among the GPUs that the first leaves, from 0: there is no "
                "such number, and no GPU is found",
                cure=f"unset {name}: SLURM sets ROCR_VISIBLE_DEVICES on AMD GPUs",
                source="ROCm: GPU isolation techniques; github.com/Parsl/parsl/issues/3858",
                test=_masked_twice(name),
                is_wrong=True,
            )
        )
    return rules


# ---- the table

ON = "[^0f].*"  # neither 0 nor false
ANY = ".+"
ENDS_HERE = "=?(lo|docker|virbr)[0-9]*"  # interfaces that lead to no other machine
LARGEST_IB_TIMEOUT = 31  # a field of five bits, InfiniBand specification, 12.7.34
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LIBFABRIC = {"FI_PROVIDER": ANY, "NCCL_NET": "(?!ib$|socket$).+", "NCCL_NET_PLUGIN": "(?!none$).+"}
NO_IB = "so that this is not read"
ALGORITHMS = "Tree|Ring|CollNetDirect|CollNetChain|NVLS|NVLSTree|PAT"
LEVELS = "version|warn|info|abort|trace"
GONE = {  # variable: what the documentation of NCCL says of it
    "NCCL_IB_CUDA_SUPPORT": "removed in 2.4; NCCL_NET_GDR_LEVEL took its place",
    "NCCL_SINGLE_RING_THRESHOLD": "removed in 2.3",
    "NCCL_LL_THRESHOLD": "removed in 2.5; NCCL_PROTO took its place",
    "NCCL_TREE_THRESHOLD": "removed in 2.5; NCCL_ALGO took its place",
}
RENAMED = {  # old name: (new name, what torchrun does about it)
    "NCCL_ASYNC_ERROR_HANDLING": (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ", and torchrun sets the new one to 1 for its ranks, so that the old one is not even read",
    ),
    "NCCL_BLOCKING_WAIT": ("TORCH_NCCL_BLOCKING_WAIT", ""),
    "NCCL_DESYNC_DEBUG": ("TORCH_NCCL_DESYNC_DEBUG", ""),
    "NCCL_ENABLE_TIMING": ("TORCH_NCCL_ENABLE_TIMING", ""),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": ("TORCH_FR_BUFFER_SIZE", ""),
    "TORCH_NCCL_TRACE_CPP_STACK": ("TORCH_FR_CPP_STACK", ""),
}


def _interface_rules(name: str) -> list[Rule]:
    return [
        Rule(
            when={name: ENDS_HERE},
            means="this interface ends at its own machine, so that the ranks of one node are never "
            "found by those of the others",
            cure="name the one that leads to the other nodes (`ip -br addr`), or unset it",
            source="NCCL: NCCL_SOCKET_IFNAME",
            nodes=2,
            is_wrong=True,
        ),
        Rule(
            when={name: ANY},
            means="there is no interface {found}",
            cure=f"set it to one of these, or unset {name}",
            source="NCCL: NCCL_SOCKET_IFNAME; gloo compares whole names",
            test=_no_such_interface(name),
            is_wrong=True,
        ),
    ]


def _renamed_rules() -> list[Rule]:
    rules = []
    for old, (new, besides) in RENAMED.items():
        means = f"the name is now {new}; PyTorch reads the old one with a warning{besides}"
        cure = f"export {new} in its place"
        rules.append(Rule({old: ANY}, means, cure, "PyTorch: getCvarInt", unless={new: ANY}))
        means = f"of an old and a new name the new one counts: {{{new}}}"
        both = {old: ANY, new: ANY}
        rules.append(Rule(both, means, f"unset {old}", "PyTorch: getCvarInt"))
    return rules


def _gone_rules() -> list[Rule]:
    rules = []
    for name, what in GONE.items():
        rules.append(Rule({name: ANY}, f"NCCL reads it no longer: {what}", f"unset {name}", "NCCL"))
    return rules


RULES: tuple[Rule, ...] = (
    # which network
    *_interface_rules("NCCL_SOCKET_IFNAME"),
    *_interface_rules("GLOO_SOCKET_IFNAME"),
    *_interface_rules("TP_SOCKET_IFNAME"),
    Rule(
        when={"GLOO_SOCKET_IFNAME": r"[\^=].*"},
        means="^ and = are understood by NCCL only; gloo takes a whole name, and there is none "
        "that begins so",
        cure="give whole names, separated by commas",
        source="PyTorch: ProcessGroupGloo, GLOO_SOCKET_IFNAME",
        unless={"GLOO_SOCKET_IFNAME": "="},
        test=_may_have_interface,
        is_wrong=True,
    ),
    Rule(
        when={"NCCL_SOCKET_IFNAME": r"[\^=]*[^\^=].*[\^=].*"},
        means="^ and = are read at the beginning alone, where they hold for the whole list: no "
        "interface begins so",
        cure="write ^docker,lo for all but these, =eth0,eth1 for exactly these",
        source="NCCL: NCCL_SOCKET_IFNAME; src/misc/socket.cc",
        is_wrong=True,
    ),
    Rule(
        when={"NCCL_SOCKET_IFNAME": ANY, "GLOO_SOCKET_IFNAME": ANY},
        means="gloo and NCCL go different ways, which is right only if both lead to the other "
        "nodes: gloo carries CPU tensors, barriers of checkpoints and objects",
        cure="give both the same interface, or make sure that each reaches the other nodes",
        source="PyTorch: ProcessGroupGloo; NCCL: NCCL_SOCKET_IFNAME",
        nodes=2,
        test=_other_interface,
    ),
    Rule(
        when={"MASTER_ADDR": r"localhost|127\..*|::1|0\.0\.0\.0"},
        means="each node takes itself for the meeting place, so that no node meets another",
        cure='MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        source="PyTorch: init_process_group, env:// initialization",
        nodes=2,
        is_wrong=True,
    ),
    Rule(
        when={"NCCL_NET": "ib", "NCCL_IB_DISABLE": ON},
        means="InfiniBand is asked for and switched off: NCCL fails with 'Failed to initialize any "
        "NET plugin'",
        cure="unset NCCL_IB_DISABLE, or NCCL_NET",
        source="NCCL: src/plugin/net.cc, src/transport/net_ib/init.cc",
        is_wrong=True,
    ),
    Rule(
        when={"NCCL_NET": "socket", "NCCL_IB_HCA": ANY},
        means=f"NCCL_NET=Socket takes no InfiniBand card, {NO_IB}, and nodes talk over TCP",
        cure="unset NCCL_NET to use these cards, else unset NCCL_IB_HCA",
        source="NCCL: NCCL_NET",
    ),
    Rule(
        when={"NCCL_IB_DISABLE": ON, "NCCL_IB_HCA": ANY},
        means=f"InfiniBand is switched off, {NO_IB}: NCCL_IB_HCA",
        cure="unset NCCL_IB_DISABLE to use these cards, else unset NCCL_IB_HCA",
        source="NCCL: src/transport/net_ib/init.cc",
        unless={"NCCL_NET": "ib|socket"},
    ),
    Rule(
        when={"NCCL_IB_DISABLE": ON},
        means="nodes talk over TCP, several times slower, although there is {found}",
        cure="unset NCCL_IB_DISABLE",
        source="NCCL: NCCL_IB_DISABLE",
        unless={**LIBFABRIC, "NCCL_NET": ANY},
        test=_has_infiniband,
    ),
    Rule(
        when={"NCCL_IB_DISABLE": ON},
        means="nodes talk over TCP and not over InfiniBand, slowly; without InfiniBand NCCL takes "
        "TCP by itself",
        cure="unset NCCL_IB_DISABLE",
        source="NCCL: NCCL_IB_DISABLE",
        unless={**LIBFABRIC, "NCCL_NET": ANY, "NCCL_IB_HCA": ANY},
        test=_may_have_infiniband,
    ),
    Rule(
        when={"NCCL_NET": "socket"},
        means="nodes talk over TCP, several times slower, although there is {found}",
        cure="unset NCCL_NET",
        source="NCCL: NCCL_NET",
        unless={"NCCL_IB_HCA": ANY},
        test=_has_infiniband,
    ),
    Rule(
        when={"NCCL_IB_TIMEOUT": "[0-9]{1,9}"},
        means="it is no number of seconds but an exponent of at most 31: the time-out is 4.096 us "
        "* 2^value, and 20 is the default",
        cure="set it to 22 for about 17 s a try, or unset it",
        source="NCCL: NCCL_IB_TIMEOUT",
        test=_exponent_too_large,
        is_wrong=True,
    ),
    # which way inside a node
    Rule(
        when={"NCCL_P2P_DISABLE": "0*1", "NCCL_SHM_DISABLE": "0*1"},
        means="neither NVLink nor shared memory is left: the GPUs of one node talk through its "
        "network card, or through sockets",
        cure="unset both, or at least one of them",
        source="NCCL: NCCL_P2P_DISABLE, NCCL_SHM_DISABLE; src/transport/shm.cc",
    ),
    Rule(
        when={"NCCL_P2P_DISABLE": "0*1", "NCCL_P2P_LEVEL": ANY},
        means="where the first is 1 the second is not read: GPUs of a node talk through host "
        "memory, slowly",
        cure="unset NCCL_P2P_DISABLE; NCCL_P2P_LEVEL=LOC says the same",
        source="NCCL: src/graph/paths.cc, ncclGetLevel",
        unless={"NCCL_SHM_DISABLE": "0*1"},
    ),
    Rule(
        when={"NCCL_P2P_DISABLE": "0*1"},
        means="GPUs of a node talk through host memory, slowly",
        cure="unset NCCL_P2P_DISABLE",
        source="NCCL: NCCL_P2P_DISABLE",
        unless={"NCCL_SHM_DISABLE": "0*1", "NCCL_P2P_LEVEL": ANY},
    ),
    Rule(
        when={"NCCL_SHM_DISABLE": "0*1"},
        means="GPUs of a node that have no NVLink between them talk through the network, slowly",
        cure="unset NCCL_SHM_DISABLE; where /dev/shm is too small, make it larger",
        source="NCCL: NCCL_SHM_DISABLE",
        unless={"NCCL_P2P_DISABLE": "0*1"},
    ),
    # how NCCL computes
    Rule(
        when={"NCCL_ALGO": ANY},
        means=f"NCCL knows no such algorithm, only {ALGORITHMS.replace('|', ', ')}; names that it "
        "does not know are left out, and then none is left",
        cure="unset NCCL_ALGO",
        source="NCCL: src/graph/tuning.cc, parseList",
        test=_no_algorithm,
        is_wrong=True,
    ),
    Rule(
        when={"NCCL_ALGO": ANY},
        means="only Ring can broadcast, and it is left out: NCCL 2.26 ends DDP at its start, with "
        "'no algorithm/protocol available for function Broadcast'; 2.21 took Ring all the same",
        cure="unset NCCL_ALGO, or say for which collective: NCCL_ALGO=allreduce:{NCCL_ALGO}",
        source="github.com/pytorch/pytorch/pull/163063, github.com/NVIDIA/nccl/issues/1304",
        test=_no_ring,
    ),
    Rule(
        when={"NCCL_ALGO": ANY},
        means="NCCL no longer chooses the algorithm by the size of each message; one that is good "
        "for large messages is slow for small ones, and a collective that has no such algorithm "
        "may fail",
        cure="unset NCCL_ALGO, unless the order of sums has to be the same in each run",
        source="NCCL: NCCL_ALGO; src/graph/tuning.cc",
        test=_ring_is_left,
    ),
    Rule(
        when={"NCCL_PROTO": r"(?!\^).*ll128.*"},
        means="LL128 on a machine that does not support it can lead to wrong data",
        cure="unset NCCL_PROTO: NCCL takes LL128 by itself where it is safe",
        source="NCCL: NCCL_PROTO",
    ),
    Rule(
        when={"NCCL_PROTO": ANY},
        means="NCCL no longer chooses the protocol by the size of each message; its documentation "
        "advises against setting this",
        cure="unset NCCL_PROTO",
        source="NCCL: NCCL_PROTO",
        unless={"NCCL_PROTO": r"(?!\^).*ll128.*"},
    ),
    *_gone_rules(),
    # what is printed
    Rule(
        when={"NCCL_DEBUG": rf"(?!(?:{LEVELS})$).+"},
        means=f"NCCL knows only {LEVELS.replace('|', ', ').upper()}: nothing is printed",
        cure="export NCCL_DEBUG=INFO",
        source="NCCL: src/debug.cc, ncclParamDebugLevel",
    ),
    Rule(
        when={"NCCL_DEBUG_SUBSYS": ANY},
        means="it chooses among the lines of NCCL_DEBUG=INFO, which is not set: it does nothing",
        cure="export NCCL_DEBUG=INFO as well, or unset it",
        source="NCCL: NCCL_DEBUG_SUBSYS",
        unless={"NCCL_DEBUG": "info|trace"},
    ),
    Rule(
        when={"NCCL_DEBUG_FILE": ANY},
        means="nothing is written to that file without NCCL_DEBUG=WARN or INFO",
        cure="export NCCL_DEBUG=INFO as well, or unset it",
        source="NCCL: src/debug.cc, ncclDebugInit",
        unless={"NCCL_DEBUG": "warn|info|trace|abort"},
    ),
    Rule(
        when={"NCCL_DEBUG_FILE": "(?!/dev/)(?!.*%p).+", "NCCL_DEBUG": "warn|info|trace|abort"},
        means="all processes of a node write over the same file",
        cure="NCCL_DEBUG_FILE=nccl.%h.%p: %h is the host, %p the process",
        source="NCCL: NCCL_DEBUG_FILE",
    ),
    Rule(
        when={"NCCL_DEBUG": "info|trace"},
        means="every rank prints hundreds of lines",
        cure="unset NCCL_DEBUG",
        source="NCCL: NCCL_DEBUG",
        in_shell=True,
    ),
    # time-outs and errors
    Rule(
        when={"NCCL_TIMEOUT": ANY},
        means="neither NCCL nor PyTorch reads it: a collective waits 10 minutes, or what "
        "init_process_group was given",
        cure="init_process_group(timeout=timedelta(seconds=...))",
        source="PyTorch: ProcessGroupNCCL.hpp, kProcessGroupNCCLDefaultTimeout",
    ),
    Rule(
        when={"TORCH_NCCL_BLOCKING_WAIT": ON, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "[1-9]"},
        means="with the first there is no watchdog, so that the second does nothing: a time-out is "
        "raised by wait() in the main thread, which waits for each collective",
        cure="unset TORCH_NCCL_BLOCKING_WAIT: the watchdog ends a job that hangs",
        source="PyTorch: ProcessGroupNCCL.cpp, 'NO watchdog thread is created'",
    ),
    Rule(
        when={"TORCH_NCCL_BLOCKING_WAIT": ON},
        means="the main thread waits for each collective, so that nothing overlaps with it, and no "
        "watchdog is there",
        cure="unset TORCH_NCCL_BLOCKING_WAIT",
        source="PyTorch: ProcessGroupNCCL.cpp, 'NO watchdog thread is created'",
        unless={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "[1-9]"},
    ),
    Rule(
        when={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        means="nobody ends a rank whose collective has failed or timed out: the job hangs until "
        "its time limit",
        cure="unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
        source="PyTorch: ProcessGroupNCCL.hpp, ErrorHandlingMode",
        unless={"TORCH_NCCL_BLOCKING_WAIT": ON},
    ),
    *_renamed_rules(),
    Rule(
        when={"TORCH_NCCL_AVOID_RECORD_STREAMS": ON},
        means="that is what PyTorch does anyway, and it warns about the variable",
        cure="unset TORCH_NCCL_AVOID_RECORD_STREAMS",
        source="PyTorch: ProcessGroupNCCL.cpp",
    ),
    Rule(
        when={"TORCH_FR_BUFFER_SIZE": "0"},
        means="the flight recorder is off, and hangs stay unexplained",
        cure="unset TORCH_FR_BUFFER_SIZE",
        source="PyTorch: FlightRecorder.hpp",
    ),
    Rule(
        when={"TORCH_DISTRIBUTED_DEBUG": "info|detail"},
        means="each collective is checked, slowly",
        cure="unset TORCH_DISTRIBUTED_DEBUG",
        source="PyTorch: documentation of torch.distributed, debugging",
    ),
    Rule(
        when={"TORCH_SHOW_CPP_STACKTRACES": ON},
        means="errors are pages long",
        cure="unset TORCH_SHOW_CPP_STACKTRACES",
        source="PyTorch",
        in_shell=True,
    ),
    # GPUs and cores
    Rule(
        when={"CUDA_LAUNCH_BLOCKING": ON},
        means="the CPU waits for each kernel",
        cure="unset CUDA_LAUNCH_BLOCKING: it is there to find the line of an error, once",
        source="CUDA",
    ),
    Rule(
        when={"CUDA_VISIBLE_DEVICES": "-1|NoDevFiles"},
        means="no GPU is seen",
        cure="unset CUDA_VISIBLE_DEVICES, or ask SLURM for GPUs",
        source="CUDA",
    ),
    Rule(
        when={"SLURM_GPUS_PER_TASK": "(.*:)?1", "CUDA_VISIBLE_DEVICES": ".*,.*"},
        means="SLURM gives each task of a step one GPU and sets this list anew: each task sees its "
        "GPU as number 0, and cuda:1 is an invalid device ordinal",
        cure="use device 0 in each task, or --gpus-per-node in place of --gpus-per-task",
        source="SLURM: --gpus-per-task, --gpu-bind",
    ),
    *_masked_rules(),
    Rule(
        when={"OMP_NUM_THREADS": ANY},
        means="that is no number of threads",
        cure="set it to 1 or more, or unset it",
        source="OpenMP 5.2, OMP_NUM_THREADS",
        test=_has_no_thread_count,
        is_wrong=True,
    ),
    Rule(
        when={"OMP_NUM_THREADS": ANY},
        means="each rank starts so many threads on {found} cores",
        cure="unset it: ranks share the cores by themselves",
        source="OpenMP 5.2, OMP_NUM_THREADS",
        unless={"SLURM_CPUS_PER_TASK": "[0-9]+"},
        test=_more_than_cores,
    ),
    Rule(
        when={"OMP_NUM_THREADS": ANY, "SLURM_CPUS_PER_TASK": "[1-9][0-9]{0,8}"},
        means="a task has fewer cores than threads, and they take turns",
        cure="export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK",
        source="SLURM: --cpus-per-task",
        test=_more_than_cores_of_task,
    ),
    # what SLURM and launchers leave
    Rule(
        when={"SLURM_MEM_PER_CPU": ANY, "SLURM_MEM_PER_NODE": ANY},
        means="srun ends at once: they are mutually exclusive",
        cure="unset the one that came from another job",
        source="SLURM: srun, --mem",
        is_wrong=True,
    ),
    Rule(
        when={"SLURM_EXPORT_ENV": "none|nil"},
        means="srun hands none of your variables to the tasks: no MASTER_ADDR, no PATH of a module",
        cure="unset SLURM_EXPORT_ENV, or srun --export=ALL",
        source="SLURM: srun, --export",
    ),
    Rule(
        when={"SLURM_JOB_ID": ANY, "SLURMD_NODENAME": ANY},
        means="these come from a job on another machine: srun and sbatch here would take its "
        "cores, memory and binding for theirs",
        cure="unset ${{!SLURM_@}}, or open a new shell",
        source="SLURM: srun, input environment variables",
        test=_of_another_machine,
        in_shell=True,
    ),
    Rule(
        when={},
        means="a program would wait for other ranks, which nobody starts",
        cure="unset {found}",
        source="PyTorch: init_process_group, env:// initialization",
        test=_launcher_left,
        is_wrong=True,
        in_shell=True,
    ),
    # Python and the network of the notebook
    Rule(
        when={"PYTHONOPTIMIZE": ANY},
        means="asserts are gone, so that every check of an exercise passes",
        cure="unset PYTHONOPTIMIZE",
        source="Python: -O",
        in_shell=True,
    ),
    Rule(
        when={"PYTHONINSPECT": ANY},
        means="ranks wait at a prompt when they have ended",
        cure="unset PYTHONINSPECT",
        source="Python: -i",
        in_shell=True,
    ),
    Rule(
        when={},
        means="NO_PROXY lacks localhost or 127.0.0.1: what asks JupyterLab or TensorBoard of this "
        "machine asks the proxy",
        cure="export NO_PROXY=localhost,127.0.0.1",
        source="curl(1), ENVIRONMENT",
        test=_proxy,
        in_shell=True,
    ),
)
