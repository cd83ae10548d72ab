#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gres}#SBATCH --output={name}-%j.log
{notes}
set -euo pipefail
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "requests go to http://${NODES[0]}:{port}"
cd "$(mktemp -d -p "$SLURM_SUBMIT_DIR" {name}.XXXXXX)"
{files}on() { # NODE COMMAND...: beside what runs there already
  srun --overlap --nodes=1 --ntasks=1 --nodelist="${NODES[$1]}" "${@:2}" &
}
{before}{serve}
# One that ends takes the job with it: the others would wait for it.
wait -n && code=$? || code=$?
echo "one of the servers has ended with code $code" >&2
exit "$code"
