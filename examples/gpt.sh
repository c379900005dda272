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
#     PIPELINE, TENSOR, EXPERT, MICRO_BATCH    instead of the model's own
#     GPUS            GPUs a node (default: those that nvidia-smi lists, else 8)
#     CPU=1           GPUS CPU ranks a node over gloo instead of GPUs (default: 2), to try the scripts
#     LOGS            folder for each rank's output in files of its own; the console then shows the
#                     first and the last rank of the node
#     CHECK=1         check the nodes instead of training (docs/slurm.md)
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
    sequence="${sequence:-2048}"
    vocabulary="${vocabulary:-50257}"
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
moe)
    sequence=4096
    vocabulary=49152
    architecture=(
        --seq-length "$sequence" --max-position-embeddings "$sequence"
        --group-query-attention
        --position-embedding-type rope --rotary-base 100000
        --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights
        --num-experts 64 --moe-ffn-hidden-size 1024 --moe-router-topk 8
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --moe-token-dispatcher-type alltoall
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
    # Megatron's spectral scale, sqrt(max(rows, columns)), times 0.2 gives an update the root mean
    # square of Adam's, so that Adam's learning rate and weight decay serve (Liu et al., "Muon is
    # Scalable for LLM Training", arXiv 2502.16982, section 2.2). What the paper on one-step delays
    # uses is not known here.
    optimization+=(
        --muon-momentum 0.95 --muon-nesterov
        --muon-scale-mode spectral --muon-extra-scale-factor 0.2
    )
fi

tensor="${TENSOR:-$tensor}"
parallelism=(
    --pipeline-model-parallel-size "${PIPELINE:-$pipeline}" --tensor-model-parallel-size "$tensor"
    --use-distributed-optimizer
)
if [ -z "${PIPELINE:-}" ] && [ -n "${layout:-}" ]; then
    parallelism+=(--pipeline-model-parallel-layout "$layout")
fi
expert="${EXPERT:-${expert:-1}}"
if [ "$expert" -gt 1 ]; then
    parallelism+=(--expert-model-parallel-size "$expert")
fi
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

backend=()
if [ -n "${CPU:-}" ]; then
    backend=(--cpu)
    GPUS="${GPUS:-2}"
elif [ -z "${GPUS:-}" ]; then
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
# Megatron wants 1 for tensor parallelism before Blackwell; see docs/gpu.md for both.
connections=32
if [ "$tensor" -gt 1 ] || [ -n "${CPU:-}" ]; then connections=1; fi
launch=(
    env "CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$connections}"
    "PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    torchrun "${rendezvous[@]}" --nproc-per-node "$GPUS"
)
if [ -n "${LOGS:-}" ]; then
    last="$((GPUS - 1))"
    launch+=(--log-dir "$LOGS" --tee 3 --local-ranks-filter "0$([ "$last" -eq 0 ] || echo ",$last")")
fi

if [ -n "${CHECK:-}" ]; then
    command=("${launch[@]}" -m megatron_async.tools.node_check "${backend[@]}" --output "$output")
else
    command=(
        "${launch[@]}" -m megatron_async "${backend[@]}" "${SCRIPT:-$here/pretrain_gpt.py}"
        "${shape[@]}" "${architecture[@]}" "${optimization[@]}" "${parallelism[@]}"
        "${asynchronous[@]}" "${data[@]}" "${logging[@]}" "$@"
    )
fi
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${command[@]}"
    exit 0
fi
mkdir -p "$output"
if [ -n "${LOGS:-}" ]; then mkdir -p "$LOGS"; fi
export PYTHONUNBUFFERED=1 # what a rank that is killed has said is in its log
exec "${command[@]}"
