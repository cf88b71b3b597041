"""What can go wrong in a job, as a table: how its output says so, what it means, what to do.

A kind has an order, because one failure makes many lines. What one process does by itself is a
cause. An end from outside comes next: the time limit, a node that fails. A rank that waits too long
says that another one did not come. Last are those that only see that another is gone.

Source: the words are those of SLURM 25.05 (slurmstepd, srun), PyTorch 2.13, NCCL 2.30, CUDA 13 and
    Linux; older forms are from public reports of PyTorch, NCCL, Lightning, Megatron and DeepSpeed.
    Which Xid is a program's own fault: NVIDIA's k8s-device-plugin 0.20, internal/rm/health.go.
Held by: tests/unit/test_job_log.py
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache


class Order(IntEnum):
    """What comes before what, whatever the order of the lines."""

    CAUSE = 0  # of one process
    OUTSIDE = 1  # SLURM or a person ended the job
    WAITED = 2  # for a rank that did not come
    ENDED = 3  # a process has ended, and nothing says why
    FOLLOWED = 4  # another process is gone, or this one was ended because of it


@dataclass(frozen=True)
class Kind:
    """One kind of failure.

    Args:
        name: Name in few words.
        signs: Regular expressions; one that is found in a line is enough. "" is set by the reader.
        means: What it means, in one or two sentences.
        do: What to do; "" where nothing helps but the cause.
        order: Cause or consequence.
        because: Names of kinds that explain this one, wherever they stand in the log.
    """

    name: str
    signs: tuple[str, ...]
    means: str
    do: str = ""
    order: Order = Order.CAUSE
    because: tuple[str, ...] = ()


GPU_MEMORY = "out of GPU memory"
HOST_MEMORY = "out of host memory"
SHARED_MEMORY = "shared memory is too small"
OPEN_FILES = "too many open files"
DISK = "no room on the disk"
KILLED = "killed by SIGKILL"
CRASHED = "crashed"
BUS_ERROR = "bus error"
ABORTED = "aborted"
TERMINATED = "ended by SIGTERM"
EXITED = "exited without a reason"
TIME_OUT = "time-out of a collective"
EXCEPTION = "Python exception"
OWN_ERROR = "error"
IMPORT = "import failed"
STEP_CANCELLED = "the step was cancelled"
PEER_GONE = "another rank is gone"
ENDED_WITH = "ended because of the others"
NOT_MET = "the ranks did not all meet"
SAME_RANK = "the same rank was started twice"
NOT_FINITE = "the loss is not finite"
NCCL_FAILED = "NCCL failed"
NCCL_WARNING = "NCCL warns"

# The first kind of which a sign is in the line counts: the special ones come first.
KINDS: tuple[Kind, ...] = (
    # lines that look like a failure and are none
    Kind(
        "",
        (
            r"hostname of the client socket cannot be retrieved",
            r"OMP_NUM_THREADS environment variable for each process to be 1",
            r"Plugin load .*(?:cannot open shared object|No such file)",
            r"NET/Plugin\b.*(?:cannot open shared object|No such file|not find)",
            r"retry(?:ing)? (?:in|after)\b|will retry|couldn't chdir to",
            r"Failed to send MESSAGE_TASK_EXIT",
            r"^\s*(?:#|\+ |export |echo )",
            r"CUDA kernel errors might be asynchronously|For debugging consider passing CUDA",
            r"Compile with `TORCH_USE_CUDA_DSA`|Device-side assert(?:ion)?s? (?:tracking|were)",
        ),
        "",
    ),
    # ---- a line that lists what may have been, and knows nothing
    Kind(
        "a worker of Ray has ended",
        (
            r"A worker died or was killed while executing|worker process has died",
            r"Worker exit type: ",
        ),
        "Ray lost a process and does not know why; the causes that it lists are guesses",
        "look at that worker's own files (session_latest/logs/worker-*PID*), and at dmesg there",
        Order.ENDED,
    ),
    # ---- a line that has a reason of its own, whatever else it looks like
    Kind(
        "the container did not start",
        (
            r"pyxis: (?:couldn't|unable|  +\S)",
            r"FATAL: +(?:[Cc]ontainer|[Cc]ould not open image|[Ww]hile|[Uu]nable to handle)",
            r"docker: Error response from daemon",
        ),
        "the image, a mount or a hook of the container failed on this node, before the program "
        "began",
        "start it there by hand (enroot start, apptainer exec) with the same mounts; if it is one "
        "node alone, tell the administrators",
    ),
    # ---- memory
    Kind(
        GPU_MEMORY,
        (
            r"(?:CUDA|HIP|XPU) out of memory",
            r"CUDA error: out of memory",
            r"[Cc]uda failure (?:\d+ )?'out of memory'",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"cudaErrorMemoryAllocation",
        ),
        "the GPU has no memory left for what this rank was about to allocate",
        "smaller micro-batch or sequence, activation checkpointing, or sharding (FSDP, ZeRO); if "
        "one rank alone says so, look whether another process sits on its GPU (nvidia-smi) or its "
        "batch is the longest",
    ),
    Kind(
        SHARED_MEMORY,
        (
            r"insufficient shared memory",
            r"workers are out of shared memory",
            r"unable to (?:open|mmap|allocate|resize) (?:\S+ )*shared memory",
            r"[Ee]rror while creating shared memory segment",
            r"/dev/shm\S*.*No space left on device|No space left on device.*(?:/dev/shm|/torch_)",
            r"DataLoader worker .*killed by signal: Bus error",
        ),
        "the shared memory of this machine or container (/dev/shm) is full: DataLoader workers and "
        "NCCL hand data over through it",
        "docker run --shm-size=8g or --ipc=host (Kubernetes: an emptyDir in memory on /dev/shm), "
        "or fewer workers",
    ),
    Kind(
        HOST_MEMORY,
        (
            r"\boom[-_ ]?kill",
            r"OOMKilled|OOM Killed|OOM Killer",
            r"Out of memory: Kill",
            r"srun: error: .*: Out Of Memory",
            r"[Ee]xceeded (?:\w+ )*memory limit|TERM_MEMLIMIT",
            r"DefaultCPUAllocator: (?:not enough|can't allocate) memory",
            r"\b_?(?:Array)?MemoryError\b",
            r"^(?!.*ibv_).*Cannot allocate memory|\[Errno 12\]",
            r"std::bad_alloc",
            r"error: .*not enough memory",
        ),
        "the processes took more memory of the machine than the job was given, and the kernel or "
        "SLURM killed one of them; this is not the memory of the GPU",
        "ask for more (--mem, --mem-per-cpu), or fewer DataLoader workers and nothing that every "
        "rank loads whole; `sacct -j JOB --format=JobID,MaxRSS,ReqMem` shows how much was used",
    ),
    Kind(
        "a DataLoader worker was killed",
        (
            r"DataLoader worker \(pid.*\) is killed by signal: Killed",
            r"DataLoader worker \(pid.*\) exited unexpectedly",
        ),
        "a process that loads data is gone; nearly always the machine's memory did not suffice",
        "fewer workers or more memory (--mem); with num_workers=0 the error itself is shown",
        because=(HOST_MEMORY, SHARED_MEMORY, OPEN_FILES),
    ),
    # ---- limits of a user
    Kind(
        "no more threads or processes",
        (
            r"pthread_create failed|[Tt]hread creation failed|can't start new thread",
            r"unable to allocate necessary resources for OMP",
            r"(?:fork|clone|BlockingIOError)\b.*Resource temporarily unavailable",
        ),
        "the user or the container may have no more threads: every rank starts as many as the node "
        "has cores, for OpenMP and BLAS, and each DataLoader worker does so again",
        "OMP_NUM_THREADS=1 (and OPENBLAS_NUM_THREADS), fewer workers; `ulimit -u` and the pids.max "
        "of the job's cgroup tell the limit",
    ),
    Kind(
        OPEN_FILES,
        (r"[Tt]oo many open files|items of ancdata",),
        "the process may open no more files, and each tensor of a DataLoader worker is one",
        'torch.multiprocessing.set_sharing_strategy("file_system") at the start, or ulimit -n '
        "65536 in the job; and keep no tensors of the loader in a list",
    ),
    # ---- the GPU
    Kind(
        "an index out of bounds on the GPU",
        (
            r"device-side assert",
            r"Assertion `.*` failed\.?$",
            r"(?:index out of bounds|srcIndex < srcSelectDimSize)",
        ),
        "a kernel found a value that it cannot use, mostly a label or a token id as large as the "
        "number of classes or the vocabulary, or larger; all later CUDA calls of this rank fail "
        "too",
        "compare the largest id with the size of the layer; CUDA_LAUNCH_BLOCKING=1 once, or the "
        "same batch on the CPU, shows the line",
    ),
    Kind(
        "no such GPU",
        (r"invalid device ordinal|cudaErrorInvalidDevice\b",),
        "the rank asks for a GPU with a number that it does not see: more ranks than GPUs on this "
        "node, or SLURM shows each task one GPU, as number 0 (--gpus-per-task, --gpu-bind)",
        "print CUDA_VISIBLE_DEVICES in each rank; use device 0 where each sees one GPU, else "
        "LOCAL_RANK (SLURM_LOCALID)",
    ),
    Kind(
        "the fabric manager is not ready",
        (
            r"system not yet initialized",
            r"Failed to \w+ NVLink SHARP|error in the Fabric Manager or NVSwitches",
            r"transport/nvls\.cc\S* NCCL WARN",
        ),
        "the GPUs of this node have no NVSwitch: its fabric manager does not run, or was started "
        "again without the GPUs",
        "tell the administrators the node: the GPUs have to be reset after the fabric manager; "
        "without multicast alone (NVLS), NCCL_NVLS_ENABLE=0 goes around it and is slower",
    ),
    Kind(
        "a GPU is broken",
        (
            r"uncorrectable (?:ECC|NVLink) error|ECC error|double.bit ECC",
            r"\bXid \([^)]*\): (?!(?:13|31|43|45|68|109)\b)\d",
            r"fallen off the bus|GPU is lost",
            r"NVLink.*(?:error|failure)|cudaErrorNvlinkUncorrectable",
        ),
        "the hardware of this node's GPU failed",
        "tell the administrators the node and the line; submit again with --exclude=NODE",
    ),
    Kind(
        "illegal memory access on the GPU",
        (
            r"illegal memory access|cudaErrorIllegalAddress",
            r"misaligned address|unspecified launch failure|illegal instruction was encountered",
            r"\bXid \([^)]*\): (?:13|31|43)\b",
        ),
        "a kernel of this rank read or wrote memory that is not its own: a custom kernel, an "
        "index, a tensor of another device or one that was freed, rarely the hardware",
        "run once with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer; if it is always the "
        "same node, without that node",
    ),
    Kind(
        "the driver and its library differ",
        (r"[Dd]river/library version mismatch|system has unsupported display driver",),
        "the driver of this node was upgraded while the old one is still loaded, or a container "
        "brings a libcuda of its own",
        "tell the administrators: the node needs a reboot; take another one until then; in a "
        "container look for libcuda.so in LD_LIBRARY_PATH",
    ),
    Kind(
        "the driver is too old",
        (
            r"driver (?:version )?(?:on your system )?is (?:too old|insufficient)",
            r"forward compatibility was attempted",
            r"unsupported (?:toolchain|PTX version)",
        ),
        "PyTorch was built for a newer CUDA than the driver of this node knows",
        "another node, or a build of PyTorch for an older CUDA (`nvidia-smi` shows the newest that "
        "the driver takes)",
    ),
    Kind(
        "PyTorch has no code for this GPU",
        (r"no kernel image is available|not compatible with the current PyTorch installation",),
        "this build of PyTorch does not support GPUs of this generation",
        "install a build for the GPU's architecture (torch.cuda.get_arch_list())",
    ),
    Kind(
        "no GPU is seen",
        (
            r"No CUDA GPUs are available|no CUDA-capable device|Found no NVIDIA driver",
            r"Torch not compiled with CUDA enabled",
            r"(?:ProcessGroupNCCL|nccl).*(?:no GPUs found|requires GPUs)",
        ),
        "this process sees no GPU: none was asked for, CUDA_VISIBLE_DEVICES is empty, or PyTorch "
        "is a build for CPUs",
        "ask for GPUs (--gpus-per-node), and look at nvidia-smi and torch.version.cuda on that "
        "node",
    ),
    Kind(
        "the GPU is in use or not ready",
        (r"busy or unavailable",),
        "another process holds the GPU exclusively, or it is being reset",
        "look at nvidia-smi on that node; tell the administrators",
    ),
    # ---- disk, rights, programs
    Kind(
        DISK,
        (
            r"No space left on device|\[Errno 28\]",
            r"[Dd]isk quota exceeded|\[Errno 122\]|quota exceeded",
            r"PytorchStreamWriter failed|unexpected pos \d+ vs \d+|file write failed",
        ),
        "the file system or your quota is full, so that a file could not be written whole",
        "make room (df -h, quota), or write checkpoints elsewhere; the last file may be cut short: "
        "resume from the one before",
    ),
    Kind(
        "the file system failed",
        (
            r"Stale file handle|Input/output error|Remote I/O error",
            r"[Tt]ransport endpoint (?:is not connected|shutdown)",
        ),
        "the file server did not answer as it should: it was restarted, another rank replaced the "
        "file meanwhile, or it is overloaded",
        "try again; caches and locks that many ranks write (HF_HOME, TRITON_CACHE_DIR) belong on "
        "the node's own disk, or one rank writes them first",
    ),
    Kind(
        "a file may not be used",
        (
            r"PermissionError|\[Errno 13\]",
            r"execve\(\): .*: Permission denied",
            r"^(?:\S*/)?(?:bash|sh|slurm_script): .*Permission denied",
            r"Read-only file system",
        ),
        "the job's user may not read, write or run this file on this node",
        "look at it on that node: ls -l, chmod +x for a script, another folder for caches "
        "(HF_HOME, TRITON_CACHE_DIR)",
    ),
    Kind(
        "no way to the internet",
        (
            r"Max retries exceeded|LocalEntryNotFoundError|OfflineModeIsEnabled",
            r"(?:huggingface|github|pypi|wandb|openaipublic)\S*.*(?:resolve|Connection|timed out)",
            r"couldn't connect to '?https?:|We couldn't connect to",
        ),
        "the job wants to download something, and compute nodes of most clusters reach no other "
        "network",
        "download it on the login node into a shared folder, then HF_HUB_OFFLINE=1, "
        "WANDB_MODE=offline",
    ),
    Kind(
        IMPORT,
        (
            r"(?:ModuleNotFoundError|ImportError)\b",
            r": No module named ",
            r"cannot open shared object file",
            r"version `(?:GLIBC|GLIBCXX|CXXABI)\S*' not found",
            r"undefined symbol:",
        ),
        "the Python that runs there lacks this package or library, or has another version of it",
        "compare `which python` and the modules on that node with those of the others: a container "
        "or environment that is not mounted there, a module that was not loaded",
    ),
    Kind(
        "a program was not found",
        (
            r"^(?:\S*/)?[\w.-]+: (?:line )?\d+: .*: (?:command )?not found",
            r"^-?(?:bash|zsh): .*: (?:command )?not found",
            r"execve\(\): \S+: No such file",
            r"^(?:\S*/)?(?:bash|sh|slurm_script): .*: No such file or directory",
            r"can't open file .*\[Errno 2\]",
            r"Lmod has detected the following error|Unable to locate a modulefile",
            r"The following module\(s\) are unknown",
            r"CondaError: Run 'conda init'|EnvironmentNameNotFound|EnvironmentLocationNotFound",
            r"Could not find conda environment|Your shell has not been properly configured to use",
            r"error: .* not found in .?PATH",
        ),
        "a command, module, environment or script that the job names is not there on this node",
        "in the batch script: module load first, `source .../conda.sh` before `conda activate`, "
        "whole paths; the environment of the login shell is not that of the job",
    ),
    Kind(
        "wrong options",
        (r"^\S+\.py: error: |error: unrecognized arguments|Override '.*' not found",),
        "the program does not take the options that it was given",
        "compare them with its --help; torch.distributed.launch adds --local-rank, from PyTorch "
        "2.0 on with a dash: start with torchrun, and read LOCAL_RANK from the environment",
    ),
    # ---- ends from outside
    Kind(
        "the time limit",
        (
            r"CANCELLED AT .* DUE TO TIME LIMIT",
            r"walltime \S+ exceeded limit|TERM_RUNLIMIT|DUE to job's time limit",
        ),
        "SLURM ended the job because its time was over; nothing has to be wrong with it",
        "more --time, or checkpoints with --signal and --requeue so that the next job resumes; if "
        "no step was done for long before, the ranks hung",
        Order.OUTSIDE,
    ),
    Kind(
        "preempted",
        (r"CANCELLED AT .* DUE TO PREEMPTION|DUE TO PREEMPTION",),
        "a job with more priority took the nodes",
        "--requeue and a checkpoint from which it resumes, or a QOS that is not preempted",
        Order.OUTSIDE,
    ),
    Kind(
        "a node failed",
        (
            r"DUE TO NODE FAIL|Node failure on|STEPD TERMINATED|Node \S+ (?:is )?not respond",
            r"node \S+ (?:went down|is down)",
        ),
        "SLURM lost a node of the job: power, kernel or network; the ranks of the others only see "
        "that theirs are gone",
        "submit again, with --exclude=NODE if it happens twice; checkpoints save the work",
        Order.OUTSIDE,
    ),
    Kind(
        "requeued",
        (r"DUE TO JOB REQUEUE",),
        "the job was put back into the queue; what stands above it belongs to an earlier attempt",
        "",
        Order.OUTSIDE,
    ),
    Kind(
        "cancelled",
        (
            r"\*\*\* JOB \S+ ON .*CANCELLED AT",
            r"\bJOB \d+ CANCELLED\b",
            r"^KeyboardInterrupt\b|signal: 2\b.*SignalException|SignalException: .* signal: [12]\b",
        ),
        "somebody ended the job: scancel, Ctrl-C, or a terminal that was closed",
        "",
        Order.OUTSIDE,
    ),
    # ---- SLURM refuses
    Kind(
        "SLURM does not take the account",
        (r"Invalid account or account/partition|Invalid qos specification|User's group not perm",),
        "the account, partition or QOS is not one that you may use together",
        "`sacctmgr show assoc user=$USER` lists what you may use",
    ),
    Kind(
        "srun cannot bind the cores",
        (
            r"CPU binding outside of job step allocation",
            r"Unable to satisfy cpu bind request|--cpu-bind=\S+ .*(?:invalid|outside)",
        ),
        "the step is told cores that its job does not have, often by SLURM_CPU_BIND of another job",
        "unset SLURM_CPU_BIND before srun, or --cpu-bind=none; submit from a shell that is no job",
    ),
    Kind(
        "two settings of memory exclude each other",
        (r"SLURM_MEM_PER_\w+.*mutually exclusive|mutually exclusive",),
        "the step has inherited a memory setting of another kind than the job's own",
        "unset SLURM_MEM_PER_CPU SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU before sbatch or srun",
    ),
    Kind(
        "srun could not create the step",
        (
            r"Unable to create step for job",
            r"(?:More processors requested than permitted|Requested node configuration is not)",
            r"Memory required by task is not available",
            r"Invalid generic resource",
        ),
        "the step asks for more cores, memory, GPUs or tasks than the job has, or another step "
        "holds them",
        "compare srun's -n, -c, --gpus and --mem with the #SBATCH lines; steps side by side need "
        "--exact; in 22.05 and 23.02 srun takes --cpus-per-task from SRUN_CPUS_PER_TASK",
    ),
    Kind(
        "srun could not launch the tasks",
        (r"Task launch for StepId=\S+ failed|Application launch failed|task \d+ launch failed",),
        "the step was granted, and a node did not start its tasks: its slurmd, or a plugin such as "
        "PMIx or the container's",
        "compare with `srun --mpi=none hostname` on the same nodes; tell the administrators the "
        "node, and take another one with --exclude=NODE",
    ),
    Kind(
        "SLURM refused the command",
        (
            r"(?:sbatch|salloc): (?:error|fatal): ",
            r"srun: fatal: ",
            r"srun: error: (?!.*(?:tasks? \d|Timed out waiting|Terminated))"
            r"(?!.*(?:step_launch|eio_|slurm_receive|Job step (?:\S+ )?aborted))",
        ),
        "SLURM says why in this line",
        "",
    ),
    # ---- the ranks meet
    Kind(
        "the port is taken",
        (r"EADDRINUSE|Address already in use|errno: 98\b",),
        "another process listens at MASTER_PORT on this machine: a second job on the node, or one "
        "that has not ended",
        "another MASTER_PORT for each job, such as $((10000 + SLURM_JOB_ID % 50000)), or torchrun "
        "--standalone on one node",
    ),
    Kind(
        "a host's name is unknown",
        (
            r"Name or service not known|Temporary failure in name resolution|\bgaierror\b",
            r"nodename nor servname|No address associated with hostname",
            r"addresses of \(\S+, \d+\) cannot be retrieved|Could not resolve host",
        ),
        "the name in MASTER_ADDR or --rdzv-endpoint leads nowhere on this node",
        'take it from SLURM: MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head '
        "-n 1), or give an IP address",
    ),
    Kind(
        "no launcher has set the variables",
        (r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected",),
        "init_process_group was called in a process that neither torchrun nor your script gave a "
        "rank; srun sets SLURM_PROCID only",
        "start with torchrun, or export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS "
        "LOCAL_RANK=$SLURM_LOCALID inside each task",
    ),
    Kind(
        "another node cannot be reached",
        (
            r"No route to host|Network is unreachable|EHOSTUNREACH",
            r"failed : Software caused connection abort",
            r"[Cc]onnect to (?:127|169\.254)\.[\d.]+<\d+>",
        ),
        "the packets of this node do not arrive there: another network, a firewall, an interface "
        "that leads nowhere",
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the interface that the nodes share "
        "(`ip -br addr`)",
    ),
    Kind(
        SAME_RANK,
        (r"rank \d+ of \d+ ranks has already checked in|have assigned same rank",),
        "two processes have the same rank and others are missing, so that all wait: the program "
        "counts other processes than those that were started",
        "with srun one task for each GPU (--ntasks-per-node = devices, the same --nodes as the "
        "program is told); with torchrun the same --nnodes and one --node-rank for each node",
    ),
    # ---- NCCL's own
    Kind(
        "NCCL finds no network interface",
        (r"no socket interface found|No IP interface found|No usable listening interface",),
        "NCCL_SOCKET_IFNAME names an interface that this machine does not have, or there is none "
        "beside lo",
        "`ip -br addr` on that node, and set it to the beginning of a name there, or unset it",
    ),
    Kind(
        "two ranks use one GPU",
        (r"Duplicate GPU detected",),
        "two ranks of one communicator chose the same GPU, and NCCL refuses that",
        "torch.cuda.set_device(LOCAL_RANK) before the first collective, and no more ranks than "
        "GPUs",
    ),
    Kind(
        "the nodes have different versions of NCCL",
        (
            r"NCCL version mismatch|[Mm]ismatch(?:ed)? (?:in )?NCCL version",
            r"Message truncated : received|unexpected (?:magic|type)|wrong (?:type|magic) \S+ != ",
            r"mismatch in info from procs",
        ),
        "the ranks do not speak the same protocol: other versions of NCCL or PyTorch, or two jobs "
        "that met at one port",
        "one environment for all nodes: python -c 'import torch; print(torch.cuda.nccl.version())' "
        "on each; a port of its own for each job",
    ),
    Kind(
        "NCCL finds no network plugin",
        (
            r"Failed to initialize (?:any )?NET plugin$|Error: network \S+ not found",
            r"NCCL WARN NET/OFI .*initialization failed",
        ),
        "the network that NCCL_NET names is not there, is switched off, or did not start",
        "unset NCCL_NET, or load the plugin (NCCL_NET_PLUGIN, LD_LIBRARY_PATH)",
    ),
    Kind(
        "an InfiniBand call failed",
        (
            r"ibv_\w+ failed|Call to ibv_\w+ failed",
            r"NET/IB ?: Unable to (?:open|query)",
        ),
        "the InfiniBand card of this node refused: too little memory may be locked (ulimit -l), or "
        "the port is down",
        "ulimit -l unlimited in the job (docker: --ulimit memlock=-1), ibstat on that node",
    ),
    Kind(
        "an InfiniBand card reports an error",
        (r"NET/IB ?: .*(?:async (?:fatal )?event|fatal .*event|port error|link.*down)",),
        "the card of this node tells of an error: its port went down, a message "
        "asked for memory that it may not reach, or its firmware failed",
        "on that node ibstat, dmesg (mlx5) and ibqueryerrors: a link that goes up and down needs "
        "another cable; NCCL_IB_HCA should name only cards that reach the other nodes",
    ),
    Kind(
        "a message through the network did not arrive",
        (
            r"NET/\w+ ?:? ?.*completion .*(?:status|error)\W*\d+",
            r"NET/\w+ .*completed with error|UNDELIVERABLE",
        ),
        "the card tried again until its retries were used up (status 12), or the other side is "
        "gone: a bad cable or port, a wrong NCCL_IB_GID_INDEX on RoCE, or a rank there that died",
        "look at the host of the peer in this line, and whether a process there ended before; then "
        "ibstat and the switch; NCCL_IB_TIMEOUT=22 bridges short disturbances",
        Order.WAITED,
    ),
    # ---- waiting
    Kind(
        TIME_OUT,
        (
            r"Watchdog caught collective operation timeout",
            r"a collective has timed out: ",
            r"^hang: ",
            r"Timed out waiting \d+ms for (?:recv|send) operation",
            r"Ranks? [\d, ]+ failed to pass monitoredBarrier",
            r"watchdog got stuck for|monitor thread timeout|No PGNCCL's watchdog heartbeat",
        ),
        "ranks waited in a collective for one that did not come",
        "look at what the rank that did not come did: an evaluation or a save on one rank alone, "
        "fewer batches there, an if that not all enter, a crash; py-spy dump of it while it hangs; "
        "work that takes long on purpose needs init_process_group(timeout=...)",
        Order.WAITED,
    ),
    Kind(
        "gloo cannot reach another rank",
        (
            r"gloo.*(?:[Rr]efused|timed out|[Nn]o route|no error)",
            r"connectFullMesh failed",
        ),
        "gloo tells the others the address that the host's own name leads to; where that is "
        "127.0.1.1 (/etc/hosts) or a network that the others do not share, nobody can connect",
        "GLOO_SOCKET_IFNAME=INTERFACE on each node, the whole name of the one that leads to the "
        "others (`ip -br addr`), or correct /etc/hosts",
        Order.WAITED,
    ),
    Kind(
        NOT_MET,
        (
            r"RendezvousTimeoutError|RendezvousConnectionError",
            r"client socket has timed out|connect\(\) timed out|wait timeout after \d+",
            r"store.based barrier.*(?:timed out|timeout)",
            r"[Tt]imed out .*(?:store|waiting for clients)",
            r"DistStoreError|DistNetworkError",
            r"client socket has failed to connect to.*(?:refused|errno: 111|errno: 110|timed out)",
            r"[Cc]onnect.*(?:refused|timed out)|ECONNREFUSED|ETIMEDOUT",
        ),
        "not every rank came to the meeting place (MASTER_ADDR, --rdzv-endpoint) in time: one of "
        "them died or was never started, the address or port is wrong or behind a firewall, or the "
        "number of nodes is not what was launched",
        "look at the ranks that are missing; MASTER_ADDR must be the first node's name as the "
        "others know it, the same port for all, --nnodes what SLURM started",
        Order.WAITED,
    ),
    # ---- consequences
    Kind(
        PEER_GONE,
        (
            r"[Cc]onnection (?:reset|closed|was closed|aborted)(?: by (?:remote )?peer)?",
            r"[Bb]roken pipe|EPIPE|ECONNRESET",
            r"ncclRemoteError|remote process exited or there was a network error",
            r"NCCL communicator was aborted|ncclCommAbort|was aborted on rank",
            r"Socket recv failed|socketProgress|Call to (?:recv|send|connect|read)\b.* failed",
            r"[Pp]roxy Call to rank \d+ failed|Accept failed|[Ss]ocket [Tt]imeout|Stop_waiting",
            r"store->(?:get|set|check)\(.*got error",
            r"(?:send|recv)\w+ failed on SocketImpl|failed to recv, got \d+ bytes",
            r"^rank \d+: .*(?:has ended|is gone|does not answer|lost)",
            r"\bEOFError\b",
        ),
        "this rank was talking to one that has ended; it is not where the fault lies",
        "look at the rank or host that it names, and at the logs of all ranks from the same moment",
        Order.FOLLOWED,
    ),
    Kind(
        ENDED_WITH,
        (
            r"closing signal SIGTERM|forcefully exiting via|Terminating StepId",
            r"ChildFailedError|ProcessRaisedException|SignalException|RendezvousClosedError",
            r"Received (?:SIGTERM|signal 15)|got signal: 15|Bypassing SIGTERM|Caught SIGTERM",
            r"killed by signal: Terminated",
            r"Job step aborted|Force Terminated|Timed out waiting for job step",
            r"entire process down|Some NCCL operations have failed or timed out",
            r"watchdog thread terminated with exception: (?:\[Rank|NCCL)",
            r"(?:CalledProcessError|returned non-zero exit status)(?!.*SIG(?:KILL|SEGV|BUS))",
            r"Terminated\s*$",
            r"\bXid \([^)]*\): 45\b",
        ),
        "the launcher or the driver ended this process after another one had failed",
        "",
        Order.FOLLOWED,
    ),
    Kind(
        STEP_CANCELLED,
        (r"\*\*\* STEP \S+ ON .*CANCELLED AT",),
        "SLURM ended the step: scancel, or a task that failed under srun --kill-on-bad-exit",
        "look at what the tasks said before",
        Order.ENDED,
    ),
    # ---- processes that crash
    Kind(
        CRASHED,
        (
            r"Segmentation fault|SIGSEGV|SIGILL|SIGFPE",
            r"Illegal instruction|Floating point exception",
            r"double free or corruption|free\(\): invalid|malloc\(\): |corrupted size vs",
            r"Caught signal \d+",
        ),
        "the process was ended by an error in C code: a package built for another PyTorch, CUDA or "
        "processor, or two packages that bring the same library",
        "python -X faulthandler shows the Python line; reinstall the package that stands there for "
        "this PyTorch",
    ),
    Kind(
        BUS_ERROR,
        (r"\bBus error\b|SIGBUS",),
        "the process touched memory that nothing stands behind: nearly always /dev/shm is full, "
        "else a mapped file was cut short or lies on a file system that failed",
        "df -h /dev/shm; docker run --shm-size=8g or --ipc=host, fewer DataLoader workers; then "
        "look at the files that are mapped",
        because=(SHARED_MEMORY, DISK),
    ),
    Kind(
        NOT_FINITE,
        (
            r"(?:FloatingPointError|ValueError|RuntimeError|AssertionError)\b"
            r".*\b(?:[Nn]a[Nn]|inf)\b",
            r"[Ll]oss (?:is|=|became|:) ?(?:nan|inf|infinite|NaN|non-finite|not finite)\b",
            r"[Nn]on-finite (?:loss|gradient)|not finite",
        ),
        "the loss or the gradients became NaN or infinite: the learning rate, a batch, or fp16 "
        "without a scaler",
        "look at the steps before; gradient clipping, a lower rate, bf16 in place of fp16; keep "
        "the batch and run it alone",
    ),
    Kind(
        "DDP waits for unused parameters",
        (r"Expected to have finished reduction in the prior iteration",),
        "some parameters took no part in the loss of a step, on one rank or on all, and DDP waits "
        "for their gradients",
        "use every parameter, or find_unused_parameters=True",
    ),
    Kind(
        "the ranks call different collectives",
        (r"Detected mismatch between collectives on ranks|Culprit rank \d+; .*MISMATCH",),
        "two ranks are at different places of the program, or give tensors of other shapes",
        "let every rank make the same calls in the same order",
    ),
    Kind(
        KILLED,
        (
            r"^(?:.*: line \d+: +\d+ )?Killed\b",
            r"exit(?:ed with exit)? code:? 137\b|Signals\.SIGKILL",
        ),
        "somebody or the kernel killed this process without a warning: nearly always memory, else "
        "by hand or by the launcher after another had failed",
        "dmesg -T on that node, or `sacct -j JOB --format=JobID,State,MaxRSS`; then as for memory",
        because=(HOST_MEMORY,),
    ),
    # ---- set by the reader: ends of processes, exceptions without a kind of their own
    Kind(
        ABORTED,
        (
            r"Aborted\s*(?:\(core dumped\))?$|killed by signal: Aborted",
            r"terminate called after throwing",
        ),
        "the process ended itself (SIGABRT): an error in C++ code, which stands above, or "
        "PyTorch's watchdog",
        "read the lines above it",
        Order.ENDED,
    ),
    Kind(
        TERMINATED,
        (),
        "the process was asked to end: by its launcher, by SLURM, or by somebody",
        "",
        Order.FOLLOWED,
    ),
    Kind(
        EXITED,
        (),
        "the process ended with an error code and said nothing that is known here",
        "look at the last lines of that rank",
        Order.ENDED,
    ),
    Kind(EXCEPTION, (), "the program raised this error itself", "its line and file stand above it"),
    Kind(
        OWN_ERROR,
        (r"^error: ",),
        "the training ended with this error",
        "",
    ),
    Kind(
        "a CUDA call failed",
        (r"CUDA error[: ]|[Cc]uda failure |CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|cuDNN error",),
        "a call of CUDA on this rank failed",
        "run once with CUDA_LAUNCH_BLOCKING=1: the line that it names may be a later one",
    ),
    Kind(
        NCCL_FAILED,
        (
            r"NCCL error in|unhandled (?:system|cuda) error|ncclSystemError|ncclUnhandledCudaError",
            r"ncclInternalError|ncclInvalidUsage|ncclInvalidArgument|DistBackendError",
        ),
        "a call of NCCL failed, and this line does not say why",
        "run again with NCCL_DEBUG=WARN, which names the reason and the host",
        Order.WAITED,
    ),
    Kind(
        NCCL_WARNING,
        (r"NCCL WARN ",),
        "NCCL reports an error",
        "run again with NCCL_DEBUG=INFO for what came before",
        Order.ENDED,
    ),
)
BY_NAME = {kind.name: kind for kind in KINDS if kind.name}


def _pattern(signs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{sign})" for sign in signs))


_SIGNS = [(_pattern(kind.signs), kind) for kind in KINDS if kind.signs]
_ANY = _pattern(pattern.pattern for pattern, _ in _SIGNS)  # most lines have none: one search


_NUMBER = re.compile(r"\d+")
# the numbers of which the signs speak; all others are alike
_ERRNOS = (1, 2, 11, 12, 13, 28, 98, 110, 111, 113, 122)
_ENDS = (9, 15, 137)
_XIDS = (13, 31, 43, 45, 68, 109)
_OF_ONE_MACHINE = (127, 169, 254)  # addresses that lead to no other
_CODES = frozenset(map(str, _ERRNOS + _ENDS + _XIDS + _OF_ONE_MACHINE))


def kind_of(text: str) -> Kind | None:
    """The kind of which a line has a sign; None if it has none, or looks so and is harmless."""
    return _kind_of(_NUMBER.sub(_without_number, text))


def _without_number(found: re.Match[str]) -> str:
    return found[0] if found[0] in _CODES else "0"


@lru_cache(maxsize=1 << 14)
def _kind_of(text: str) -> Kind | None:
    """Kind as above, found once for all steps of a training: only their numbers differ."""
    if not _ANY.search(text):
        return None
    for sign, kind in _SIGNS:
        if sign.search(text):
            return kind if kind.name else None
    return None
