#!/usr/bin/env bash
# A campaign over several nodes of a Slurm cluster: sbatch examples/slurm.sh
# Every node sees this checkout at the same path, with its environment made by `requirements/setup.sh ray`.
#SBATCH --job-name=artifact
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=02:00:00
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit with sbatch from the checkout}"
claims=${CLAIMS:-crossover speedup_bounds baseline_sensitivity}
run=${RUN:-runs/slurm-$SLURM_JOB_ID}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Ray's own launcher: starts Ray on every node, runs the command on the head, ends with it. The same command goes on after a
# time limit: finished cells are not measured again.
# shellcheck disable=SC2086
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
  .venv/bin/ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  .venv/bin/artifact campaign $claims --executor ray --address auto --run "$run"

.venv/bin/artifact tables "$run"
