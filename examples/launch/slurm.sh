#!/bin/bash
#SBATCH --job-name=layerwise
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --output=%x-%j.out

# One task per node: torchrun, which starts a rank for every GPU of it.
set -euo pipefail
CONFIG=${CONFIG:-configs/tiny.toml}
GPUS=${SLURM_GPUS_ON_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / GPUS))
export NCCL_DEBUG=WARN
# The network between nodes, as `ip -brief address` calls it. Both: settings are compared over gloo, also on GPUs.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=eth0

# A node that is wrong says so here, by name, and ends the job before anything waits for it.
srun --label --kill-on-bad-exit=1 layerwise doctor

srun --label --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:29500" \
    -m layerwise train "$CONFIG" --train.out-dir "runs/$SLURM_JOB_ID"
