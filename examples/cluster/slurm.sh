#!/bin/bash
# PPO on Pong with a runner on each of 4 nodes: sbatch slurm.sh. Learner and head are on the first node, which is the one
# that runs this script; two minutes before the time is up the run writes a checkpoint, and the job is queued again.
#SBATCH --job-name=pong
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate # penstock[ray], in a file system that every node sees

run=runs/pong
per_runner=12 # CPUs of a runner; the first node has the others for learner, head and system
port=$((20000 + SLURM_JOB_ID % 20000))
host=${HEAD_IP:-$(hostname --ip-address | tr ' ' '\n' | grep -v -e ':' -e '^127[.]' | head -n 1)} # HEAD_IP=... sbatch slurm.sh

# Whoever reaches the ports of these nodes and has the token runs code as you. The token is of this job alone, in a file
# that only you can read; nothing is encrypted.
umask 077
token=$HOME/.penstock-token-$SLURM_JOB_ID
python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
export RAY_ADDRESS=$host:$port # what --sampler.address auto joins
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
export PENSTOCK_TRUST=$PWD/runs # of every node, so that a requeued job may resume

ray_start=(ray start --block --num-cpus="$per_runner" --temp-dir="/tmp/ray-$SLURM_JOB_ID")
"${ray_start[@]}" --head --node-ip-address="$host" --port="$port" --include-dashboard=false &
nodes=($!)
for _ in {1..60}; do # until it answers
  (: < "/dev/tcp/$host/$port") 2> /dev/null && break
  sleep 1
done
others=$((SLURM_JOB_NUM_NODES - 1))
if ((others > 0)); then
  srun --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" \
    "${ray_start[@]}" --address="$RAY_ADDRESS" &
  nodes+=($!)
fi
end() {
  kill -TERM "${nodes[@]}" 2> /dev/null || true
  wait "${nodes[@]}" || true
  rm -rf "$token" "/tmp/ray-$SLURM_JOB_ID"
}
trap end EXIT

joined=""
for _ in {1..60}; do # until all nodes are there
  joined=$(timeout 30 python -c 'import ray; ray.init("auto"); print(len(ray.nodes()))' 2> /dev/null || true)
  [ "$joined" = "$SLURM_JOB_NUM_NODES" ] && break
  sleep 5
done
if [ "$joined" != "$SLURM_JOB_NUM_NODES" ]; then
  echo "${joined:-none} of $SLURM_JOB_NUM_NODES nodes are at $RAY_ADDRESS" >&2
  exit 3
fi

if [ -d "$run/checkpoints" ]; then
  penstock resume "$run" &
else
  penstock train ppo --env ALE/Pong-v5 --sampler runners --sampler.runners "$SLURM_JOB_NUM_NODES" \
    --sampler.num-cpus "$per_runner" --sampler.address auto \
    --sampler.inner cpu --sampler.inner.T 128 --sampler.inner.B 24 --sampler.inner.workers 12 \
    --run.steps 50000000 --run.checkpoint-interval 500000 --run.dir "$run" --run.progress plain &
fi
penstock=$!
trap 'kill -TERM "$penstock"' TERM
status=0
wait "$penstock" || status=$?
if kill -0 "$penstock" 2> /dev/null; then # the signal ended the wait, and the run is writing its checkpoint
  status=0
  wait "$penstock" || status=$?
fi
if ((status == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
