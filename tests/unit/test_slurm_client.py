"""What SLURM's commands print, read; and why a job ended, from its state and its log."""

import sys

import pytest

from labcode.slurm.run import client as slurm
from labcode.slurm.run.answers import parse_jobs, parse_nodes, parse_queue
from labcode.slurm.run.client import (
    Client,
    SlurmError,
    UnknownJob,
    Unreachable,
    outside_a_job,
)
from labcode.slurm.run.outcome import exit_text, explain, first_failure

RECORD = """JobId=17 JobName={name}
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294901758 Nice=0 Account=(null) QOS=(null)
   JobState={state} Reason={reason} Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:01:23 TimeLimit=00:10:00 TimeMin=N/A
   StartTime=2026-01-01T10:00:00 EndTime=2026-01-01T10:01:23 Deadline=N/A
   Partition=debug AllocNode:Sid=0.0.0.0:11
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=/work/my jobs/a=b.sbatch
   WorkDir=/work/my jobs
   StdErr=/work/my jobs/17.log
   StdIn=/dev/null
   StdOut=/work/my jobs/17.log
   Power=

"""


def record(name="gpt_tiny", state="RUNNING", reason="None", restarts=0, code="0:0"):
    return RECORD.format(name=name, state=state, reason=reason, restarts=restarts, code=code)


def test_a_record_of_scontrol_becomes_fields():
    (info,) = parse_jobs(record(restarts=2, code="3:0"))
    assert (info.id, info.name, info.state, info.reason, info.restarts) == (
        "17",
        "gpt_tiny",
        "RUNNING",
        "",
        2,
    )
    assert (info.exit_code, info.nodes, info.run_time, info.time_limit) == (
        (3, 0),
        "n[1-2]",
        "00:01:23",
        "00:10:00",
    )
    assert str(info.log) == "/work/my jobs/17.log" and not info.ended
    assert info.fields["Command"] == "/work/my jobs/a=b.sbatch" and info.fields["CPUs/Task"] == "1"


@pytest.mark.parametrize(
    "name", ["a JobState=COMPLETED Reason=x", "two words", "ñ 'quoted' $(id)", "a|b"]
)
def test_a_name_cannot_pass_itself_off_as_a_state(name):
    (info,) = parse_jobs(record(name))
    assert (info.name, info.state) == (name, "RUNNING")


def test_the_jobs_of_an_array_have_their_own_records():
    one = "JobId=18 ArrayJobId=17 ArrayTaskId=0 JobName=a\n   JobState=COMPLETED Reason=None\n\n"
    two = "JobId=17 ArrayJobId=17 ArrayTaskId=1 JobName=a\n   "
    two += "JobState=FAILED Reason=NonZeroExitCode\n\n"
    assert [(info.id, info.state, info.ended) for info in parse_jobs(one + two)] == [
        ("17_0", "COMPLETED", True),
        ("17_1", "FAILED", True),
    ]


def test_queue_and_nodes_are_read_even_with_our_separator_in_a_name():
    (job,) = parse_queue("17|ada|debug|PENDING|0:00|2|(Resources)|a|b\nslurm warning\n")
    assert (job.id, job.user, job.state, job.nodes, job.where, job.name) == (
        "17",
        "ada",
        "PENDING",
        2,
        "(Resources)",
        "a|b",
    )
    (group,) = parse_nodes("debug|idle|2|4+|4000|gpu:2|infinite|n[1-2]\n")
    assert (group.partition, group.count, group.cpus, group.nodes) == ("debug", 2, 4, "n[1-2]")


def speaking(text, code=1, seconds=0.0):
    """A client whose every command prints `text` and fails.

    A program stands where the prefix of a cluster would.
    """
    script = (
        f"import sys, time; time.sleep({seconds}); sys.stderr.write({text!r}); sys.exit({code})"
    )
    return Client((sys.executable, "-c", script), timeout_s=5.0)


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            "sbatch: error: invalid partition specified: x\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            SlurmError,
            "sbatch: Batch job submission failed: Invalid partition name specified",
        ),
        (
            "slurm_load_jobs error: Invalid job id specified\n",
            UnknownJob,
            "Invalid job id specified",
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            Unreachable,
            "Unable to contact",
        ),
        (
            "slurm_load_jobs error: Socket timed out on send/recv operation\n",
            Unreachable,
            "Socket timed out",
        ),
        ("", SlurmError, "exit code 1"),
    ],
)
def test_an_error_is_one_line_of_the_right_kind(said, kind, message):
    with pytest.raises(SlurmError, match=r"^sbatch: ") as error:
        speaking(said).call("sbatch", "x")
    assert (
        type(error.value) is kind and message in str(error.value) and "\n" not in str(error.value)
    )


def test_what_a_job_has_set_is_taken_out_and_what_names_the_cluster_stays():
    of_the_user = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_CLUSTERS": "big",
        "SBATCH_ACCOUNT": "proj",
        "SBATCH_CLUSTERS": "big",
        "SBATCHED": "no variable of SLURM",
        "MASTER_ADDR": "gpu01",
    }
    of_the_job = {
        "SLURM_JOB_ID": "17",
        "SLURM_MEM_PER_CPU": "500",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURMD_NODENAME": "n1",
        "SBATCH_MEM_BIND": "local",
        "SRUN_DEBUG": "3",
        "SALLOC_PARTITION": "debug",
        "PMI_RANK": "0",
        "PMI2_FD": "3",
        "PMIX_RANK": "0",
    }
    assert outside_a_job({**of_the_user, **of_the_job}) == of_the_user


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("#SBATCH --account=mine", None),
        ("#SBATCH -A mine", None),
        ("#SBATCH -Amine", None),
        ("#SBATCH --nodes=2 --account mine", None),
        ("#SBATCH --array=0-3", "theirs"),
        ("#SBATCH --comment=PROJ-A", "theirs"),
        ("# SBATCH --account=mine", "theirs"),
        ("#SBATCH --partition=gpu", "theirs"),
    ],
)
def test_an_account_that_the_script_names_is_not_overruled_by_a_variable(
    line, left, tmp_path, monkeypatch
):
    # of sbatch a variable counts more than a line of the script
    monkeypatch.setenv("SBATCH_ACCOUNT", "theirs")
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n{line}\nhostname\n")
    code = "import os, sys; print(os.environ.get('SBATCH_ACCOUNT', ''), file=sys.stderr); exit(1)"
    client = Client((sys.executable, "-c", code))
    with pytest.raises(SlurmError) as error:
        client.submit(script)
    assert ("theirs" in str(error.value)) == (left is not None)


def test_a_command_that_does_not_answer_is_given_up():
    # a client that waited for the answer would not come back before the test's own limit
    client = Client((sys.executable, "-c", "import time; time.sleep(6000)"), timeout_s=0.3)
    with pytest.raises(Unreachable, match=r"squeue did not answer within 0.3 s"):
        client.queue()


def test_a_machine_without_slurm_is_told_apart(monkeypatch):
    with pytest.raises(SlurmError, match="not on this machine"):
        Client(("/nowhere/sbatch",)).call("sbatch")
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert Client.own() is None and Client.find("generic", cluster_name="no-such-cluster") is None


TORCHRUN = """[n2:0]: worker groups
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
labcode.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_10:00:01
  host      : n1
  rank      : {peer} (local_rank: 0)
  exitcode  : {peer_code} (pid: 70)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : n2
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 71)
  error_file: <N/A>
============================================================
srun: error: n2: task 1: Exited with exit code 1
"""
LOGS = {
    "srun names the task": (
        "srun: error: n2: task 3: Exited with exit code 7\nsrun: error: n2: task 2: Terminated\n",
        3,
        "exited with exit code 7 on n2",
    ),
    "a killed task before those that lose their peer": (
        "srun: error: n1: tasks 0-1: Exited with exit code 1\nsrun: error: n2: task 2: Killed\n",
        2,
        "killed on n2",
    ),
    "a shell's word for a killed task": (
        "srun: error: n2: task 1: Exited with exit code 1\n"
        "srun: error: n1: task 0: Exited with exit code 137\n",
        0,
        "killed by SIGKILL: by hand, or by the kernel's out-of-memory killer on n1",
    ),
    "torchrun names the rank that was killed": (
        TORCHRUN.format(rank=0, code=1, peer=3, peer_code=-9),
        3,
        "killed by SIGKILL: by hand, or by the kernel's out-of-memory killer",
    ),
    "torchrun's root cause with Python's last line": (
        "[rank3]: Traceback (most recent call last):\n[rank3]: ValueError: no such thing\n"
        "[rank1]: torch.distributed.DistBackendError: Connection closed by peer\n"
        + TORCHRUN.format(rank=3, code=1, peer=1, peer_code=-15),
        3,
        "ValueError: no such thing",
    ),
    "our own line speaks of the rank": (
        "error: rank 2: FileNotFoundError: corpus.txt\n"
        + TORCHRUN.format(rank=0, code=2, peer=1, peer_code=2),
        2,
        "rank 2: FileNotFoundError: corpus.txt",
    ),
    "nothing is known": ("step 10/20 | loss 3.1\n", None, ""),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_rank_that_failed_first_is_found_in_the_log(name):
    log, rank, why = LOGS[name]
    assert first_failure(log) == (rank, why)


@pytest.mark.parametrize(
    ("state", "reason", "log", "expected"),
    [
        ("COMPLETED", "None", LOGS["srun names the task"][0], "COMPLETED"),
        ("TIMEOUT", "TimeLimit", "", "TIMEOUT: the time limit of 00:10:00 was reached"),
        (
            "OUT_OF_MEMORY",
            "OutOfMemory",
            "srun: error: n1: task 1: Out Of Memory\n",
            "OUT_OF_MEMORY: rank 1: out of memory",
        ),
        (
            "FAILED",
            "NonZeroExitCode",
            "srun: error: n1: task 1: Out Of Memory\n",
            "OUT_OF_MEMORY: rank 1",
        ),
        ("NODE_FAIL", "NodeDown", "", "NODE_FAIL: a node of n[1-2] failed"),
        ("CANCELLED", "None", "", "CANCELLED: it was cancelled"),
        (
            "PENDING",
            "DependencyNeverSatisfied",
            "",
            "PENDING: DependencyNeverSatisfied: the job that it waits for failed",
        ),
        (
            "FAILED",
            "NonZeroExitCode",
            LOGS["srun names the task"][0],
            "FAILED: rank 3: exited with exit code 7 on n2",
        ),
        ("FAILED", "NonZeroExitCode", "", "FAILED: exit code 3"),
        (
            "FAILED",
            "NonZeroExitCode",
            "srun: error: n1: task 0: Killed\n"
            "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT x DUE TO JOB REQUEUE ***\n",
            "FAILED: exit code 3",
        ),
    ],
)
def test_each_end_has_its_reason(state, reason, log, expected):
    (info,) = parse_jobs(record(state=state, reason=reason, code="3:0"))
    outcome = explain(info, log)
    assert str(outcome).startswith(expected) and outcome.ok == (state == "COMPLETED")


@pytest.mark.parametrize(
    ("code", "by_signal", "text"),
    [
        (3, 0, "exit code 3"),
        (137, 0, "killed by SIGKILL: by hand, or by the kernel's out-of-memory killer"),
        (143, 0, "killed by SIGTERM"),
        (128, 0, "exit code 128"),
        (255, 0, "exit code 255"),
        (0, 11, "killed by SIGSEGV"),
    ],
)
def test_an_exit_code_is_put_into_words(code, by_signal, text):
    assert exit_text(code, by_signal) == text


def test_an_unknown_job_is_named_with_what_to_do():
    client = speaking("slurm_load_jobs error: Invalid job id specified")
    with pytest.raises(UnknownJob) as caught:
        client.jobs("99")
    assert str(caught.value).startswith("no job 99 on SLURM cluster: SLURM forgets a job")


def test_a_cluster_that_was_taken_down_meanwhile_is_said_to_be():
    client = speaking("/bin/sh: 0: cannot open /tmp/labcode-slurm-0/x/on: No such file", code=2)
    with pytest.raises(SlurmError) as caught:
        client.jobs("17")
    assert str(caught.value) == "scontrol: the cluster on this machine was taken down meanwhile"
