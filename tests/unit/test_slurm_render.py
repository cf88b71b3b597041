"""Batch scripts: what they say for each kind of site.

No text that a user can give breaks out of its place.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from labcode.slurm import examples
from labcode.slurm.script.job import Job
from labcode.slurm.script.quote import expanded, inside, literal
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Container, Cpus, Gpus, Mail, Setting, Site, load, names

RC_FILE = Path(__file__).parents[2] / ".shellcheckrc"
NASTY = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch owned)",
    "`touch owned`",
    "a\\",
    "#x",
    "-n",
    "ünï✓",
    "“quoted”",
    "*?[a]",
    "; ls",
    "!!",
]
ON_ONE_LINE = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "S"], include_characters=" "),
    min_size=1,
)
ARGUMENT = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
CONTAINERS = [
    Container(),
    Container("apptainer", "$SCRATCH/an image.sif", ("/data", "$HOME/x y:/inside")),
    Container("singularity", "image.sif", options=("--cleanenv",)),
    Container("pyxis", "nvcr.io#nvidia/pytorch:25.01-py3", ("/data:/data:ro",)),
    Container("shifter", "docker:nersc/pytorch", ("/data",), ("--module=gpu",)),
]
shellcheck = pytest.mark.skipif(
    not shutil.which("shellcheck"), reason="shellcheck is not installed: apt-get install shellcheck"
)


def options(script):
    """`{option: value}` of the directives, comments gone."""
    lines = [
        line.partition(" # ")[0].rstrip()
        for line in script.splitlines()
        if line.startswith("#SBATCH ")
    ]
    parts = (line.removeprefix("#SBATCH --").partition("=") for line in lines)
    return {name: value for name, _, value in parts}


def check_shell(folder, scripts):
    """ShellCheck has nothing to say, with the settings that it finds above the scripts."""
    shutil.copy(RC_FILE, folder)
    for number, text in enumerate(scripts):
        (folder / f"{number}.sh").write_text(text, encoding="utf-8")
    files = [str(folder / f"{number}.sh") for number in range(len(scripts))]
    done = subprocess.run(
        ["shellcheck", "--severity=style", "--format=gcc", *files],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout) == (0, "")


@shellcheck
def test_shellcheck_passes_for_weak_scaling(tmp_path):
    check_shell(tmp_path, [(examples.FOLDER / "weak_scaling").read_text(encoding="utf-8")])


@shellcheck
def test_shellcheck_passes_for_every_site_launcher_and_container(tmp_path):
    others = [
        Job(
            "gpt_tiny",
            requeue=False,
            nccl_debug="INFO",
            env={"A": "b c"},
            array="0-3%2",
            dependency="afterok:1",
        ),
        Job("", ("a b",), module="labcode.doctor"),
        Job("gpt_tiny", ("--train.out", "a folder of mine")),
    ]
    sites = [
        replace(load(name), launcher=launcher, container=container)
        for name, launcher, container in itertools.product(
            names(), ("torchrun", "srun"), CONTAINERS
        )
    ]
    everything = Site(
        "all",
        modules=("cuda/12", "a b"),
        setup=("source x",),
        mail=Mail("me@example.org"),
        exclusive=True,
    )
    scripts = [render(Job("gpt_tiny", nodes=2), site) for site in [*sites, everything]]
    check_shell(
        tmp_path,
        [*scripts, *(render(job, site) for job in others for site in [everything, *sites[:10]])],
    )


def job_name(line):
    """A name for a job that is as close to `line` as a job's name may be."""
    name = line.replace("/", "-").strip()
    return "x" if name in ("", ".", "..") else name  # Job refuses these; see test_slurm_job.py


def nasty_script(text, line):
    job = Job(
        "",
        (text, text),
        module="labcode.doctor",
        name=job_name(line),
        env={"A": text},
    )
    site = Site(
        "s",
        account=line,
        env={"B": Setting(line, line)},
        scratch=f"/{line}",
        python=f"/{line}/python",
    )
    return [
        render(job, site),
        render(
            replace(
                job,
                module="labcode.train",
                recipe="gpt_tiny",
                # a path of a run is on one line: `labcode.runtime.fields` refuses any other
                overrides=("--data.path", f"x{line}"),
            ),
            site,
        ),
        render(
            job, replace(site, container=Container("apptainer", line, (line.replace(",", "."),)))
        ),
    ]


@shellcheck
@pytest.mark.parametrize("text", [*NASTY, "two\nlines", "tab\t", "\r", "\u2028"])
def test_shellcheck_passes_for_names_and_paths_that_ask_for_trouble(text, tmp_path):
    check_shell(tmp_path, nasty_script(text, "".join(filter(str.isprintable, text)) or "x"))


@shellcheck
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ARGUMENT, ON_ONE_LINE)
@example(".", ".")
@example("..", "..")
@example("=", "=")
def test_shellcheck_passes_for_any_text(tmp_path, text, line):
    check_shell(tmp_path, nasty_script(text, line))


def run_with_stubs(folder, script, python="echo the text of hand_down", **env):
    """The script run by bash; `srun` writes down its arguments and $A, and starts nothing."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    stubs = {
        "srun": 'printf "%s\\0" "$@" "A=${A-}" > "$RECORD"',
        "scontrol": 'if [ "$2" = hostnames ]; then printf "n1\\nn2\\n"; fi',
        "python": python,
    }
    for name, body in stubs.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script, encoding="utf-8")
    slurm = {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "a name",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
    }
    done = subprocess.run(
        ["bash", str(folder / "job.sh")],
        env={
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "RECORD": str(folder / "record"),
            **slurm,
        }
        | {"SLURM_CPUS_PER_TASK": "3", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "record").read_bytes().decode().split("\0")[:-1]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ARGUMENT, max_size=3), ARGUMENT, ON_ONE_LINE)
def test_every_argument_and_variable_arrives_as_it_was_given(tmp_path, arguments, variable, python):
    job = Job("", tuple(arguments), module="labcode.doctor", env={"A": variable})
    python = python.lstrip("~").replace("$", "S") or "x"
    found = run_with_stubs(tmp_path, render(job, Site(launcher="srun", python=python)))
    assert found[2:] == [python, "-m", "labcode.doctor", *arguments, f"A={variable}"]
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("text", NASTY)
def test_what_asks_for_trouble_arrives_as_it_was_given(tmp_path, text):
    found = run_with_stubs(
        tmp_path, render(Job("", (text,), module="labcode.doctor"), Site(launcher="srun"))
    )
    assert found[-2] == text and not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "text",
    [
        "$HOME/a b",
        "${HOME}x",
        "a$HOME$HOME",
        "$HOME/$(ls)`ls`\"'\\",
        "$HOME/“a”",
        "$1 $HOME $",
        "~/x",
        "",
    ],
)
def test_in_a_profile_variables_are_looked_up_and_nothing_else(text):
    done = subprocess.run(
        ["bash", "-c", f"printf %s {expanded(text)}"],
        env={"HOME": "/h o", "PATH": os.environ["PATH"]},
        capture_output=True,
    )
    assert done.stdout.decode() == text.replace("${HOME}", "/h o").replace("$HOME", "/h o")


@settings(max_examples=60, deadline=None)
@given(ARGUMENT)
def test_a_literal_is_one_word_on_one_line(text):
    word = literal(text)
    assert "\n" not in word and "\r" not in word
    assert (
        subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {word}"], capture_output=True
        ).stdout.decode()
        == f"{text}\0"
    )


PREEMPTED = "2026-11-22T12:59:29"


@pytest.fixture
def start(tmp_path):
    """`start(code)`: a script that can go on, with stubs for SLURM's commands.

    Its step runs until the ranks are signalled, leaves the file `stopped` if `stopped`, and ends
    with `code`.
    """
    (tmp_path / "bin").mkdir()
    os.mkfifo(tmp_path / "started")
    wait = 'until [ "$(grep -c signal said)" -ge "$SIGNALS" ]; do sleep 0.02; done'
    about = 'echo "JobId=7 JobState=$STATE Reason=None PreemptTime=$PREEMPTED SuspendTime=None"'
    show = f'if [ "$2" = hostnames ]; then echo n1; elif [ "$3" = job ]; then {about}; '
    stubs = {
        "srun": f'echo > started; {wait}; [ -z "$LEAVES" ] || echo > "$LEAVES"; exit "$CODE"',
        "scancel": 'echo "$@" >> said',
        "scontrol": show + 'else echo "$@" >> said; fi',
        "python": "echo the text of hand_down",
        # the script waits for seconds between two questions, and nobody need wait here
        "sleep": "exec /bin/sleep 0.02",
    }
    (tmp_path / "said").touch()
    for name, body in stubs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(render(Job("gpt_tiny", max_attempts=3), Site()))
    folder = tmp_path / "runs/x-7"
    folder.mkdir(parents=True)
    (folder / "stopped").write_text("of the attempt before")
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "x",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NNODES": "1",
        "SLURM_CPUS_PER_TASK": "1",
    }
    running = []

    def begin(code, signals, stopped=True, state="RUNNING", preempted="None", restarts=0):
        env = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "CODE": str(code),
            "SIGNALS": str(signals),
            "LEAVES": str(folder / "stopped") if stopped else "",
            "STATE": state,
            "PREEMPTED": preempted,
            **slurm,
        }
        if restarts:  # SLURM sets it in the second attempt only
            env["SLURM_RESTART_COUNT"] = str(restarts)
        running.append(
            subprocess.Popen(
                ["bash", "job.sh"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
            )
        )
        (tmp_path / "started").read_text()  # returns when the step runs
        return running[0]

    yield begin
    for process in running:
        process.kill()
        process.wait()


def said(folder):
    """What the script asked SLURM for, other than questions.

    How often it passes a signal on depends on how long its ranks need: once is as good as thrice.
    """
    lines = (folder / "said").read_text().splitlines()
    return [line for line, _ in itertools.groupby(lines)]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_is_passed_on_and_a_job_that_was_stopped_is_requeued(start, tmp_path, number):
    process = start(0, signals=1)
    process.send_signal(number)
    assert process.wait(60) == 0
    assert said(tmp_path) == ["--quiet --signal=USR1 7", "requeue 7"]


def test_a_run_that_finishes_after_the_signal_is_not_requeued(start, tmp_path):
    process = start(0, signals=1, stopped=False)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert said(tmp_path) == ["--quiet --signal=USR1 7"]


def test_a_step_that_fails_after_the_signal_fails_the_job_and_is_not_run_again(start, tmp_path):
    process = start(3, signals=1, stopped=False)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 3
    assert said(tmp_path) == ["--quiet --signal=USR1 7"]


def test_whatever_torchrun_says_a_run_with_its_checkpoint_goes_on(start, tmp_path):
    process = start(255, signals=1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 0
    assert said(tmp_path) == ["--quiet --signal=USR1 7", "requeue 7"]


def test_a_preempted_job_is_requeued_although_slurm_tells_its_ranks_alone(start, tmp_path):
    assert start(0, signals=0, preempted=PREEMPTED).wait(60) == 0
    assert said(tmp_path) == ["requeue 7"]


def test_who_stops_the_ranks_by_hand_stops_the_job_for_good(start, tmp_path):
    """`scancel --signal=USR1 7` signals the ranks, and not this script."""
    assert start(0, signals=0).wait(60) == 0
    assert said(tmp_path) == []


def test_a_step_that_dies_as_it_starts_since_the_job_is_preempted_goes_on(start, tmp_path):
    assert start(143, signals=0, stopped=False, preempted=PREEMPTED).wait(60) == 0
    assert said(tmp_path) == ["requeue 7"]


def test_a_preempted_run_that_has_finished_in_time_is_not_requeued(start, tmp_path):
    assert start(0, signals=0, stopped=False, preempted=PREEMPTED).wait(60) == 0
    assert said(tmp_path) == []


def test_a_job_that_was_cancelled_stays_so(start, tmp_path):
    """`scontrol requeue` would bring it back."""
    assert start(0, signals=0, state="COMPLETING", preempted=PREEMPTED).wait(60) == 0
    assert said(tmp_path) == []


@pytest.mark.parametrize(("restarts", "requeued"), [(0, True), (1, True), (2, False), (7, False)])
def test_a_job_has_no_more_attempts_than_it_may(start, tmp_path, restarts, requeued):
    process = start(0, signals=0, preempted=PREEMPTED, restarts=restarts)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (0 if requeued else 1)
    assert said(tmp_path) == (["requeue 7"] if requeued else [])
    reason = "error: not requeued: this was attempt 3 of 3: give it more time, or more attempts"
    assert stderr == ("" if requeued else f"{reason} (max_attempts)\n")


def test_the_most_attempts_are_the_sites_unless_the_job_says_so():
    assert "+ 1 >= 20))" in render(Job("gpt_tiny"), Site())
    assert "+ 1 >= 5))" in render(Job("gpt_tiny"), Site(max_attempts=5))
    assert "+ 1 >= 90))" in render(Job("gpt_tiny", max_attempts=90), Site(max_attempts=5))


def test_torchrun_starts_the_ranks_again_as_often_as_the_job_says():
    assert "--max-restarts" not in render(Job("gpt_tiny"), Site())
    assert " --max-restarts=3 \\\n" in render(Job("gpt_tiny", max_restarts=3), Site())
    with pytest.raises(ValueError, match="on generic srun starts the ranks, and starts none again"):
        render(Job("gpt_tiny", max_restarts=3), Site(name="generic", launcher="srun"))


def test_a_later_signal_is_passed_on_too_and_the_step_is_waited_for(start, tmp_path):
    process = start(0, signals=2)  # the first one came while srun was still starting, say
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
    assert process.returncode == 0
    assert said(tmp_path) == ["--quiet --signal=USR1 7", "requeue 7"]


@pytest.mark.parametrize("code", [0, 5])
def test_a_step_that_ends_by_itself_decides_over_the_job(start, tmp_path, code):
    assert start(code, signals=0, stopped=False).wait(60) == code
    assert said(tmp_path) == []


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: container.kind)
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_hand_down_comes_from_where_the_ranks_find_labcode(launcher, container):
    site = Site(python="my python", launcher=launcher, container=container)
    script = render(Job("gpt_tiny"), site)
    asks = script.partition("hand_down=$(")[2].partition(")\n")[0]
    assert asks.endswith("'my python' -m labcode.slurm.hand_down")
    assert (container.kind == "none") == asks.startswith("'my python'")
    assert 'bash -c "$hand_down" hand_down \\\n' in script
    # a container may set up signals anew for what runs inside
    ignores = container.kind not in ("none", "pyxis")
    assert ("""bash -c 'trap "" USR1 TERM; exec "$@"'""" in script) == ignores


def test_a_node_without_labcode_ends_the_script_before_any_rank_starts(tmp_path):
    script = render(Job("gpt_tiny"), Site())
    missing = "#!/bin/bash\necho 'python: No module named labcode' >&2; exit 1\n"
    with pytest.raises(AssertionError, match="No module named labcode"):
        run_with_stubs(tmp_path, script, python=missing)
    assert not (tmp_path / "record").exists()


def test_the_torchrun_script_starts_one_agent_per_node_that_all_meet_on_the_first(tmp_path):
    script = render(
        Job("gpt_tiny", ("--train.steps", "7"), nodes=2, name="x"),
        Site(scratch="$WORK/runs", cpus=Cpus(8, 2)),
    )
    assert (options(script)["ntasks-per-node"], options(script)["cpus-per-task"]) == ("1", "4")
    found = run_with_stubs(tmp_path, script, WORK="/w k")
    at = found.index("torch.distributed.run")
    assert found[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=3"]
    assert found[2:6] == ["bash", "-c", "the text of hand_down", "hand_down"]
    assert found[at + 1 : -1] == [
        "--nnodes=2", "--nproc-per-node=2",
        "--rdzv-id=12345", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:22345",
        "-m", "labcode.train", "gpt_tiny", "--train.steps", "7",
        "--train.out", "/w k/runs/a name-12345", "--checkpoint.resume",
    ]  # fmt: skip


def test_the_srun_script_starts_one_task_per_rank_and_says_where_they_meet():
    script = render(
        Job("gpt_tiny", nodes=2, ranks_per_node=4),
        Site(launcher="srun", cpus=Cpus(8, 2), host_suffix="i"),
    )
    assert (options(script)["ntasks-per-node"], options(script)["cpus-per-task"]) == ("4", "2")
    assert (
        "sed -n 1p)i\n" in script and "export MASTER_ADDR=$first_node MASTER_PORT=$port\n" in script
    )
    assert "torch.distributed.run" not in script


@pytest.mark.parametrize(
    ("gpus", "launcher", "option", "value"),
    [
        (Gpus(4), "torchrun", "gpus-per-node", "2"),
        (Gpus(4, type="a100"), "srun", "gpus-per-node", "a100:2"),
        (Gpus(4, "gres", "a100"), "torchrun", "gres", "gpu:a100:2"),
        (Gpus(4, "gpus-per-task"), "torchrun", "gpus-per-task", "2"),
        (Gpus(4, "gpus-per-task"), "srun", "gpus-per-task", "1"),
    ],
)
def test_gpus_are_asked_for_in_the_way_of_the_site(gpus, launcher, option, value):
    script = render(Job("gpt_tiny"), Site(gpus=gpus, launcher=launcher))
    asked = {name: found for name, found in options(script).items() if name.startswith("g")}
    assert asked == {option: value}
    # a rank picks its GPU by its local rank, so it must see all of its node
    assert ("--gpu-bind=none" in script) == ((option, launcher) == ("gpus-per-task", "srun"))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            CONTAINERS[1],
            [
                'exec --nv --bind "$PWD" --bind "$SCRATCH/runs" --bind /data '
                '--bind "$HOME/x y:/inside"'
            ],
        ),
        (
            CONTAINERS[3],
            [
                '="$PWD:$PWD,$SCRATCH/runs:$SCRATCH/runs,/data:/data:ro" ',
                ' --container-workdir="$PWD" ',
            ],
        ),
        (
            CONTAINERS[4],
            ["shifter --image=docker:nersc/pytorch --volume=/data:/data --module=gpu \\"],
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_container_sees_the_working_folder_and_scratch(container, words):
    script = render(
        Job("gpt_tiny"), Site(gpus=Gpus(4), container=container, scratch="$SCRATCH/runs")
    )
    assert [word for word in words if word not in script] == []
    assert 'mkdir -p "$SCRATCH/runs"\n' in script


def test_the_signal_the_trap_and_the_requeue_are_there_only_for_a_job_that_can_go_on():
    going_on, not_going_on = (
        render(Job("gpt_tiny", requeue=requeue), Site()) for requeue in (True, False)
    )
    asked = options(going_on)
    assert (asked["signal"], asked["open-mode"], "requeue" in asked) == (
        "B:USR1@120",
        "append",
        True,
    )
    for word in ("USR1", "trap", "scontrol requeue", "--checkpoint.resume", "wait"):
        assert word in going_on and word not in not_going_on
    assert "no-requeue" in options(not_going_on)


def test_a_setting_says_why_and_the_job_has_the_last_word():
    site = Site(
        env={
            "NCCL_SOCKET_IFNAME": Setting("hsn", "the fast network"),
            "OMP_NUM_THREADS": Setting("3", "tried"),
        }
    )
    assert "export NCCL_SOCKET_IFNAME=hsn            # the fast network\n" in render(
        Job("gpt_tiny"), site
    )
    script = render(Job("gpt_tiny", env={"NCCL_SOCKET_IFNAME": "eth0"}), site)
    assert "NCCL_SOCKET_IFNAME=eth0" in script and "hsn" not in script
    assert script.count("OMP_NUM_THREADS=") == 1


def test_nccl_debug_is_set_only_where_a_lesson_reads_it():
    assert "NCCL_DEBUG" not in render(Job("gpt_tiny"), Site())
    assert "export NCCL_DEBUG=INFO" in render(Job("gpt_tiny", nccl_debug="INFO"), Site())


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            Job("gpt_tiny", minutes=61),
            "minutes=61 is more than max_minutes=60 of small: ask for less",
        ),
        (Job("gpt_tiny", nodes=8), "nodes=8 is more than max_nodes=4 of small"),
        (
            Job("gpt_tiny", ranks_per_node=4),
            "ranks_per_node=4 is more than gpus.per_node=2 of small",
        ),
        (Job("gpt_tiny", ("--parallel.dp", "3")), "3 but WORLD_SIZE is 2"),
        (Job("gpt_tiny", ranks_per_node=9), "ranks_per_node=9"),  # 16 samples over 18 ranks besides
    ],
)
def test_a_job_that_does_not_fit_the_site_is_refused(job, message):
    with pytest.raises(ValueError, match=message):
        render(job, Site("small", max_minutes=60, max_nodes=4, gpus=Gpus(2)))


def test_more_cpus_than_a_node_has_are_refused():
    with pytest.raises(
        ValueError, match="2 ranks x 3 CPUs = 6 are more than the 4 CPUs of a node of small"
    ):
        render(Job("gpt_tiny"), Site("small", cpus=Cpus(4, 3)))


def test_a_script_is_short_and_has_no_option_that_nobody_asked_for():
    script = render(Job("gpt_tiny", requeue=False), Site())
    assert len(script.splitlines()) <= 30
    assert script.endswith("\n") and not script.endswith("\n\n") and "\n\n\n" not in script
    assert set(options(script)) == {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "time",
        "output",
        "no-requeue",
    }


def test_a_folder_is_joined_with_one_slash():
    assert inside("/a/", "b") == "/a/b"


def test_the_committed_examples_are_up_to_date():
    committed = {path.name: path.read_text() for path in examples.FOLDER.glob("*.sbatch")}
    assert committed == examples.scripts(), "run python -m labcode.slurm.examples"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_masks_bind_the_tasks_of_srun_and_not_an_agent(launcher):
    cpus = Cpus(8, 4, masks=("0xf0", "0x0f"))
    script = render(Job("gpt_tiny"), Site(cpus=cpus, launcher=launcher))
    assert ("--cpu-bind=mask_cpu:0xf0,0x0f" in script) == (launcher == "srun")


def test_the_caches_of_lumi_lie_on_the_node():
    script = render(Job("gpt_tiny", ranks_per_node=8), load("lumi"))
    assert 'export MIOPEN_USER_DB_PATH="/tmp/miopen-config-$USER"' in script
