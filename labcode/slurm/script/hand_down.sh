# shellcheck shell=bash
# Stands between SLURM and the ranks, and hands a request for a checkpoint down to them:
#
#     hand_down=$(python -m labcode.slurm.hand_down)    # the text of this file
#     srun bash -c "$hand_down" NAME COMMAND...
#
# SLURM asks with USR1 before the time limit, and with TERM before it takes the nodes away for another job. Most clusters signal
# only the process that srun has started. That is torchrun or a container's program, which would die of the signal, and not
# the ranks below it. So this bash is what SLURM signals; for the command and all below it both signals are ignored.
# A rank hears USR1 once Python has set up its handler. Before that nothing is sent to it, and afterwards it is sent again
# and again, until the command has ended. This bash ends as the command did.

trap '' USR1 TERM
export PET_SIGNALS_TO_HANDLE=SIGINT,SIGHUP,SIGQUIT # without TERM, for which torchrun would set up a handler of its own
"$@" &
command=$!
asked=no
trap 'asked=yes' USR1 TERM

# Process $1 and all below it that have a handler for USR1, which has bit 9 in the mask of caught signals.
listening() {
    local child children mask
    mask=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
    if ((0x${mask:-0} & 0x200)); then echo "$1"; fi
    read -r -d '' -a children < <(cat "/proc/$1/task/"*/children 2>/dev/null)
    for child in "${children[@]}"; do
        listening "$child"
    done
}

[[ $asked == yes ]] || wait "$command"
status=$?
if [[ $asked == yes ]]; then # the signal has ended the wait, and not the command
    while kill -0 "$command" 2>/dev/null; do
        (
            trap '' USR1 TERM # SLURM may signal all processes, also those that help here
            for rank in $(listening "$command"); do
                kill -USR1 "$rank" 2>/dev/null
            done
            sleep 1
        )
    done
    wait "$command"
    status=$?
fi

if ((status > 128 && status != 130)); then # srun is to say "Killed", and not "Exited with exit code 137"
    ulimit -c 0
    trap - USR1 TERM
    kill -"$((status - 128))" $$
fi
exit "$status"
