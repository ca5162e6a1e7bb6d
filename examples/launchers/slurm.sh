#!/bin/bash
#SBATCH --job-name=tvq
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@150
#SBATCH --requeue
#SBATCH --open-mode=append

# Train on several nodes of Slurm (23.02 or later): DATA=PG19 sbatch slurm.sh
#
# One torchrun per node, with the rendezvous on the first node. 150 to 210 seconds before the time
# limit Slurm sends SIGTERM to every torchrun, but not to this script. (`B:TERM` would do the
# opposite, and srun turns a SIGTERM that it receives into SIGKILL.) The workers have 110 seconds to
# save. Then this script requeues the job, which resumes the run.
set -euo pipefail
RUN=${RUN:-runs/pg19}
mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
COMMAND=(train pg19-1.3b --data.path "${DATA:?folder of PG-19}" --out "$RUN" --parallel.fsdp 8)
if [ -e "$RUN/config.json" ]; then
    COMMAND=(resume "$RUN")
fi
STATUS=0
# A node that has saved must not end the others, so srun waits for all of them.
srun --kill-on-bad-exit=0 --cpus-per-task "$SLURM_CPUS_PER_TASK" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 --shutdown-timeout 110 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${HOSTS[0]}:29500" \
    -m transformer_vq "${COMMAND[@]}" || STATUS=$?
# Stopped by the signal? It is sent up to a minute early: 150 + 60 seconds, and 30 for the clocks.
if [ "$STATUS" -ne 0 ] && [ "$(date +%s)" -ge $((SLURM_JOB_END_TIME - 240)) ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
