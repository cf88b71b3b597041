"""The command line of the local cluster: `slurm/cluster up 2`, `exec sinfo`, `down`."""

import argparse
import os
import sys
from collections.abc import Sequence

from labcode.minislurm import Cluster, names_up, running

_EXAMPLES = """\
examples:
  slurm/cluster up 2                          a head and two nodes, in about a second
  slurm/cluster exec sbatch job.sbatch        any command on the head: sinfo, squeue, scontrol, bash
  slurm/cluster node n2 ip addr               any command on a node
  slurm/cluster slow n2 100mbit               a slow network; `slow n2 off` undoes it
  slurm/cluster kill n2; slurm/cluster boot n2
  slurm/cluster up 2 --name h100 --cpus 96 --memory-mb 1000000 --gpus 8 --gpu-type h100
  slurm/cluster down
"""
# command -> (what it does, its arguments)
_COMMANDS = {
    "up": ("start a cluster, or boot the nodes that are off", ()),
    "exec": ("run a command on the head node, in this folder", ("argv",)),
    "node": ("run a command on a node, in this folder", ("node", "argv")),
    "kill": ("cut a node's power", ("node",)),
    "boot": ("power it on again", ("node",)),
    "netdown": ("pull a node's network cable", ("node",)),
    "netup": ("put it back", ("node",)),
    "slow": ("limit a node's link to a RATE such as 100mbit; `off` undoes it", ("node", "rate")),
    "block": ("close a TCP port of a node to everybody, as a firewall does", ("node", "port")),
    "unblock": ("open it again", ("node", "port")),
    "status": ("what is up, and each node's state", ()),
    "down": ("remove the cluster: processes, mounts, interfaces, files", ()),
}
# options of `up`, which are fields of `Spec` -> (type, help)
_SPEC_OPTIONS = {
    "cpus": (int, "CPUs of each node, as SLURM is told"),
    "memory-mb": (int, "memory of each node in MiB, as SLURM is told"),
    "gpus": (int, "fake GPUs of each node"),
    "gpu-type": (str, "their type, as in --gres=gpu:TYPE:N"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm/cluster",
        description="A real multi-node SLURM on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # --name may stand before or after the command. The one after it has no default, because that
    # would overwrite the one before.
    parser.add_argument("--name", default="default", help=argparse.SUPPRESS)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument(
        "--name", default=argparse.SUPPRESS, help="which cluster, if you have several"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, parents=[named])
        for argument in arguments:
            _add_argument(command, argument)
    up = commands.choices["up"]
    up.add_argument("nodes", nargs="?", type=int, help="number of nodes (2)")
    for option, (kind, text) in _SPEC_OPTIONS.items():
        up.add_argument(f"--{option}", type=kind, help=text)
    return parser


def _add_argument(command: argparse.ArgumentParser, argument: str) -> None:
    if argument != "argv":
        command.add_argument(argument)
        return
    command.add_argument(
        "--root", action="store_true", help="as the owner of the host's network and mounts"
    )
    command.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD ...")


def _print_status(cluster: Cluster) -> None:
    spec = cluster.spec
    plural = "s" if spec.nodes > 1 else ""
    kind = f"{spec.gpu_type} " if spec.gpu_type else ""
    print(
        f"cluster {cluster.name!r} is up: {spec.nodes} node{plural}, each {spec.cpus} CPUs, "
        f"{spec.memory_mb} MiB, {spec.gpus} fake {kind}GPUs; state and logs in {cluster.folder}"
    )
    dead = cluster.dead()
    states = {} if dead else cluster.states()
    for name, address in spec.addresses().items():
        power = "on" if cluster.host(name).pid else "off"
        print(f"  {name:5} {address:12} power {power:4} {states.get(name, '')}")
    for daemon in dead:
        print(f"  {daemon} does not answer: `slurm/cluster up --name {cluster.name}` starts it")
    names = [name for name in names_up() if name != cluster.name]
    if names:
        print(f"also up: {', '.join(names)}")


def _enter(cluster: Cluster, node: str, argv: Sequence[str], root: bool) -> None:
    """Become the command: it has this terminal, and Ctrl-C."""
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        raise ValueError("no command was given: as in `slurm/cluster exec sinfo`")
    nodes = cluster.spec.names()
    if node not in ("head", *nodes):
        raise ValueError(
            f"there is no node {node!r}: the cluster {cluster.name!r} has {', '.join(nodes)}"
        )
    command = cluster.host(node).command(argv, root)
    sys.stdout.flush()
    os.execv(command[0], command)


def _do(args: argparse.Namespace) -> None:
    if args.command == "up":
        fields = [option.replace("-", "_") for option in _SPEC_OPTIONS]
        options = {name: getattr(args, name) for name in fields}
        _print_status(Cluster.up(args.nodes, name=args.name, **options))
    elif args.command == "down":
        Cluster(args.name).down()
        print(f"cluster {args.name!r} is down, nothing is left of it")
    else:
        _do_with(_cluster(args.name), args)


def others() -> str:
    """The clusters that are up, to end a sentence that misses one; "" if there are none."""
    names = names_up()
    return f"; up: {', '.join(names)} (name one with --name)" if names else ""


def _cluster(name: str) -> Cluster:
    cluster = running(name)
    if cluster is None:
        option = "" if name == "default" else f" --name {name}"
        raise ValueError(
            f"no cluster {name!r} is up: start it with `slurm/cluster up 2{option}`{others()}"
        )
    return cluster


def _do_with(cluster: Cluster, args: argparse.Namespace) -> None:
    """One command on a cluster that is up."""
    if args.command == "status":
        _print_status(cluster)
    elif args.command == "exec":
        _enter(cluster, "head", args.argv, args.root)
    elif args.command == "node":
        _enter(cluster, args.node, args.argv, args.root)
    else:
        # The other commands are methods of `Cluster` of the same name.
        _, names = _COMMANDS[args.command]
        values = [getattr(args, name) for name in names]
        getattr(cluster, args.command)(*values)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0, or 1 after an error (one line on stderr); `exec` and `node` end as their
        command does.
    """
    args = _parser().parse_args(argv)
    try:
        _do(args)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"slurm/cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
