#!/usr/bin/env bash
# test_launch.sh - train_gpt with ranks started by hand, by torchrun, srun, mpirun, and by examples/launch: each rank is
# a process; the ranks find each other over tcp on the loopback and train exactly as threads do
#
# DT_TORCHRUN: the torchrun to use; default: torchrun on PATH, else python3's torch. The script starts SLURM's daemons
# as this user, with a separate configuration in a temporary folder, and ends them by process id.
cd "$(dirname "$0")/../.." || exit 1
. tests/support/report.sh
needs_train_gpt
for v in $(env | sed -n 's/^\(SLURM_[A-Z_]*\|PMI[A-Z_]*\|OMPI_COMM[A-Z_]*\|DT_[A-Z_]*\|RANK\|WORLD_SIZE\|MASTER_[A-Z]*\)=.*/\1/p'); do
    [ "$v" = DT_TORCHRUN ] || unset "$v"
done
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
tiny="--layers 1 --width 16 --heads 2 --seq 16 --batch 8 --steps 4 --data $dir/text"


taken() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_port() { # sets port, each time another one
    while :; do port=$((10000 + RANDOM % 10000)); taken $port || return; done
}

ranks_end() { # waits for all of $pids; status: the number of those that failed
    local p bad=0
    for p in $pids; do wait "$p" || bad=$((bad + 1)); done
    return $bad
}

by_hand() { # by_hand N ARGS...
    local n=$1 r
    shift
    free_port
    pids=
    for ((r = 0; r < n; r++)); do
        timeout $((60 * SLOW)) "$B/train_gpt" --backend tcp --rank $r --ranks $n --rendezvous 127.0.0.1:$port "$@" >"$dir/out$r" 2>"$dir/err$r" </dev/null &
        pids="$pids $!"
    done
    ranks_end
}

column() { cut -d, -f1-3 "$1"; }    # step, loss, grad_norm

# ---- by hand ------------------------------------------------------------------------------------------------------

for zero in 0 1; do
    timeout $((60 * SLOW)) "$B/train_gpt" $tiny --ranks 4 --zero $zero --log-csv "$dir/threads$zero.csv" >"$dir/out" 2>"$dir/err"
    report $? "4 threads with --zero $zero"
    grep -q "^launch  not distributed: no launcher's variables are set: one process$" "$dir/out"
    report $? "... print that they are not distributed"
    by_hand 4 $tiny --zero $zero --log-csv "$dir/tcp$zero.csv"
    report $? "4 tcp ranks with --zero $zero"
    [ "$(wc -l <"$dir/tcp$zero.csv")" = 5 ] && cmp -s <(column "$dir/threads$zero.csv") <(column "$dir/tcp$zero.csv")
    report $? "4 tcp ranks with --zero $zero have the losses and norms of 4 threads to the last digit"
    grep -q '^step *4/4' "$dir/out0" && [ ! -s "$dir/out1" ] && [ ! -s "$dir/out2" ] && [ ! -s "$dir/out3" ]
    report $? "rank 0 alone prints"
    grep -q "^launch  rank 0 of 4 by --rank; rendezvous 127.0.0.1:$port$" "$dir/out0"
    report $? "... that the command line said who it is"
done

free_port
pids=
for r in 0 1; do
    RANK=$r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout $((60 * SLOW)) "$B/train_gpt" $tiny --zero 1 --log-csv "$dir/env.csv" \
        >"$dir/out$r" 2>"$dir/err$r" </dev/null &
    pids="$pids $!"
done
ranks_end
report $? "2 ranks by torchrun's variables"
timeout $((60 * SLOW)) "$B/train_gpt" $tiny --ranks 2 --zero 1 --log-csv "$dir/two.csv" >"$dir/out" 2>"$dir/err"
cmp -s <(column "$dir/two.csv") <(column "$dir/env.csv") && grep -q 'cpu tcp   2 ranks' "$dir/out0"
report $? "... with the losses of 2 threads"

by_hand 3 --layers 1 --width 16 --heads 2 --seq 16 --batch 6 --steps 50 --data "$dir/text" --optimizer sgd --lr 1e3 --clip 0
[ $? = 3 ] && grep -hq 'error: rank [0-2].*finite\|error: rank [0-2].*NaN\|error: rank [0-2].*inf' "$dir"/err[0-2]
report $? "a run that diverges ends on all ranks, with the reason"
free_port
timeout $((60 * SLOW)) "$B/train_gpt" $tiny --backend tcp --rank 0 --ranks 2 --rendezvous localhost:$port --timeout 0.5 >"$dir/out" 2>"$dir/err"
[ $? = 1 ] && [ "$(grep -c "^error: .*127.0.0.1:$port.*rank 1 did not come" "$dir/err")" = 1 ]
report $? "a rank that never comes is named; the rendezvous may be a name"

# ---- ranks with different arguments ---------------------------------------------------------------------------

unlike() { # unlike PATTERN ARGS...: of the second of two ranks; "": all goes well
    local pattern=$1 r more=() pids=
    shift
    free_port
    for r in 0 1; do
        timeout $((60 * SLOW)) "$B/train_gpt" $tiny --backend tcp --rank $r --ranks 2 --rendezvous 127.0.0.1:$port "${more[@]}" \
            >"$dir/out$r" 2>"$dir/err$r" </dev/null &
        pids="$pids $!"
        more=("$@")
    done
    ranks_end
    r=$?
    if [ -z "$pattern" ]; then [ $r = 0 ]; else
        [ $r = 2 ] && [ "$(cat "$dir/err0" "$dir/err1" | grep -cE -- "^error: rank 1: $pattern")" = 2 ]
    fi
    report $? "of two ranks the second has $*"
}
rm -f "$dir"/err*
unlike "" --lr 0.001 --lr-schedule cosine --quiet --timeout 50
unlike "--lr 1e-2 here, but rank 0 has another value" --lr 1e-2
unlike "--zero 1 here, but rank 0 has another value" --zero 1
unlike "--overlap off here, but rank 0 has another value" --no-overlap
unlike "--trace $dir/none here, but rank 0 has another value" --trace "$dir/none"
tiny=${tiny% --data *} unlike "--data has 5000 tokens here, and a different number" --data "$dir/text"

# ---- errors and precedence -------------------------------------------------------------------

refused() { # refused PATTERN VARIABLES... -- ARGS...
    local pattern=$1 variables=()
    shift
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    env "${variables[@]}" timeout $((60 * SLOW)) "$B/train_gpt" $tiny "$@" >"$dir/out" 2>"$dir/err" </dev/null
    [ $? = 2 ] && [ "$(grep -c '^error: ' "$dir/err")" = 1 ] && grep -Eq -- "$pattern" "$dir/err"
    report $? "refused with '$pattern': ${variables[*]} $*"
}
rm -f "$dir"/err*
refused 'tcp needs --rank R, or a launcher.*not distributed' -- --backend tcp --ranks 2
refused 'rank 2 of --ranks 2: the last rank is 1' -- --backend tcp --rank 2 --ranks 2
refused 'rank 0 needs --backend tcp' -- --rank 0
refused 'rendezvous 127.0.0.1:5 needs --backend tcp' -- --rendezvous 127.0.0.1:5
refused 'tcp needs --ranks N, or a launcher' -- --backend tcp --rank 0
refused 'WORLD_SIZE=4 is set, but RANK is not' WORLD_SIZE=4 --
refused 'RANK=4: not a whole number from 0 to 3' RANK=4 WORLD_SIZE=4 --
refused 'RANK=1e20: not' RANK=1e20 WORLD_SIZE=4 -- --backend tcp
refused 'PMIX_RANK=0 is set, but' PMIX_RANK=0 --
refused 'SLURM_PROCID=9: not' SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_NTASKS=9 --
refused '--backend threads: this is rank 1 of 4 by torchrun' RANK=1 WORLD_SIZE=4 -- --backend threads --ranks 4
refused '--ranks 3: torchrun started 4 processes' RANK=0 WORLD_SIZE=4 -- --ranks 3
refused 'PMI started ranks on several machines.*DT_RENDEZVOUS' PMI_RANK=0 PMI_SIZE=4 MPI_LOCALNRANKS=2 --
refused '--dry-run needs only one process: start it without Open MPI' OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 -- --dry-run
refused '2048 ranks; at most 1024 are allowed' DT_RANK=0 DT_WORLD_SIZE=2048 --

printf '  \n' >"$dir/long"; head -c 300 /dev/zero | tr '\0' x >>"$dir/long"
printf 'a secret of more than 16 bytes\nmore\n' >"$dir/token"; printf '\n' >"$dir/none"; head -c 257 /dev/zero | tr '\0' x >"$dir/long"
mkfifo "$dir/fifo"
chmod 600 "$dir"/{token,none,long,fifo}
tcp="--backend tcp --rank 0 --ranks 2"
refused 'token-file .* needs --backend tcp or mpi' -- --token-file "$dir/token"
refused 'token-file .*/nowhere: No such file' -- $tcp --token-file "$dir/nowhere"
refused 'token-file .*/none: it must hold 16 to 256' -- $tcp --token-file "$dir/none"
refused 'token-file .*/long: it must hold 16 to 256' -- $tcp --token-file "$dir/long"
refused 'token-file .*/fifo: not a file but a FIFO' -- $tcp --token-file "$dir/fifo"
for mode in 640 604 620; do
    chmod $mode "$dir/token"
    refused "token-file .*others may .*mode $mode.*chmod 600" -- $tcp --token-file "$dir/token"
done
chmod 600 "$dir/token"
by_hand 2 $tiny --zero 1 --log-csv "$dir/token.csv" --token-file "$dir/token"
report $? "2 ranks with a token"
cmp -s <(column "$dir/two.csv") <(column "$dir/token.csv")
report $? "... with the losses of 2 threads"

# The command line takes precedence over the environment, and DT_RENDEZVOUS over the launcher's variables
rm -f "$dir"/err*
export RANK=7 WORLD_SIZE=9 MASTER_PORT=none DT_RENDEZVOUS=192.0.2.1:9
by_hand 2 $tiny --zero 1 --log-csv "$dir/flags.csv"
report $? "--rank, --ranks and --rendezvous go before the environment"
unset RANK WORLD_SIZE MASTER_PORT DT_RENDEZVOUS
free_port
pids=
for r in 0 1; do
    RANK=$r WORLD_SIZE=2 MASTER_ADDR=192.0.2.1 MASTER_PORT=9 DT_RENDEZVOUS=localhost:$port timeout $((60 * SLOW)) "$B/train_gpt" $tiny \
        >"$dir/out$r" 2>"$dir/err$r" </dev/null &
    pids="$pids $!"
done
ranks_end && grep -q "^launch  rank 0 of 2 by torchrun: RANK, WORLD_SIZE; rendezvous localhost:$port$" "$dir/out0"
report $? "DT_RENDEZVOUS goes before MASTER_ADDR"
RANK=0 WORLD_SIZE=1 timeout $((60 * SLOW)) "$B/train_gpt" $tiny --ranks 2 >"$dir/out" 2>"$dir/err" </dev/null &&
    grep -q '^launch  rank 0 of 1 by torchrun' "$dir/out" && grep -q 'cpu threads   2 ranks' "$dir/out"
report $? "the only process of a launcher may have threads"
rm -f "$dir/out" # the loop below waits for a step of this run
"$B/train_gpt" $tiny --steps 3000 --timeout 60 >"$dir/out" 2>"$dir/err" </dev/null &
pid=$!
for ((i = 0; i < 100 * SLOW; i++)); do grep -q '^step' "$dir/out" && break; sleep 0.05; done
kill -USR1 $pid
wait $pid && grep -q '^step *3000/3000' "$dir/out"
report $? "SIGUSR1 does not end a run"

# ---- launchers ----------------------------------------------------------------------------------------------------

# launched NAME PATTERN COMMAND...: runs the command, which starts 4 ranks; only rank 0 prints one line that matches
launched() {
    local name=$1 pattern=$2 status
    shift 2
    rm -f "$dir/launched.csv" "$dir"/err*
    timeout -k 5 $((120 * SLOW)) "$@" "$B/train_gpt" $tiny --zero 1 --log-csv "$dir/launched.csv" >"$dir/out" 2>"$dir/err" </dev/null
    report $? "$name: 4 ranks"
    cmp -s <(column "$dir/threads1.csv") <(column "$dir/launched.csv")
    report $? "$name: the losses and norms of 4 threads to the last digit"
    [ "$(grep -c '^launch ' "$dir/out")" = 1 ] && grep -Eq "^launch  rank 0 of 4 $pattern" "$dir/out" && grep -q 'cpu tcp   4 ranks' "$dir/out"
    report $? "$name: one line names the launcher, '$(grep '^launch' "$dir/out")'"
}

if [ -n "$DT_TORCHRUN" ]; then torchrun=($DT_TORCHRUN)
elif command -v torchrun >/dev/null; then torchrun=(torchrun)
else torchrun=(python3 -m torch.distributed.run); fi
if "${torchrun[@]}" --help >/dev/null 2>&1; then
    by="\(local 0 of 4\) by torchrun: RANK, WORLD_SIZE; rendezvous"
    launched torchrun "$by [^ ]*:2[0-9]{4}$" "${torchrun[@]}" --no_python --nproc_per_node 4 --standalone
    free_port
    launched "torchrun --master_port" "$by 127.0.0.1:$((port + 1))$" "${torchrun[@]}" --no_python --nproc_per_node 4 \
        --master_addr 127.0.0.1 --master_port $port
else
    skip "torchrun: PyTorch is not on PATH or in python3 (DT_TORCHRUN names another)${NO_TORCH:+; $NO_TORCH}"
fi

free_port
for mpi in openmpi mpich default; do
    mpirun=mpirun.$mpi
    [ $mpi != default ] || mpirun=mpirun
    if ! command -v $mpirun >/dev/null; then [ $mpi = default ] || skip "$mpirun: it is not installed"; continue; fi
    [ $mpi != default ] || { ! command -v mpirun.openmpi && ! command -v mpirun.mpich; } >/dev/null || continue
    if $mpirun --version 2>&1 | grep -qi 'open'; then
        launched $mpirun '\(local 0 of 4\) by Open MPI: OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE; rendezvous 127.0.0.1:2[0-9]{4}$' \
            $mpirun --oversubscribe -np 4
    else
        launched $mpirun "\(local 0 of 4\) by PMI: PMI_RANK, PMI_SIZE; rendezvous 127.0.0.1:$port$" \
            $mpirun -genv DT_RENDEZVOUS 127.0.0.1:$port -np 4
    fi
done

# ---- SLURM --------------------------------------------------------------------------------------------------------

slurm_conf() { # two nodes of this machine, which exchange no credentials, with ports of their own
    local host=$(hostname -s) base
    for ((;;)); do
        free_port; base=$port
        taken $((base + 1)) || taken $((base + 2)) || break
    done
    mkdir "$dir/state" "$dir/spool"
    cat >"$dir/slurm.conf" <<END
ClusterName=dt
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$base
AuthType=auth/none
CredType=cred/none
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=dt[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((base + 1))-$((base + 2))] CPUs=4 State=UNKNOWN
PartitionName=dt Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    chmod 755 "$dir"
    export SLURM_CONF=$dir/slurm.conf
}

slurm_start() { # status 0 if both nodes are idle; otherwise $dir/why has the reason
    local i
    slurm_conf
    slurmctld -D >"$dir/slurmctld.out" 2>&1 </dev/null & children+=($!)
    for i in 1 2; do
        slurmd -D -N dt$i >"$dir/slurmd$i.out" 2>&1 </dev/null & children+=($!)
    done
    for ((i = 0; i < 60 * SLOW; i++)); do
        [ "$(timeout $((5 * SLOW)) sinfo -h -o %D -t idle 2>/dev/null)" = 2 ] && return
        sleep 0.5
    done
    grep -h -m 1 -i error "$dir"/slurm*.log "$dir"/slurm*.out >"$dir/why" 2>/dev/null || echo "no node is idle after $((30 * SLOW)) s" >"$dir/why"
    return 1
}

batch() { # batch ARGS...: submits it on one node with 4 tasks, and waits for its end; its output is in batch.out
    local job i
    rm -f "$dir/batch.out"
    job=$(timeout $((20 * SLOW)) sbatch --parsable -N 1 -n 4 --ntasks-per-node 4 -o "$dir/batch.out" "$@" 2>"$dir/err" </dev/null) || return
    for ((i = 0; i < 200 * SLOW; i++)); do     # sbatch -W looks only every 10 s
        [ -n "$(timeout $((5 * SLOW)) squeue -h -j "$job")" ] || break
        sleep 0.2
    done
    timeout $((5 * SLOW)) scontrol show job "$job" | grep -q 'JobState=COMPLETED'
}

slurm() {
    local by='by SLURM: SLURM_PROCID, SLURM_STEP_NUM_TASKS; rendezvous'
    launched srun "\(local 0 of 4\) $by 127.0.0.1:2[0-9]{4}$" srun -N 1 -n 4
    # the name dt1 does not resolve, so the text has the address
    free_port
    launched "srun, two nodes" "\(local 0 of 3\) $by 127.0.0.1:$port$" env DT_RENDEZVOUS=127.0.0.1:$port srun -m plane=3 -N 2 -n 4
    timeout $((60 * SLOW)) srun -N 2 -n 4 "$B/train_gpt" $tiny >"$dir/out" 2>"$dir/err" </dev/null
    [ $? != 0 ] && grep -Eq "^error: .*rendezvous '?dt1:2[0-9]{4}" "$dir/err"
    report $? "srun, two nodes: the first of the list is where rank 0 is"
    launched "srun --mpi=pmi2" '\(local 0 of 4\) by PMI: PMI_RANK, PMI_SIZE; rendezvous 127.0.0.1:2[0-9]{4}$' srun --mpi=pmi2 -N 1 -n 4

    cat >"$dir/batch.sh" <<END
#!/bin/bash
"$B/train_gpt" $tiny
END
    batch "$dir/batch.sh" && grep -q '^launch  not distributed: a batch script of SLURM, where srun starts ranks: one process$' "$dir/batch.out" &&
        grep -q 'cpu threads   1 ranks' "$dir/batch.out"
    report $? "a batch script itself is no rank"
    rm -f "$dir/launched.csv"
    TRAIN_GPT=$B/train_gpt batch examples/launch/job.sbatch $tiny --zero 1 --log-csv "$dir/launched.csv" && grep -Eq "^launch  rank 0 of 4 \(local 0 of 4\) $by 127.0.0.1:2[0-9]{4}$" "$dir/batch.out" &&
        cmp -s <(column "$dir/threads1.csv") <(column "$dir/launched.csv") && ! ls .dt-token-* 2>/dev/null
    report $? "examples/launch/job.sbatch: the losses of 4 threads: $(grep -h -m 1 error "$dir/batch.out")"
}

if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v srun >/dev/null; then
    skip "srun: slurmctld, slurmd or srun is not installed"
elif slurm_start; then
    slurm
else
    skip "srun: SLURM's daemons do not start here: $(cut -c1-150 "$dir/why")"
fi
unset SLURM_CONF

# ---- a list of machines -------------------------------------------------------------------------------------------

cat >"$dir/ssh" <<END
#!/bin/sh
# a fake ssh: a local shell without the caller's environment; stores its arguments
shift
printf '%s\n' "\$*" >>"$dir/ssh.log"
exec env -i PATH="\$PATH" sh -c "\$*"
END
chmod +x "$dir/ssh"
printf '# three and one\n127.0.0.1   slots=3  # here\n\n 127.0.0.1\n' >"$dir/hosts"
free_port
export SSH=$dir/ssh DT_PORT=$port DT_TOKEN=known-to-ranks-alone
launched hostfile.sh "\(local 0 of 3\) by DT: DT_RANK, DT_WORLD_SIZE; rendezvous 127.0.0.1:$port$" examples/launch/hostfile.sh "$dir/hosts"
[ "$(wc -l <"$dir/ssh.log")" -ge 4 ] && ! grep -q "$DT_TOKEN" "$dir/ssh.log"
report $? "hostfile.sh: the token is in no command line"
timeout $((60 * SLOW)) examples/launch/hostfile.sh "$dir/hosts" sh -c 'echo "$DT_RANK $DT_LOCAL_RANK/$DT_LOCAL_SIZE $DT_TOKEN $1"' x "it's two  words" >"$dir/out" 2>"$dir/err" &&
    [ "$(sort "$dir/out")" = "$(for r in "0 0/3" "1 1/3" "2 2/3" "3 0/1"; do echo "$r $DT_TOKEN it's two  words"; done)" ]
report $? "hostfile.sh: each rank knows its place, the token, and its words"
begin=$SECONDS
timeout $((60 * SLOW)) examples/launch/hostfile.sh "$dir/hosts" sh -c 'echo $$ >>'"$dir/pids"'; [ $DT_RANK != 2 ] || { sleep 0.5; exit 7; }; exec sleep 50' >"$dir/out" 2>"$dir/err"
[ $? = 7 ] && grep -q 'rank 2 on 127.0.0.1 ended with status 7' "$dir/err" && [ $((SECONDS - begin)) -lt $((20 * SLOW)) ] && [ "$(wc -l <"$dir/pids")" = 4 ] &&
    ! kill -0 $(cat "$dir/pids") 2>/dev/null
report $? "hostfile.sh: a rank that ends badly ends all others"
rm "$dir/pids"
examples/launch/hostfile.sh "$dir/hosts" sh -c 'echo $$ >>'"$dir/pids"'; exec sleep 50' >"$dir/out" 2>"$dir/err" &
pid=$!
for ((i = 0; i < 100 * SLOW; i++)); do [ "$(cat "$dir/pids" 2>/dev/null | wc -l)" = 4 ] && break; sleep 0.05; done
disown $pid
kill -9 $pid
for ((i = 0; i < 100 * SLOW; i++)); do kill -0 $(cat "$dir/pids") 2>/dev/null || break; sleep 0.05; done
[ "$(wc -l <"$dir/pids")" = 4 ] && for p in $(cat "$dir/pids"); do ! kill -0 $p 2>/dev/null || false; done
report $? "hostfile.sh: none of its ranks outlives it"
unset SSH DT_PORT DT_TOKEN

finish
