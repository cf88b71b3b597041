"""The command line of the local cluster: `slurm/cluster up 2`, `exec sinfo`, `node n2 ip addr`, `down`."""

import argparse
import os
import sys

from labcode.minislurm import Cluster, running

_EXAMPLES = """\
examples:
  slurm/cluster up 2                          a head and two nodes, in about a second
  slurm/cluster exec sbatch job.sbatch        any command on the head: sinfo, squeue, scontrol, bash, ...
  slurm/cluster node n2 ip addr               any command on a node
  slurm/cluster slow n2 100mbit 5ms           a slow and long cable; `slow n2 off` undoes it
  slurm/cluster kill n2; slurm/cluster boot n2
  slurm/cluster up 2 --name h100 --cpus 96 --memory-mb 1000000 --gpus 8 --gpu-type h100
  slurm/cluster down
"""
# command -> (what it does, arguments after it)
_COMMANDS = {
    "up": ("start a cluster, or boot the nodes that are off", ()),
    "exec": ("run a command on the head node, in this folder", ("argv",)),
    "node": ("run a command on a node, in this folder", ("node", "argv")),
    "kill": ("cut a node's power", ("node",)),
    "boot": ("power it on again", ("node",)),
    "netdown": ("pull a node's network cable", ("node",)),
    "netup": ("put it back", ("node",)),
    "slow": (
        "limit a node's link: RATE such as 100mbit, DELAY such as 5ms; RATE off undoes it",
        ("node", "rate", "delay"),
    ),
    "block": ("close a TCP port of a node to everybody, as a firewall does", ("node", "port")),
    "unblock": ("open it again", ("node", "port")),
    "status": ("what is up, and each node's state", ()),
    "down": ("remove the cluster: processes, mounts, interfaces, files", ()),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm/cluster",
        description="A real multi-node SLURM on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument(
        "--name", default=argparse.SUPPRESS, help="which cluster, if you have several"
    )
    parser.add_argument("--name", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, parents=[named])
        for argument in arguments:
            if argument == "argv":
                command.add_argument(
                    "--root",
                    action="store_true",
                    help="as the owner of the host's network and mounts",
                )
                command.add_argument("argv", nargs=argparse.REMAINDER, metavar="CMD ...")
            else:
                command.add_argument(argument, nargs="?" if argument == "delay" else None)
    up = commands.choices["up"]
    up.add_argument("nodes", nargs="?", type=int, help="number of nodes (2)")
    for option, kind in (("cpus", int), ("memory-mb", int), ("gpus", int), ("gpu-type", str)):
        up.add_argument(f"--{option}", type=kind, help=f"{option} of each node, as SLURM is told")
    return parser


def _status(cluster: Cluster) -> None:
    spec, states = cluster.spec, cluster.states()
    kind, plural = f" {spec.gpu_type}" if spec.gpu_type else "", "s" if spec.nodes > 1 else ""
    each = f"{spec.cpus} CPUs, {spec.memory_mb} MiB, {spec.gpus} emulated{kind} GPUs"
    print(
        f"cluster {cluster.name!r} is up: {spec.nodes} node{plural}, each {each}; state and logs in {cluster.folder}"
    )
    for name, address in spec.addresses().items():
        power = "on" if cluster.host(name).pid else "off"
        print(f"  {name:5} {address:12} power {power:4} {states.get(name, '')}")


def _enter(cluster: Cluster, node: str, argv: list[str], root: bool) -> None:
    """Become the command: it has this terminal, and Ctrl-C."""
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        raise ValueError("no command was given: as in `slurm/cluster exec sinfo`")
    if node not in ("head", *cluster.spec.names()):
        raise ValueError(
            f"there is no node {node!r}: the cluster {cluster.name!r} has {', '.join(cluster.spec.names())}"
        )
    command = cluster.host(node).command(argv, root)
    sys.stdout.flush()
    os.execv(command[0], command)


def _do(args) -> None:
    """One command; those of `Cluster` that only take a node's name are called by theirs."""
    if args.command == "up":
        options = {key: getattr(args, key) for key in ("cpus", "memory_mb", "gpus", "gpu_type")}
        _status(Cluster.up(args.nodes, name=args.name, **options))
        return
    if args.command == "down":
        Cluster(args.name).down()
        print(f"cluster {args.name!r} is down, nothing is left of it")
        return
    cluster = running(args.name)
    if cluster is None:
        name = "" if args.name == "default" else f" --name {args.name}"
        raise ValueError(
            f"no cluster {args.name!r} is up: start it with `slurm/cluster up 2{name}`"
        )
    if args.command == "status":
        _status(cluster)
    elif args.command in ("exec", "node"):
        _enter(cluster, getattr(args, "node", "head"), args.argv, args.root)
    else:
        given = [getattr(args, name) for name in _COMMANDS[args.command][1]]
        getattr(cluster, args.command)(*given)


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit code: 0, 1 after an error (one line on stderr); `exec` and `node` end as their command does.
    """
    args = _parser().parse_args(argv)
    args.name = args.name or "default"
    try:
        _do(args)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"slurm/cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
