"""What an emulated site looks like, and the text of slurm.conf, gres.conf and job_submit.lua for it."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

NETWORK = "10.77.0"
MAX_NODES = 64
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")

# One line each; the reason where it would surprise.
SETTINGS = {
    "AuthType": "auth/munge",
    "ProctrackType": "proctrack/linuxproc",  # nothing here needs cgroups, which a user may not write
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "task=1",  # seconds between two looks at a step's memory
    "JobAcctGatherParams": "OverMemoryKill",  # --mem is a real limit: a step above it is killed
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",  # with CR_Core alone, --mem would limit nothing
    "SlurmdParameters": "config_overrides",  # more CPUs and memory than the hardware has
    "SchedulerParameters": "batch_sched_delay=0,bf_interval=2,sched_interval=5",
    "ReturnToService": 2,  # a node that was powered off is usable as soon as it is back
    "EnforcePartLimits": "ALL",  # an impossible job is refused at submit, instead of pending for ever
    "SlurmdTimeout": 10,  # seconds of silence until a node is DOWN
    "KillWait": 5,
    "MinJobAge": 3600,  # how long `scontrol show job` knows a job that has ended
    "JobRequeue": 1,
    "MailProg": "/bin/true",
    "AccountingStorageType": "accounting_storage/none",
    "JobCompType": "jobcomp/filetxt",
    "GresTypes": "gpu",
    "MpiDefault": "none",
}

_SUBMIT_LUA = """\
-- Which accounts and qualities of service exist here, and which a partition takes: without slurmdbd SLURM checks neither.
local usual = "{default}"
local known = {known}
local allowed = {{
{allowed}}}

local function refuse(what, text, ...)
   slurm.log_user(text, ...)
   return what == "qos" and slurm.ESLURM_INVALID_QOS or slurm.ESLURM_INVALID_ACCOUNT
end

function slurm_job_submit(job, partitions, uid)
   for _, what in ipairs({{ "account", "qos" }}) do
      local asked = job[what] or ""
      if known[what] and asked ~= "" and not known[what][asked] then
         return refuse(what, "Invalid %s: %s", what, asked)
      end
      for name in string.gmatch(job.partition or usual, "[^,]+") do
         local names = allowed[name] and allowed[name][what]
         if names and not names[asked] then
            return refuse(what, "Invalid %s: partition %s does not take %s", what, name, asked == "" and "none" or asked)
         end
      end
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
"""
_BY_LUA = {
    "AllowAccounts": "account",
    "AllowQos": "qos",
}  # options of a partition that SLURM itself would need slurmdbd for


@dataclass(frozen=True)
class Spec:
    """A cluster to emulate; every node is alike.

    Args:
        nodes: Number of nodes, n1, n2, ...
        cpus: CPUs of a node, as SLURM counts them; may exceed the machine's.
        memory_mb: Memory of a node in MiB, as SLURM counts it.
        gpus: Pretend GPUs of a node.
        gpu_type: What `--gres=gpu:TYPE:N` asks for.
        partitions: Options of each partition as in slurm.conf, the first is the default one; of those that limit who may
            submit, AllowAccounts and AllowQos are enforced.
        features: What `--constraint` may ask for.
        accounts: Accounts that `--account` may name; None leaves it unchecked.
        qos: What `--qos` may name; None leaves it unchecked.
        settings: Further lines of slurm.conf, such as {"Licenses": "scratch:10"}.

    Raises:
        ValueError: A count or a name is impossible.
    """

    nodes: int = 2
    cpus: int = 4
    memory_mb: int = 16_000
    gpus: int = 2
    gpu_type: str | None = None
    partitions: Mapping[str, Mapping] = field(default_factory=lambda: {"debug": {}})
    features: tuple[str, ...] = ()
    accounts: tuple[str, ...] | None = None
    qos: tuple[str, ...] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        for name, low, high in (
            ("nodes", 1, MAX_NODES),
            ("cpus", 1, 4096),
            ("memory_mb", 1, 10**8),
            ("gpus", 0, 64),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: give a whole number from {low} to {high}")
        words = [
            self.gpu_type or "none",
            *self.partitions,
            *self.features,
            *(self.accounts or ()),
            *(self.qos or ()),
        ]
        for word in words:
            if not _WORD.fullmatch(str(word)):
                raise ValueError(f"{word!r} is no name for SLURM: use letters, digits and _ . + -")
        if not self.partitions:
            raise ValueError(
                "partitions is empty: a cluster needs one at least, such as {'debug': {}}"
            )
        lines = [self.settings, *self.partitions.values()]
        for name, value in ((name, value) for line in lines for name, value in line.items()):
            if not _WORD.fullmatch(str(name)) or "\n" in str(value):
                raise ValueError(
                    f"{name!r}={value!r} is no setting of slurm.conf: one name, one line"
                )

    @classmethod
    def of(cls, **given) -> "Spec":
        """A spec from what was given; None means the default, a list is as good as a tuple."""
        given = {
            name: tuple(v) if isinstance(v, list) else v
            for name, v in given.items()
            if v is not None
        }
        return cls(**given)

    @classmethod
    def read(cls, path: Path) -> "Spec":
        """The spec that `write` left in a file."""
        return cls.of(**json.loads(path.read_text()))

    def text(self) -> str:
        """As JSON, the same for equal specs."""
        return json.dumps(asdict(self), indent=1, sort_keys=False)

    def names(self) -> list[str]:
        """The nodes' hostnames."""
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    def addresses(self) -> dict[str, str]:
        """IP address of each host, the head first."""
        return {
            "head": f"{NETWORK}.1",
            **{f"n{i}": f"{NETWORK}.{10 + i}" for i in range(1, self.nodes + 1)},
        }


def slurm_conf(spec: Spec, folder: Path, user: str) -> str:
    """The text of slurm.conf for a cluster whose state lies in `folder` and whose daemons run as `user`."""
    paths = {
        "ClusterName": "labcode",
        "SlurmctldHost": f"head({spec.addresses()['head']})",
        "SlurmUser": user,
        "SlurmdUser": user,
        "AuthInfo": f"socket={folder}/munge/socket,cred_expire=10",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "SlurmctldPidFile": f"{folder}/head/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/%n/slurmd.pid",
        "SlurmctldLogFile": f"{folder}/head/slurmctld.log",
        "SlurmdLogFile": f"{folder}/%n/slurmd.log",
        "JobCompLoc": f"{folder}/head/jobs.log",
    }
    limited = any(key in options for options in spec.partitions.values() for key in _BY_LUA)
    plugin = (
        {"JobSubmitPlugins": "lua"}
        if limited or spec.accounts is not None or spec.qos is not None
        else {}
    )
    memory = {
        "DefMemPerNode": max(1, spec.memory_mb // 2)
    }  # for a job without --mem; two of them share a node
    settings = {**paths, **SETTINGS, **plugin, **memory, **spec.settings}
    names = "n1" if spec.nodes == 1 else f"n[1-{spec.nodes}]"
    node = {"CPUs": spec.cpus, "Sockets": 1, "CoresPerSocket": spec.cpus, "ThreadsPerCore": 1}
    node |= {"RealMemory": spec.memory_mb, "State": "UNKNOWN"}
    if spec.gpus:
        node["Gres"] = ":".join(
            ["gpu", *([spec.gpu_type] if spec.gpu_type else []), str(spec.gpus)]
        )
    if spec.features:
        node["Features"] = ",".join(spec.features)
    lines = [f"{name}={value}" for name, value in settings.items()] + [
        _line({"NodeName": names, **node})
    ]
    for i, (name, options) in enumerate(spec.partitions.items()):
        usual = {
            "Nodes": "ALL",
            "Default": "NO" if i else "YES",
            "DefaultTime": 10,
            "MaxTime": "INFINITE",
            "State": "UP",
        }
        options = {key: value for key, value in options.items() if key not in _BY_LUA}
        lines.append(_line({"PartitionName": name, **usual, **options}))
    return "\n".join(lines) + "\n"


def _line(options) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def gres_conf(spec: Spec, folder: Path) -> str:
    """The text of gres.conf: one file for each emulated GPU."""
    if not spec.gpus:
        return "AutoDetect=off\n"
    kind = f" Type={spec.gpu_type}" if spec.gpu_type else ""
    files = f"{folder}/gpu/gpu[0-{spec.gpus - 1}]" if spec.gpus > 1 else f"{folder}/gpu/gpu0"
    return f"AutoDetect=off\nName=gpu{kind} File={files}\n"


def submit_lua(spec: Spec) -> str:
    """The text of job_submit.lua, which refuses unknown accounts and qualities of service."""
    default = next(
        (n for n, o in spec.partitions.items() if str(o.get("Default")) == "YES"),
        next(iter(spec.partitions)),
    )
    allowed = ""
    for name, options in spec.partitions.items():
        limits = {
            what: str(options[key]).split(",") for key, what in _BY_LUA.items() if key in options
        }
        allowed += f"   [{json.dumps(name)}] = {_table(limits)},\n" if limits else ""
    return _SUBMIT_LUA.format(
        default=default, allowed=allowed, known=_table({"account": spec.accounts, "qos": spec.qos})
    )


def _table(names) -> str:
    """`{"qos": ["a"]}` as a Lua table of sets; None is left out."""
    sets = {
        what: ", ".join(f"[{json.dumps(name)}] = true" for name in some)
        for what, some in names.items()
        if some is not None
    }
    return "{ " + ", ".join(f"{what} = {{ {inside} }}" for what, inside in sets.items()) + " }"


def cgroup_conf(version: str) -> str:
    """The text of cgroup.conf for what `slurmctld -V` says; SLURM from 23.11 on takes no node without cgroups otherwise."""
    found = re.search(r"(\d+)\.(\d+)", version)
    new = found and (int(found[1]), int(found[2])) >= (23, 11)
    return "CgroupPlugin=disabled\n" if new else ""


def hosts(spec: Spec) -> str:
    """The text of /etc/hosts: every host with the address that the others reach it at."""
    return "127.0.0.1 localhost\n" + "".join(
        f"{address} {name}\n" for name, address in spec.addresses().items()
    )
