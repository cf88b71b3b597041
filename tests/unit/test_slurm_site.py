"""Site profiles: those that ship are whole and name sources; a wrong one is refused by its line."""

import dataclasses
import re

import pytest

from labcode.slurm.script import site as sites
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Site, load, names

PUBLIC = sorted(set(names()) - {"generic", "local"})


def write(tmp_path, text, name="mine.yaml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", names())
def test_a_profile_that_ships_loads_and_has_a_node_that_fits_its_ranks(name):
    site = load(name)
    assert site.name == name and site.about
    if site.gpus.per_node and site.cpus.per_node:
        assert site.cpus_per_rank * site.gpus.per_node <= site.cpus.per_node


def test_the_sites_of_the_course_are_there():
    assert {"generic", "local", "perlmutter"} <= set(names()) and len(PUBLIC) >= 3


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_site_names_a_source_and_what_could_not_be_confirmed(name):
    text = (sites.SITES / f"{name}.yaml").read_text()
    assert text.count("https://") >= 4
    assert "Not confirmed and left out: " in text
    assert not re.search(r"^account:", text, re.MULTILINE), "the account is the user's own"


def test_ten_lines_are_a_site_of_ones_own(tmp_path):
    path = write(
        tmp_path,
        """
account: 0123
partition: gpu
qos: no
gpus: {per_node: 8, request: gres, type: h100}
cpus: {per_node: 96}
max_minutes: 2880
launcher: srun
modules: [cuda/12.4, python]
env:
  NCCL_SOCKET_IFNAME: {value: ib0, reason: the fast network}
mail: {user: me@example.org}
""",
    )
    site = load(path)
    # as typed: no octal number, no truth value
    assert (site.name, site.account, site.qos) == ("mine", "0123", "no")
    assert (site.gpus.type, site.cpus_per_rank, site.max_minutes) == ("h100", 12, 2880)
    assert site.env["NCCL_SOCKET_IFNAME"].reason == "the fast network"
    assert site.mail.events == ("END", "FAIL")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("partition: a\nqso: b\n", 2, "unknown field qso: did you mean qos"),
        (
            "gpus:\n  per_node: 4\n  requests: gres\n",
            3,
            r"unknown field gpus.requests: did you mean gpus.request\? there are gpus.per_node",
        ),
        (
            "gpus:\n  request: gress\n",
            2,
            "'gress' does not exist: there are gpus-per-node, gres, gpus-per-task",
        ),
        ("launcher: mpirun\n", 1, "'mpirun' does not exist: there are torchrun, srun"),
        ("gpus: {per_node: four}\n", 1, "gpus.per_node: 'four': give a whole number"),
        ("\ngpus: {per_node: -4}\n", 2, "gpus.per_node: -4: give at least 0"),
        ("max_minutes: 24:00:00\n", 1, "'24:00:00': give a whole number"),
        ("exclusive: perhaps\n", 1, "write true or false"),
        ("modules: cuda\n", 1, "modules is a list"),
        ("partition: [a]\n", 1, "partition is one value"),
        ("gpus: 4\n", 1, "gpus has fields of its own"),
        ("- a\n- b\n", 1, "a profile has fields of its own"),
        ("env:\n  A: {value: b}\n", 2, "env.A needs reason"),
        ("about: x\nenv:\n  A-B: {value: b, reason: c}\n", 2, "'A-B' is no name of a variable"),
        (
            "account:\n\npartition: a\npartition: b\n",
            4,
            "partition is there twice, first on line 3",
        ),
        ("about: x\ncontainer: {kind: pyxis}\n", 2, "an image needs a kind of container"),
        (
            "about: x\ncontainer: {kind: pyxis, image: a, binds: ['/a,/b']}\n",
            2,
            "a comma parts one bind from the next",
        ),
        ('partition: "a\\nb"\n', 1, "goes on one line"),
        ("logs: $SCRATCH/logs\n", 1, "sbatch opens the log before any variable is known"),
        ("scratch: ~/runs\n", 1, "write \\$HOME"),
        ("about: x\ndirectives: [--time=1]\n", 2, "the field for time says that"),
        ("about: x\ndirectives: ['-p gpu']\n", 2, "give --option=value"),
        ("host_suffix: 'i; ls'\n", 1, "no part of a host's name"),
        ("partition: {a\n", 2, "this is not YAML"),
        ("python:\n", 1, "python is empty"),
        ("gpus:\n", 1, "gpus is empty"),
        ("gpus: {per_node: [4]}\n", 1, "gpus.per_node: .*integer"),
        ("about: x\nmodules: [[cuda]]\n", 2, "modules is one value"),
        ("env: [A]\n", 1, "env has fields of its own"),
        ("about: x\nmail: {user: me, events: [END, SOON]}\n", 2, "'SOON' does not exist: .*END"),
        ("? [a]\n: b\n", 1, "the name of a field is a plain word"),
        ("about: x\nmodules: &loop [*loop]\n", 2, "nested too deeply"),
        ("gpus: {per_node: x}\nabout: [a]\n", 1, "give a whole number"),  # the first of two
    ],
)
def test_a_wrong_profile_is_refused_with_its_line_and_what_is_allowed(
    tmp_path, text, line, message
):
    with pytest.raises(ValueError, match=rf"^mine.yaml, line {line}: .*{message}") as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_unknown_site_says_what_there_is(tmp_path):
    with pytest.raises(ValueError, match="unknown site 'perlmuter': did you mean perlmutter"):
        load("perlmuter")
    with pytest.raises(ValueError, match=r"no\.yaml: cannot be read as a profile: No such file"):
        load(tmp_path / "no.yaml")
    with pytest.raises(ValueError, match=r"unknown site '\.\./\.\./etc/passwd'"):
        load("../../etc/passwd")


def test_where_no_profile_is_found_the_message_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sites, "SITES", tmp_path)
    with pytest.raises(ValueError, match=r"unknown site 'local': there are none, or give a \.yaml"):
        load("local")


def test_a_field_can_be_given_when_the_site_is_loaded():
    assert load("perlmutter", account="m1234_g").account == "m1234_g"
    with pytest.raises(ValueError, match="unknown field acount"):
        load("perlmutter", acount="m1234_g")


def test_an_empty_profile_is_a_cluster_of_cpus(tmp_path):
    assert dataclasses.replace(load(write(tmp_path, "# nothing\n")), name="") == Site()


def test_yaml_makes_no_objects(tmp_path):
    with pytest.raises(ValueError, match=r"mine.yaml, line 1: "):
        load(write(tmp_path, "partition: !!python/object/apply:os.system [ls]\n"))


def test_the_notes_of_a_site_stand_in_its_script_as_comments():
    notes = ("a b " * 40 + "end", "x; rm -rf /")
    text = render(Job("gpt_tiny"), Site(notes=notes))
    comments = [line for line in text.splitlines() if line.startswith("# ")]
    said = " ".join(line.removeprefix("# ") for line in comments)
    assert f"Note: {notes[0]} Note: {notes[1]}" in said
    assert all(len(line) <= 88 for line in comments)
    with pytest.raises(ValueError, match=r"notes.* goes on one line"):
        Site(notes=("two\nlines",))


def test_perlmutter_says_that_nccl_talks_tcp_without_its_plugin():
    text = render(Job("gpt_tiny", nodes=2), load("perlmutter"))
    assert "# Note: without NCCL's plugin for Slingshot" in text
    assert "export NCCL_SOCKET_IFNAME=hsn " in text
