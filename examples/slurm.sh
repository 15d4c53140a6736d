#!/bin/sh
#SBATCH --job-name=tp_transformers
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
# Two nodes of eight GPUs, one torchrun a node: sbatch slurm.sh script.py [ARGUMENTS]
# The ranks that share a model talk in every layer: where copies of a model train, keep each on one node, as
# train_dp_tp.py does with 2 copies here. Each node downloads a model of the Hub once; HF_HOME on a disk of the node,
# or on one that all share, will do.

set -eu
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$host:${PORT:-29500}" \
    -m tp_transformers "$@"
