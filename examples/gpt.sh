#!/usr/bin/env bash
# Train one of the models of examples/models with torchrun. Usage:
#
#     examples/gpt.sh MODEL [MEGATRON FLAGS]
#
# Flags on the command line come last and so win. Settings, from the environment:
#
#     DATA            data and tokenizer flags (default: mock data)
#     OUTPUT          folder for checkpoints, TensorBoard and W&B (default: runs/MODEL)
#     SCHEDULE        fresh-2bw (unless set), pipedream-2bw for the paper's, or default for
#                     Megatron's synchronous 1F1B
#     CORRECTION      error-feedback (unless set, if the schedule is asynchronous), another, or none
#     OPTIMIZER       muon (default), adam, soap, lion, ...
#     PIPELINE, TENSOR, MICRO_BATCH    instead of the model's own
#     GPUS            GPUs a node (default: those that nvidia-smi lists, else 8)
#     NODES, NODE_RANK, HEAD, PORT     for several nodes (gpt.sbatch sets them)
#     SCRIPT          the training script (default: examples/pretrain_gpt.py); that of a
#                     Megatron-LM checkout works as well
#     DRY_RUN=1       print the command, one argument a line, and do not run it
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
models() { (cd "$here/models" && printf '%s\n' *.conf | sed 's/\.conf$//' | xargs); }

model="${1:-}"
if [ -z "$model" ] || ! [ -f "$here/models/$model.conf" ]; then
    echo "usage: $0 MODEL [MEGATRON FLAGS], with MODEL one of: $(models)" >&2
    exit 2
fi
shift
# shellcheck source=/dev/null
source "$here/models/$model.conf"

case "$family" in
gpt3)
    sequence=2048
    vocabulary=50257
    architecture=(--seq-length "$sequence" --max-position-embeddings "$sequence")
    ;;
smollm2)
    sequence=2048
    vocabulary=49152
    architecture=(
        --seq-length "$sequence" --max-position-embeddings 8192
        --group-query-attention
        --position-embedding-type rope --rotary-base 100000
        --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    )
    ;;
*)
    echo "$here/models/$model.conf: unknown family $family" >&2
    exit 2
    ;;
esac

optimizer="${OPTIMIZER:-muon}"
optimization=(
    --optimizer "$optimizer" --lr "$learning_rate" --lr-decay-style cosine
    --min-lr "$(awk -v lr="$learning_rate" 'BEGIN { printf "%.6g", lr / 10 }')"
    --train-samples "$train_samples" --lr-warmup-samples "$((train_samples / 10))"
    --global-batch-size "$global_batch" --micro-batch-size "${MICRO_BATCH:-$micro_batch}"
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --attention-dropout 0 --hidden-dropout 0 --bf16
)
if [ "$optimizer" = muon ]; then
    # The scale of 0.2 gives an update the size of Adam's, so that Adam's learning rate serves.
    optimization+=(--muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2)
fi

tensor="${TENSOR:-$tensor}"
parallelism=(
    --pipeline-model-parallel-size "${PIPELINE:-$pipeline}" --tensor-model-parallel-size "$tensor"
    --use-distributed-optimizer
)
if [ "$tensor" -gt 1 ]; then
    parallelism+=(--sequence-parallel)
fi

schedule="${SCHEDULE:-fresh-2bw}"
asynchronous=(--log-pipeline-bubble)
if [ "$schedule" != default ]; then
    asynchronous+=(
        --pipeline-schedule "$schedule" --delay-correction "${CORRECTION:-error-feedback}"
    )
fi

read -r -a data <<<"${DATA:---mock-data --tokenizer-type NullTokenizer --vocab-size $vocabulary}"
output="${OUTPUT:-runs/$model}"
logging=(
    --log-interval 10 --eval-interval 1000 --eval-iters 20
    --save "$output/checkpoints" --load "$output/checkpoints" --save-interval 1000
    --tensorboard-dir "$output/tensorboard"
)

if [ -z "${GPUS:-}" ]; then
    GPUS="$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)"
    if [ "$GPUS" -eq 0 ]; then GPUS=8; fi
fi
nodes="${NODES:-1}"
if [ "$nodes" -gt 1 ]; then
    rendezvous=(
        --nnodes "$nodes" --node-rank "${NODE_RANK:?NODES > 1 needs NODE_RANK}"
        --master-addr "${HEAD:?NODES > 1 needs HEAD, the first node}" --master-port "${PORT:-29500}"
    )
else
    rendezvous=(--standalone)
fi

command=(
    torchrun "${rendezvous[@]}" --nproc-per-node "$GPUS"
    -m megatron_async "${SCRIPT:-$here/pretrain_gpt.py}"
    "${shape[@]}" "${architecture[@]}" "${optimization[@]}" "${parallelism[@]}"
    "${asynchronous[@]}" "${data[@]}" "${logging[@]}" "$@"
)
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit 0
fi
mkdir -p "$output"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
exec "${command[@]}"
