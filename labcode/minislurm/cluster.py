"""`Cluster`: start, use, break and remove a local SLURM cluster."""

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labcode.minislurm import conf, needs, network
from labcode.minislurm.commands import run, wait
from labcode.minislurm.hosts import Host, hosts_of, telling_line
from labcode.minislurm.place import alone, base, is_name, named
from labcode.minislurm.scripts import user_name, write_scripts
from labcode.minislurm.spec import Spec

# States of a node that takes part, as `sinfo` writes them.
_USABLE = {"idle", "mix", "alloc", "comp"}
_MAX_PATH = 80  # the munge socket inside the folder must stay under the kernel's 108 characters


def running(name: str | None = None) -> "Cluster | None":
    """The cluster of that name if it is up on this machine, else None."""
    cluster = Cluster(named(name))
    is_up = cluster.host("head").pid and (cluster.folder / "up").exists()
    return cluster if is_up else None


def names_up() -> list[str]:
    """The names of this user's clusters that are up."""
    if not base().is_dir():
        return []
    folders = sorted(path.name for path in base().iterdir() if path.is_dir())
    return [name for name in folders if is_name(name) and running(name)]


def _remove_group(top: Path) -> bool:
    """Try to remove a group of processes and those below it; whether it is gone."""
    for group in sorted(top.glob("**/"), reverse=True):
        with contextlib.suppress(OSError):
            group.rmdir()
    return not top.exists()


class Cluster:
    """A SLURM cluster on this machine, made with `Cluster.up`; a `with` block takes it down.

    Args:
        name: Which of this user's clusters.

    Attributes:
        folder: Its state and logs: `head/slurmctld.log`, `n1/slurmd.log`, `n1/hosts` (the
            /etc/hosts of n1), `etc/`.
        exec_prefix: What to put in front of a command line to run it on the head node, also from
            another process.
    """

    def __init__(self, name: str) -> None:
        self.name = named(name)  # never a path: `down` removes the folder of that name
        self.folder = base() / self.name
        self.exec_prefix = self.host("head").command([])

    def __repr__(self) -> str:
        return f"<SLURM cluster {self.name!r} in {self.folder}>"

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    # -------------------------------------------------------------------------------- up and down

    @classmethod
    def up(cls, nodes: int | None = None, *, name: str | None = None, **site: Any) -> "Cluster":
        """Start a cluster and return when all nodes are idle; one that is up is returned.

        Of one that is up, daemons that have died and nodes that are off are started again.

        Args:
            nodes: Number of nodes; 2 by default.
            name: Clusters of different names do not see each other.
            site: Fields of `Spec`: cpus, memory_mb, gpus, gpu_type, partitions, features, accounts,
                qos, settings, cgroup.

        Raises:
            Unavailable: Packages or kernel features are missing.
            ValueError: The spec is impossible, or a different cluster of this name is up.
            RuntimeError: A daemon did not start; nothing is left behind then but what they wrote.
        """
        name = named(name)
        asked = {key: value for key, value in site.items() if value is not None}
        if nodes is not None:
            asked["nodes"] = nodes
        spec = Spec.of(**asked)
        needs.check()
        with alone(name):
            cluster = running(name)
            if cluster:
                cluster._refuse_others(asked, spec)
                cluster._revive()
            else:
                cluster = cls(name)
                cluster._remove()  # what a killed `up` may have left
                try:
                    cluster._start(spec)
                except (RuntimeError, OSError) as error:
                    kept = cluster._keep_logs()
                    cluster._remove()
                    raise RuntimeError(f"{error}{kept}") from None
                except BaseException:
                    cluster._remove()
                    raise
                cluster._kept.unlink(missing_ok=True)
        for node in cluster.spec.names():
            cluster.boot(node)
        return cluster

    def _refuse_others(self, asked: Mapping[str, object], spec: Spec) -> None:
        """Raise if this cluster, which is up, differs from `spec` in what was asked for."""
        found = []
        wanted = []
        for key in asked:
            here = getattr(self.spec, key)
            want = getattr(spec, key)
            if here != want:
                found.append(f"{key}={here!r}")
                wanted.append(f"{key}={want!r}")
        if found:
            raise ValueError(
                f"the cluster {self.name!r} is up with {', '.join(found)}, not {', '.join(wanted)}:"
                " take it down first, or give the new one a name"
            )

    def _start(self, spec: Spec) -> None:
        self._write_files(spec)
        self._power_on(spec)
        self._start_controller()  # while the nodes boot
        self._connect_nodes(spec)
        self._await_controller()
        for name in spec.names():
            self._start_slurmd(self.host(name))
        self._await_nodes(spec.names())
        (self.folder / "up").touch()

    def _write_files(self, spec: Spec) -> None:
        if any(character.isspace() for character in str(self.folder)):
            raise RuntimeError(
                f"the path {str(self.folder)!r} has a space, which slurm.conf cannot hold: "
                "set TMPDIR to a folder without one, such as /tmp"
            )
        if len(str(self.folder)) > _MAX_PATH:
            raise RuntimeError(
                f"the path {self.folder} is too long for a socket: "
                "set TMPDIR to a shorter one, such as /tmp"
            )
        for part in ("", "etc", "gpu", "munge", "state", "spool"):
            (self.folder / part).mkdir(mode=0o700, exist_ok=True)
        for number in range(spec.gpus):
            (self.folder / f"gpu/gpu{number}").touch()
        key = self.folder / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        version = run(["slurmctld", "-V"], "slurmctld -V", 10, env=needs.CLEAN).stdout
        etc = {
            "slurm.conf": conf.slurm_conf(spec, self.folder, user_name()),
            "gres.conf": conf.gres_conf(spec, self.folder),
            "cgroup.conf": conf.cgroup_conf(spec, version),
            "job_submit.lua": conf.submit_lua(spec),
        }
        for file, text in etc.items():
            (self.folder / "etc" / file).write_text(text)
        (self.folder / "spec.json").write_text(spec.text())
        write_scripts(self.folder)

    def _power_on(self, spec: Spec) -> None:
        """Boot the head, and begin to boot the nodes."""
        head = self.host("head")
        files = conf.hosts(spec)
        head.start(files)
        head.wait_ready()
        for name in spec.names():
            self.host(name).start(files, inside=head.pid)
        network.lay_bridge(head, spec)

    def _connect_nodes(self, spec: Spec) -> None:
        for name in spec.names():
            node = self.host(name)
            node.wait_ready()
            network.lay_cable(self.host("head"), node, spec)

    def _start_controller(self) -> None:
        self._start_munged()
        self._start_slurmctld("-c")

    def _start_munged(self) -> None:
        munge = self.folder / "munge"
        head = self.host("head")
        # One munged serves all hosts: unix sockets cross network namespaces.
        head.call(
            [
                "munged",
                "--force",  # it refuses the owners of some folders in a user namespace
                f"--key-file={munge}/key",
                f"--socket={munge}/socket",
                f"--pid-file={munge}/pid",
                f"--log-file={munge}/log",
                f"--seed-file={munge}/seed",
            ]
        )

    def _start_slurmctld(self, *options: str) -> None:
        """Start the controller; without "-c" it continues with the jobs that it knew."""
        self.host("head").call(["slurmctld", *options])

    def dead(self) -> list[str]:
        """Which daemons of the head node do not answer: of "munged" and "slurmctld"."""
        found = []
        seal = ["munge", "-n", f"--socket={self.folder}/munge/socket"]
        if self.exec(seal, check=False, timeout_s=30).returncode:
            # without it the controller is not heard: asked, it would be waited for nearly a minute
            found.append("munged")
            if self.exec(["pgrep", "-x", "slurmctld"], check=False).returncode:
                found.append("slurmctld")
        elif "is UP" not in self.exec(["scontrol", "ping"], check=False, timeout_s=60).stdout:
            found.append("slurmctld")
        return found

    def _revive(self) -> None:
        """Start the daemons of the head node again that have died."""
        if "munged" in self.dead():
            (self.folder / "munge/socket").unlink(missing_ok=True)
            self._start_munged()
        if "slurmctld" in self.dead():  # asked again: without munged, no other one is heard
            self._start_slurmctld()
            self._await_controller()

    def _start_slurmd(self, node: Host) -> None:
        try:
            node.call(["slurmd", "-N", node.name])
        except RuntimeError as error:
            reason = self._last_error(f"{node.name}/slurmd.log", "slurmd")
            raise RuntimeError(f"{error}; {reason}") from None

    def _await_controller(self) -> None:
        # A slurmd that registers before the controller is up tries again only after 3.5 s.
        def is_up() -> bool:
            return "is UP" in self.exec(["scontrol", "ping"], check=False).stdout

        def why_not() -> str:
            return self._last_error("head/slurmctld.log", "slurmctld")

        wait(is_up, 60, why_not)

    def _await_nodes(self, names: Sequence[str]) -> None:
        def all_usable() -> bool:
            states = self.states()
            return all(states.get(name) in _USABLE for name in names)

        def why_not() -> str:
            reason = self._last_error(f"{names[-1]}/slurmd.log", "slurmd")
            return f"nodes are not usable: {self.states()}; {reason}"

        wait(all_usable, 60, why_not)

    def _last_error(self, log: str, daemon: str) -> str:
        path = self.folder / log
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        return f"{daemon} is not ready: {telling_line(text) or 'no log'}"

    @property
    def _kept(self) -> Path:
        """Where the logs of a cluster that could not start are kept, until one starts."""
        return self.folder.with_name(f"{self.name}-failed.log")

    def _keep_logs(self) -> str:
        """Copy what the daemons wrote to a file beside the folder, which is about to go.

        Returns:
            The end of a sentence that names the file; "" if they have written nothing.
        """
        parts = []
        for path in sorted(self.folder.glob("*/*log")):
            text = path.read_text(errors="replace")
            parts.append(f"==> {path.relative_to(self.folder)} <==\n{text}\n")
        if not parts:
            return ""
        self._kept.write_text("".join(parts))
        return f"; their logs: {self._kept}"

    def down(self) -> None:
        """Remove the cluster: processes, mounts, interfaces, files.

        Fine if there is none, or half of one.
        """
        with alone(self.name):
            self._remove()
            self._kept.unlink(missing_ok=True)

    def _remove(self) -> None:
        (self.folder / "up").unlink(missing_ok=True)
        for name in hosts_of(self.folder):
            self.host(name).stop()
        self._remove_cgroups()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            raise RuntimeError(f"{self.folder} could not be removed: remove it by hand")

    def _remove_cgroups(self) -> None:
        """Remove the groups that slurmd has made on this machine; their processes have ended."""
        try:
            spec = self.spec
        except (OSError, ValueError):
            return  # it was never up
        mount = Path(str(spec.cgroup.get("CgroupMountpoint", "/sys/fs/cgroup")))
        tops = [mount.glob(f"*/slurm_{name}") for name in spec.names()] if spec.cgroup else []
        for top in itertools.chain.from_iterable(tops):
            # the kernel may take a moment to see that a group is empty
            wait(functools.partial(_remove_group, top), 10, f"{top} is in use".__str__)

    # ---------------------------------------------------------------------------------------- use

    @property
    def spec(self) -> Spec:
        """What it emulates."""
        return Spec.read(self.folder / "spec.json")

    def host(self, name: str) -> Host:
        """One of its hosts: "head", "n1", "n2", ..."""
        return Host(self.folder, name)

    def _node(self, name: str) -> Host:
        names = self.spec.names()
        if name not in names:
            raise ValueError(
                f"there is no node {name!r} in the cluster {self.name!r}: it has {', '.join(names)}"
            )
        return self.host(name)

    def states(self) -> dict[str, str]:
        """State of each node as sinfo writes it: idle, alloc, down, ...; with a * it is silent."""
        said = self.exec(["sinfo", "-h", "-N", "-o", "%N %t"], check=False, timeout_s=30).stdout
        states = {}
        for line in said.splitlines():
            words = line.split()
            if len(words) == 2:
                states[words[0]] = words[1]
        return states

    def exec(
        self,
        argv: Sequence[object],
        node: str | None = None,
        timeout_s: float = 60,
        check: bool = True,
        root: bool = False,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the folder and with the environment of the caller.

        Args:
            argv: Program and arguments.
            node: "n1", "n2", ...; None for the head.
            timeout_s: The command is ended after this time, and when the caller is interrupted.
            check: Raise if it fails.
            root: Run the command as the owner of the host's network and mounts; no difference if
                the user is root.
            input: Text for its standard input.

        Returns:
            The completed process, with stdout and stderr as text.

        Raises:
            RuntimeError: It failed; the last line of its errors is in the message.
            TimeoutError: The time is over.
        """
        host = self.host("head") if node in (None, "head") else self._node(node)
        what = f"{' '.join(map(str, argv))} on {host.name}"
        done = run(host.command(argv, root), what, timeout_s, input)
        if check and done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or "it said nothing"
            reason = said.splitlines()[-1]
            raise RuntimeError(f"{what} failed with exit code {done.returncode}: {reason}")
        return done

    def node(
        self, name: str, argv: Sequence[object], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """`exec` on a node."""
        return self.exec(argv, node=name, **options)

    # --------------------------------------------------------------------------- break and repair

    def kill(self, name: str) -> None:
        """Cut a node's power. SLURM notices within half a minute and requeues its jobs."""
        node = self._node(name)
        node.stop()
        network.unplug(self.host("head"), node)

    def boot(self, name: str) -> None:
        """Power a node on again, with its files as new; returns when it can take jobs.

        Fine for a node that is on.
        """
        node = self._node(name)
        if node.pid:
            return
        head = self.host("head")
        node.start(conf.hosts(self.spec), inside=head.pid)
        node.wait_ready()
        network.lay_cable(head, node, self.spec)
        self._start_slurmd(node)
        self._await_nodes([name])

    def netdown(self, name: str) -> None:
        """Pull a node's network cable."""
        network.set_link(self.host("head"), self._node(name), up=False)

    def netup(self, name: str) -> None:
        """Put it back."""
        network.set_link(self.host("head"), self._node(name), up=True)

    def slow(self, name: str, rate: str) -> None:
        """Limit a node's link, both ways: `slow("n2", "100mbit")`; the rate "off" removes it."""
        network.slow(self.host("head"), self._node(name), rate)

    def block(self, name: str, port: int | str) -> None:
        """Close a TCP port of a node, or a range such as "20000-29999", as a firewall does."""
        network.block(self._node(name), port, closed=True)

    def unblock(self, name: str, port: int | str) -> None:
        """Open it again."""
        network.block(self._node(name), port, closed=False)
