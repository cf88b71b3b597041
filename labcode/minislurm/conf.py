"""The text of slurm.conf and of the other files in /etc that make a `Spec` come true."""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from labcode.minislurm.spec import Spec

# One line each; the reason where it would surprise.
SETTINGS = {
    "AuthType": "auth/munge",
    "ProctrackType": "proctrack/linuxproc",  # works without cgroups, which a user may not write
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/linux",
    "JobAcctGatherFrequency": "task=1",  # seconds between two looks at a step's memory
    "JobAcctGatherParams": "OverMemoryKill",  # --mem is a real limit: a step above it is killed
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core_Memory",  # with CR_Core alone, --mem would limit nothing
    "SlurmdParameters": "config_overrides",  # more CPUs and memory than the hardware has
    "SchedulerParameters": "batch_sched_delay=0,bf_interval=2,sched_interval=5",
    "ReturnToService": 2,  # a node that was powered off is usable as soon as it is back
    "EnforcePartLimits": "ALL",  # refuses an impossible job at submit: it would pend forever
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
# Options of a partition for which SLURM itself would need slurmdbd; job_submit.lua checks them.
_BY_LUA = {"AllowAccounts": "account", "AllowQos": "qos"}
# From this version on slurmd registers a node without cgroups only if it is told so.
_CGROUPS_ARE_ASKED_FOR = (23, 11)

_SUBMIT_LUA = """\
-- Which accounts and QOS exist here, and which of them a partition takes.
-- Without slurmdbd SLURM itself checks neither.
local default_partition = "{default}"
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
      for name in string.gmatch(job.partition or default_partition, "[^,]+") do
         local names = allowed[name] and allowed[name][what]
         if names and not names[asked] then
            local found = asked == "" and "none" or asked
            return refuse(what, "Invalid %s: partition %s does not take %s", what, name, found)
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


def slurm_conf(spec: Spec, folder: Path, user: str) -> str:
    """The text of slurm.conf, for state in `folder` and daemons that run as `user`."""
    settings = {
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
        **SETTINGS,
        # Memory of a job that does not say --mem: half a node, so that two of them share one.
        "DefMemPerNode": max(1, spec.memory_mb // 2),
    }
    if _needs_lua(spec):
        settings["JobSubmitPlugins"] = "lua"
    settings.update(spec.settings)
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(_node_line(spec))
    lines += _partition_lines(spec)
    return "\n".join(lines) + "\n"


def _needs_lua(spec: Spec) -> bool:
    """Whether the spec limits who may submit what."""
    if spec.accounts is not None or spec.qos is not None:
        return True
    return any(_BY_LUA.keys() & options.keys() for options in spec.partitions.values())


def _node_line(spec: Spec) -> str:
    names = "n1" if spec.nodes == 1 else f"n[1-{spec.nodes}]"
    options = {
        "NodeName": names,
        "CPUs": spec.cpus,
        "Sockets": 1,
        "CoresPerSocket": spec.cpus,
        "ThreadsPerCore": 1,
        "RealMemory": spec.memory_mb,
        "State": "UNKNOWN",
    }
    if spec.gpus:
        gpu = f"gpu:{spec.gpu_type}" if spec.gpu_type else "gpu"
        options["Gres"] = f"{gpu}:{spec.gpus}"
    if spec.features:
        options["Features"] = ",".join(spec.features)
    return _line(options)


def _partition_lines(spec: Spec) -> list[str]:
    lines = []
    default = "YES"
    for name, given in spec.partitions.items():
        options = {
            "PartitionName": name,
            "Nodes": "ALL",
            "Default": default,
            "DefaultTime": 10,
            "MaxTime": "INFINITE",
            "State": "UP",
        }
        options |= {key: value for key, value in given.items() if key not in _BY_LUA}
        lines.append(_line(options))
        default = "NO"
    return lines


def _line(options: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in options.items())


def gres_conf(spec: Spec, folder: Path) -> str:
    """The text of gres.conf: one file for each fake GPU."""
    if not spec.gpus:
        return "AutoDetect=off\n"
    kind = f" Type={spec.gpu_type}" if spec.gpu_type else ""
    numbers = "0" if spec.gpus == 1 else f"[0-{spec.gpus - 1}]"
    return f"AutoDetect=off\nName=gpu{kind} File={folder}/gpu/gpu{numbers}\n"


def submit_lua(spec: Spec) -> str:
    """The text of job_submit.lua, which refuses unknown accounts and qualities of service."""
    allowed = ""
    for name, options in spec.partitions.items():
        limits = {}
        for key, what in _BY_LUA.items():
            if key in options:
                limits[what] = str(options[key]).split(",")
        if limits:
            allowed += f"   [{json.dumps(name)}] = {_lua_sets(limits)},\n"
    known = _lua_sets({"account": spec.accounts, "qos": spec.qos})
    return _SUBMIT_LUA.format(default=_default_partition(spec), allowed=allowed, known=known)


def _default_partition(spec: Spec) -> str:
    for name, options in spec.partitions.items():
        if str(options.get("Default")) == "YES":
            return name
    return next(iter(spec.partitions))


def _lua_sets(names: Mapping[str, Collection[str] | None]) -> str:
    """`{"qos": ["a"]}` as a Lua table of sets; None is left out."""
    sets = []
    for what, some in names.items():
        if some is not None:
            members = ", ".join(f"[{json.dumps(name)}] = true" for name in some)
            sets.append(f"{what} = {{ {members} }}")
    return "{ " + ", ".join(sets) + " }"


def cgroup_conf(spec: Spec, version: str) -> str:
    """The text of cgroup.conf.

    Args:
        spec: Spec of the cluster.
        version: What `slurmctld -V` says.
    """
    if spec.cgroup:
        return "".join(f"{name}={value}\n" for name, value in spec.cgroup.items())
    found = re.search(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) >= _CGROUPS_ARE_ASKED_FOR:
        return "CgroupPlugin=disabled\n"
    return ""


def hosts(spec: Spec) -> str:
    """The text of /etc/hosts: every host with the address at which the others reach it."""
    lines = ["127.0.0.1 localhost"]
    for name, address in spec.addresses().items():
        lines.append(f"{address} {name}")
    return "\n".join(lines) + "\n"
