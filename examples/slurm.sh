#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00

# One launcher on each node, which starts the ranks there. The token lets nobody else in.
SYMCOMM_TOKEN=${SYMCOMM_TOKEN:-$(python -c "import secrets; print(secrets.token_urlsafe())")}
export SYMCOMM_TOKEN
srun --kill-on-bad-exit=1 symcomm run -n "${RANKS:-8}" --nnodes auto "${SCRIPT:-train.py}" "$@"
