"""`Cluster`: start, use, break and remove a local SLURM cluster."""

import os
import shutil

from labcode.minislurm import conf, needs, network
from labcode.minislurm.hosts import Host, hosts_of, user_name, write_scripts
from labcode.minislurm.place import alone, base, named
from labcode.minislurm.processes import run, wait

_USABLE = {
    "idle",
    "mix",
    "alloc",
    "comp",
}  # states of a node that takes part, as `sinfo` writes them
_MAX_PATH = 80  # the munge socket inside must stay under the kernel's 108


def running(name: str | None = None) -> "Cluster | None":
    """The cluster of that name if it is up on this machine, else None."""
    cluster = Cluster(named(name))
    return cluster if cluster.host("head").pid and (cluster.folder / "up").exists() else None


class Cluster:
    """A SLURM cluster on this machine, made with `Cluster.up`; as a context manager it goes down at the end.

    Args:
        name: Which of this user's clusters.

    Attributes:
        folder: Its state and logs: `head/slurmctld.log`, `n1/slurmd.log`, `n1/hosts` (the /etc/hosts of n1), `etc/`.
        exec_prefix: What to put in front of a command line to run it on the head node, also from another process.
    """

    def __init__(self, name: str):
        self.name = named(name)  # never a path: `down` removes the folder of that name
        self.folder = base() / self.name
        self.exec_prefix = self.host("head").command([])

    def __repr__(self):
        return f"<SLURM cluster {self.name!r} in {self.folder}>"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.down()

    # ------------------------------------------------------------------------------------------------ up and down

    @classmethod
    def up(cls, nodes=None, *, name: str | None = None, **site) -> "Cluster":
        """Start a cluster and return when all nodes are idle; one that is up already is returned as it is.

        Args:
            nodes: Number of nodes; 2 if nothing is said.
            name: Two clusters of different names do not see each other.
            site: Fields of `conf.Spec`: cpus, memory_mb, gpus, gpu_type, partitions, features, accounts, qos, settings.

        Raises:
            Unavailable: Packages or kernel features are missing.
            ValueError: The site is impossible, or a different cluster of this name is up.
            RuntimeError: A daemon did not start; nothing is left behind then.
        """
        name, asked = (
            named(name),
            {key: v for key, v in {"nodes": nodes, **site}.items() if v is not None},
        )
        spec = conf.Spec.of(**asked)
        needs.check()
        with alone(name):
            cluster = running(name)
            if cluster:
                cluster._refuse_others(asked, spec)
            else:
                cluster = cls(name)
                cluster._remove()  # what a killed `up` may have left
                try:
                    cluster._start(spec)
                except BaseException:
                    cluster._remove()
                    raise
        for node in cluster.spec.names():
            if not cluster.host(node).pid:
                cluster.boot(node)
        return cluster

    def _refuse_others(self, asked, spec):
        found = {
            key: getattr(self.spec, key)
            for key in asked
            if getattr(self.spec, key) != getattr(spec, key)
        }
        if found:
            there = ", ".join(f"{key}={value!r}" for key, value in found.items())
            want = ", ".join(f"{key}={getattr(spec, key)!r}" for key in found)
            raise ValueError(
                f"the cluster {self.name!r} is up with {there}, not {want}: take it down first, or give the new one a name"
            )

    def _start(self, spec):
        if len(str(self.folder)) > _MAX_PATH:
            raise RuntimeError(
                f"the path {self.folder} is too long for a socket: set TMPDIR to a shorter one, such as /tmp"
            )
        for part in ("", "etc", "gpu", "munge", "state", "spool"):
            (self.folder / part).mkdir(mode=0o700, exist_ok=True)
        for i in range(spec.gpus):
            (self.folder / f"gpu/gpu{i}").touch()
        (self.folder / "munge/key").write_bytes(os.urandom(1024))
        (self.folder / "munge/key").chmod(0o600)
        etc = {"slurm.conf": conf.slurm_conf(spec, self.folder, user_name())}
        etc |= {
            "gres.conf": conf.gres_conf(spec, self.folder),
            "job_submit.lua": conf.submit_lua(spec),
        }
        etc["cgroup.conf"] = conf.cgroup_conf(
            run(["slurmctld", "-V"], "slurmctld -V", 10, env=needs.CLEAN).stdout
        )
        for file, text in etc.items():
            (self.folder / "etc" / file).write_text(text)
        (self.folder / "spec.json").write_text(spec.text())
        write_scripts(self.folder)

        head, nodes, files = (
            self.host("head"),
            [self.host(node) for node in spec.names()],
            conf.hosts(spec),
        )
        head.start(files)
        head.wait_ready()
        for node in nodes:
            node.start(files, inside=head.pid)
        network.lay_bridge(head, spec)
        munge = [
            f"--{what}={self.folder}/munge/{what.split('-')[0]}"
            for what in ("key-file", "socket", "pid-file")
        ]
        head.call(
            [
                "munged",
                "--force",
                *munge,
                f"--log-file={self.folder}/munge/log",
                f"--seed-file={self.folder}/munge/seed",
            ]
        )
        head.call(["slurmctld", "-c"])
        for node in nodes:
            node.wait_ready()
            network.lay_cable(head, node, spec)
        self._await_controller()
        for node in nodes:
            self._start_slurmd(node)
        self._await_nodes(spec.names())
        (self.folder / "up").touch()

    def _start_slurmd(self, node):
        try:
            node.call(["slurmd", "-N", node.name])
        except RuntimeError as error:
            raise RuntimeError(
                f"{error}; {self._last(f'{node.name}/slurmd.log', 'slurmd')}"
            ) from None

    def _await_controller(self):
        ping = ["scontrol", "ping"]  # a slurmd that registers before it is up costs seconds
        wait(
            lambda: "is UP" in self.exec(ping, check=False).stdout,
            60,
            lambda: self._last("head/slurmctld.log", "slurmctld"),
        )

    def _await_nodes(self, names):
        wait(
            lambda: all(self.states().get(name) in _USABLE for name in names),
            60,
            lambda: (
                f"nodes are not usable: {self.states()}; "
                + self._last(f"{names[-1]}/slurmd.log", "slurmd")
            ),
        )

    def _last(self, log, daemon):
        path = self.folder / log
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        errors = (
            [line for line in lines if "error" in line or "fatal" in line] or lines or ["no log"]
        )
        return f"{daemon} is not ready: {errors[-1]} (see {path})"

    def down(self) -> None:
        """Remove the cluster: processes, mounts, interfaces, files. Fine if there is none, or half of one."""
        with alone(self.name):
            self._remove()

    def _remove(self):
        (self.folder / "up").unlink(missing_ok=True)
        for name in hosts_of(self.folder):
            self.host(name).stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            raise RuntimeError(f"{self.folder} could not be removed: remove it by hand")

    # --------------------------------------------------------------------------------------------------------- use

    @property
    def spec(self) -> conf.Spec:
        """What it emulates."""
        return conf.Spec.read(self.folder / "spec.json")

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
        """State of each node as sinfo writes it: idle, mix, alloc, down, ... with a * if it does not answer."""
        lines = self.exec(
            ["sinfo", "-h", "-N", "-o", "%N %t"], check=False, timeout_s=30
        ).stdout.splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def exec(
        self,
        argv,
        node: str | None = None,
        timeout_s: float = 60,
        check: bool = True,
        root: bool = False,
        input=None,
    ):
        """Run a command on the head, or on a node, in the folder and with the environment of the caller.

        Args:
            argv: Program and arguments.
            node: "n1", "n2", ...; None for the head.
            timeout_s: The command is ended after this time, and at once when the caller is interrupted.
            check: Raise if it fails.
            root: As the owner of the host's network and mounts; the same as without if the user is root.
            input: Text for its standard input.

        Returns:
            subprocess.CompletedProcess with stdout and stderr as text.

        Raises:
            RuntimeError: It failed; the last line of its errors is in the message.
            TimeoutError: The time is over.
        """
        host = self.host("head") if node in (None, "head") else self._node(node)
        argv = [str(word) for word in argv]
        done = run(host.command(argv, root), f"{' '.join(argv)} on {host.name}", timeout_s, input)
        if check and done.returncode:
            said = (
                done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            ).splitlines()[-1]
            raise RuntimeError(
                f"{' '.join(argv)} on {host.name} failed with exit code {done.returncode}: {said}"
            )
        return done

    def node(self, name: str, argv, **options):
        """`exec` on a node."""
        return self.exec(argv, node=name, **options)

    # --------------------------------------------------------------------------------------------- break and repair

    def kill(self, name: str) -> None:
        """Cut a node's power. SLURM notices within half a minute and requeues its jobs."""
        self._node(name).stop()
        network.unplug(self.host("head"), self.host(name))

    def boot(self, name: str) -> None:
        """Power a node on again, with its files as new; returns when it can take jobs. Fine for one that is on."""
        node, head = self._node(name), self.host("head")
        if node.pid:
            return
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

    def slow(self, name: str, rate: str, delay: str | None = None) -> None:
        """Limit a node's link, both ways, as in `slow("n2", "100mbit", "5ms")`; `slow("n2", "off")` undoes it."""
        network.slow(self.host("head"), self._node(name), rate, delay)

    def block(self, name: str, port) -> None:
        """Close a TCP port of a node, or a range such as "20000-29999", to everybody, as a firewall does."""
        network.block(self._node(name), port, True)

    def unblock(self, name: str, port) -> None:
        """Open it again."""
        network.block(self._node(name), port, False)
