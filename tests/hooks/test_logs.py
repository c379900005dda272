"""Our scalars stand beside Megatron's, in TensorBoard, in W&B and in the log line."""

from pathlib import Path

from tests.support.gpt import gpt_args
from tests.support.output import read_scalars
from tests.support.torchrun import run_torchrun

ITERATIONS = 5


def test_scalars_go_to_megatrons_writers(tmp_path: Path) -> None:
    argv = gpt_args(
        pipeline_model_parallel_size=2,
        num_layers=2,
        train_iters=ITERATIONS,
        pipeline_schedule="pipedream-2bw",
        delay_correction="error-feedback",
        log_pipeline_bubble=True,
        tensorboard_dir=tmp_path / "tensorboard",
        tensorboard_log_interval=1,
        wandb_project="test",
        wandb_exp_name="test",
        wandb_save_dir=tmp_path,
    )
    result = run_torchrun(2, argv, launcher="plugin")
    scalars = read_scalars(tmp_path / "tensorboard")
    iterations = list(range(1, ITERATIONS + 1))

    # The update of an iteration is still pending when it is logged, but for the last one's.
    pending = {n: n - 1 for n in iterations[:-1]}
    assert scalars["weight-version"] == {**pending, ITERATIONS: ITERATIONS}
    assert scalars["gradient-delay"] == {n: float(n > 1) for n in iterations}
    # Each update's own norm, the last one's included; the log line is one update behind.
    assert list(scalars["update-grad-norm"]) == iterations
    printed = dict(result.grad_norms)
    for n in iterations[1:-1]:
        assert printed[n] == f"{scalars['update-grad-norm'][n - 1]:.3f}"
    assert all(ratio > 0 for ratio in scalars["delay-correction-ratio"].values())
    assert scalars["delay-correction-ratio"]
    assert all(0 <= share < 1 for share in scalars["pipeline-bubble"].values())
    assert "bubble" in result.iterations[-1].fields
    assert {"lm loss", "grad-norm", "learning-rate"} <= set(scalars)

    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"weight-version" in run.read_bytes()
