#!/bin/bash
#SBATCH --job-name=tvq
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

# Runs one torchrun per node, with the rendezvous on the first node. Two minutes before the time
# limit Slurm sends SIGTERM: the run writes a checkpoint, and the requeued job resumes it.
set -euo pipefail
RUN=${RUN:-runs/pg19}
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
COMMAND=(train pg19-1.3b --data.path "${DATA:?folder of PG-19}" --out "$RUN" --parallel.fsdp 8)
if [ -e "$RUN/config.json" ]; then
    COMMAND=(resume "$RUN")
fi
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$HOST:29500" \
    -m transformer_vq "${COMMAND[@]}"
