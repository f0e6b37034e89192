# What every job script shares: rendezvous, logs, and stop, save, requeue, resume. Sourced by *.sbatch.
#
# Settings, from the environment of sbatch:
#   RUN_DIR         run folder on a shared file system (runs/NAME-JOBID; a requeued job keeps its id)
#   RANKS_PER_NODE  learner ranks per node (the node's GPUs, 1 without)
#   PROGRAM         what torchrun starts (launch/train.py)
#   CONTAINER       put before torchrun, such as "apptainer exec --nv image.sif" (nothing)
#   SAVE_SECONDS    how long a checkpoint may take once the job must stop (150; see --signal)
#   MAX_REQUEUES    how often a job puts itself back into the queue (50)
# and, for jobs with actors in their second component:
#   ACTOR           what an actor is (python launch/actor.py)
#   INTERFACE       network interface of the learners' nodes that actors come through (the one that
#                   leads from the first of them to the first node of the actors)
# --dry-run as the first argument prints what would run and starts nothing; it needs no SLURM.
set -u

DRY_RUN=
if [ "${1:-}" = --dry-run ]; then
    DRY_RUN=yes
    shift
fi
[ -n "${SLURM_JOB_ID:-}" ] || [ -n "$DRY_RUN" ] ||
    { echo "no job: use sbatch $0 ..., or $0 --dry-run ..." >&2; exit 2; }

JOB=${SLURM_JOB_ID:-0}
ATTEMPT=${SLURM_RESTART_COUNT:-0}
NODES=${SLURM_JOB_NUM_NODES:-1}
: "${RUN_DIR:=runs/${SLURM_JOB_NAME:-vla}-$JOB}" "${PROGRAM:=launch/train.py}" "${CONTAINER:=}"
: "${RANKS_PER_NODE:=${SLURM_GPUS_ON_NODE:-1}}" "${SAVE_SECONDS:=150}" "${MAX_REQUEUES:=50}"
LOGS=$RUN_DIR/slurm/$JOB.$ATTEMPT

say() { echo "$(date +%H:%M:%S) [job $JOB, attempt $ATTEMPT] $*"; }

# Address of the first node of a list. The batch script runs on the first node of the job, and so
# does the rendezvous.
address_of() {
    local first address
    first=$(scontrol show hostnames "${1:-}" 2>/dev/null | head -n 1)
    if [ -n "$first" ] && ! getent ahosts "$first" >/dev/null; then
        address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    fi
    echo "${address:-${first:-$(hostname)}}"
}

# A free port below the ones the kernel hands out (32768), another one for each job. Two jobs with
# one port would not fail: the second quietly joins the store of the first.
free_port() {
    local i port
    for i in $(seq 0 199); do
        port=$((20000 + (JOB * 10 + i * 7919) % 10000))
        (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null || { echo "$port"; return; }
    done
    echo "no free port on $(hostname) between 20000 and 29999" >&2
    return 1
}

PORT=$(free_port) || exit 1
RENDEZVOUS=(--rdzv-backend=c10d --rdzv-endpoint="$(address_of "${SLURM_JOB_NODELIST:-}"):$PORT" --rdzv-id="$JOB.$ATTEMPT"
    --max-restarts=0 --log-dir="$LOGS/ranks" --tee=3
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# srun does not take it over from sbatch, and a heterogeneous job has it per component only
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1}}

# One rank is enough: ranks agree to stop. It is a child of the node's torchrun.
signal_a_rank() {
    local agent rank
    agent=$(cat "$LOGS/agent-0.pid" 2>/dev/null)
    rank=$(ps -o pid= --ppid "${agent:-0}" | head -n 1)
    [ -n "$rank" ] && kill -USR1 "$rank"
}

STOPPING=
on_signal() {
    [ -n "$STOPPING" ] && return
    STOPPING=$1
    say "$1: the ranks shall save and stop"
    signal_a_rank || say "no rank is running yet"
    (sleep "$SAVE_SECONDS"; kill -KILL "$STEP") 2>/dev/null &
}

requeue() {
    # After scancel the state is not RUNNING: a job that came back then could not be cancelled.
    # After a node failure or pre-emption without grace it is not either: SLURM requeues by itself.
    local state
    # A heterogeneous job has a line per component, and all have one fate.
    state=$(scontrol -o show job "$JOB" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' | head -n 1)
    case $state in RUNNING | SIGNALING) ;; *) say "state $state: not requeued here"; return ;; esac
    if [ "$ATTEMPT" -ge "$MAX_REQUEUES" ]; then
        say "requeued $ATTEMPT times already (MAX_REQUEUES): it stays stopped"
        return
    fi
    say "requeue"
    trap - TERM USR1
    scontrol requeue "$JOB" && sleep 60   # SLURM ends this shell
}

# For a job whose second component has actors: task i of them joins learner rank i mod RANKS. Only
# this job's processes know the secret, and ranks say in the run folder where they listen.
plan_actors() {
    local nodes=${SLURM_JOB_NODELIST_HET_GROUP_1:-}
    ACTORS=${SLURM_NTASKS_HET_GROUP_1:-1}
    RANKS=$((NODES * RANKS_PER_NODE))
    PLACES=$(((ACTORS + RANKS - 1) / RANKS))
    SECRET=$LOGS/secret
    : "${ACTOR:=python launch/actor.py}"
    [ -n "$DRY_RUN" ] && : "${INTERFACE:=lo}"
    [ -n "${INTERFACE:-}" ] || INTERFACE=$(
        ip -o route get "$(getent ahostsv4 "$(address_of "$nodes")" | sed 's/ .*//;q')" |
            sed -n 's/.* dev \([^ ]*\).*/\1/p'
    )
    [ -n "$INTERFACE" ] || { echo "no route to $nodes: set INTERFACE, such as eth0" >&2; exit 1; }
}

# Start the actors, beside what follows. One that ends before the run does is started again; the
# learners do not wait for it, nor does a node that fails here end the job.
run_actors() {
    local again='board=$0/actors/rank-$((SLURM_PROCID % $1))/remote.json; shift
        until "$@" learner="$board" name="$SLURMD_NODENAME-$SLURM_PROCID"; do sleep 5; done'
    local command=(srun --het-group=1 --cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_1:-1}" --no-kill
        --output="$LOGS/actors.log" --open-mode=append
        bash -c "$again" "$RUN_DIR" "$RANKS" $CONTAINER $ACTOR secret_file="$SECRET")
    if [ -n "$DRY_RUN" ]; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    mkdir -p "$LOGS"
    (umask 077; head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$SECRET")
    rm -f "$RUN_DIR"/actors/rank-*/remote.json   # of an earlier attempt, on other nodes perhaps
    say "$ACTORS actors for $RANKS ranks, through $INTERFACE"
    "${command[@]}" &
}

# Run a command on every node of the job until it ends. If it was stopped, and did not fail, put the
# job back into the queue; its next attempt resumes in RUN_DIR. A run that was stopped, by us or by
# a signal from SLURM (pre-emption with grace), has left stopped.json; torchrun ends with 1 anyway.
run_until_done() {
    local command=(srun --kill-on-bad-exit=1 --output="$LOGS/all.log" --open-mode=append
        bash -c 'echo $$ >"$0/agent-$SLURM_NODEID.pid"; exec "$@"' "$LOGS" $CONTAINER "$@")
    if [ -n "$DRY_RUN" ]; then
        printf '%q ' "${command[@]}"
        echo
        return
    fi
    mkdir -p "$LOGS"
    say "$NODES nodes x $RANKS_PER_NODE ranks, port $PORT, logs in $LOGS"
    trap 'on_signal USR1' USR1
    trap 'on_signal TERM' TERM
    "${command[@]}" &
    STEP=$!
    local status=0
    while wait "$STEP"; status=$?; kill -0 "$STEP" 2>/dev/null; do :; done   # a trap ends a wait
    say "the ranks ended, status $status"
    [ "$status" = 0 ] && exit 0
    if [ -n "$STOPPING" ] || [ -e "$RUN_DIR/stopped.json" ]; then
        requeue
        exit 75
    fi
    exit "$status"
}
