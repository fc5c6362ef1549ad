#!/usr/bin/env bash
# Two trainer processes (DDP), one vLLM server. With GPUs, leave ACCELERATE_USE_CPU out.
#
#   loraflow serve MODEL --max-lora-rank 16
#   examples/multi_process.sh MODEL http://127.0.0.1:8000 [more options of grpo.py]
set -euo pipefail
model=$1 server=$2
shift 2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! command -v nvidia-smi >/dev/null; then
  export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1
fi
exec "${PYTHON:-python}" -m torch.distributed.run --nproc-per-node "${PROCESSES:-2}" --master-port "${MASTER_PORT:-29511}" \
  "$here/grpo.py" --model "$model" --server "$server" "$@"
