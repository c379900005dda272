"""What `megatron-async doctor -- COMMAND` says of a command."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_async import hooks
from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import fixed_delay
from megatron_async.tools import doctor
from megatron_async.tools.forecast import Forecast, forecast
from megatron_async.tools.training_command import read_command
from megatron_async.tools.verdict import Verdict, judge
from tests.support.torchrun import environment

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks

ROOT = Path(__file__).parents[2]
FUSED = rope_utils.fused_apply_rotary_pos_emb
MODEL = [
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64", "--vocab-size", "256"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "20"),
    *("--lr", "1e-3", "--bf16", "--optimizer", "muon", "--eval-interval", "10"),
    *("--micro-batch-size", "1", "--global-batch-size", "16"),
    *("--pipeline-model-parallel-size", "4", "--muon-momentum", "0.95"),
]
TWO_VERSIONS = ["--pipeline-schedule", "pipedream-2bw"]

REFUSED = [
    "--use-ring-exchange-p2p",
    *("--save-dgrads-interval", "5", "--save-params-interval", "5"),
]


def torchrun(*arguments: str, ranks: int = 8, model: Sequence[str] = MODEL) -> list[str]:
    start = ["torchrun", "--nproc-per-node", str(ranks), "-m", "megatron_async"]
    return [*start, "pretrain_gpt.py", *model, *arguments]


def verdict(words: Sequence[str]) -> Verdict:
    return judge(read_command(words, environment={}))


def numbers(*arguments: str, ranks: int = 8) -> Forecast:
    found = verdict(torchrun(*arguments, ranks=ranks))
    assert found.problems == ()
    assert found.subject is not None
    return forecast(found.subject)


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = doctor.main(words)
    shown = capsys.readouterr()
    return status, shown.out + shown.err


@pytest.mark.parametrize("flag", ["--num-layers", "--seq-length", "--micro-batch-size"])
def test_what_is_no_size_is_all_that_is_said(flag: str) -> None:
    found = verdict(torchrun(*TWO_VERSIONS, flag, "0"))
    assert found.problems == (f"{flag}: 0 is no size. Give at least 1.",)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--train-iters -1", "--train-iters: -1 is negative. Give 0 or more."),
        ("--kv-channels 0", "--kv-channels: 0 is no size. Give at least 1."),
        (
            "--group-query-attention --num-query-groups 3",
            "4 heads do not divide into 3 --num-query-groups.",
        ),
        (
            "--num-experts 4 --moe-router-topk 5 --disable-bias-linear",
            "--moe-router-topk 5 is more than 4 experts.",
        ),
    ],
)
def test_models_that_megatron_cannot_build(flags: str, problem: str) -> None:
    assert verdict(torchrun(*TWO_VERSIONS, *flags.split())).problems == (problem,)


def test_broken_files_are_refused_with_everything_else(tmp_path: Path) -> None:
    (tmp_path / "corpus.idx").touch()
    model = [word for word in MODEL if word != "--mock-data"]
    given = [*TWO_VERSIONS, "--data-path", f"{tmp_path}/corpus", "--use-ring-exchange-p2p"]
    words = torchrun(*given, model=model)
    words[words.index("pretrain_gpt.py")] = str(tmp_path)
    problems = verdict(words).problems
    assert problems[0] == f"{tmp_path} is a folder. Give the training script."
    assert problems[1].startswith(f"--data-path {tmp_path}/corpus: {tmp_path}/corpus.idx is there")
    assert problems[2].startswith("--use-ring-exchange-p2p: ")
    words[words.index(str(tmp_path))] = "x" * 300 + ".py"
    assert ".py is not here" in verdict(words).notes[0]


def test_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    status, shown = asked(capsys, "--", *torchrun(*TWO_VERSIONS))
    assert status == 0
    assert shown.startswith("Accepted: it will run asynchronously, with pipedream-2bw.\n")
    assert "8 = 4 pipeline x 2 data parallel" in shown
    assert "m = 8 a batch, p = 4 stages" in shown
    assert "1.38 = (m + p - 1) / m" in shown
    assert "1 updates late in the mean; by stage 1 everywhere" in shown
    assert "extra memory" in shown
    assert "unwise" not in shown
    # Nothing stays behind.
    assert not hooks.installed()
    assert dict(os.environ) == before


def test_without_a_flag_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = asked(capsys, "--", *torchrun())
    assert status == 0
    assert shown.startswith("Accepted: it will run, synchronously.")
    assert "add --pipeline-schedule" in shown
    assert "expected gain" not in shown


def test_refused_with_all_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [*TWO_VERSIONS, *REFUSED]
    status, shown = asked(capsys, "--", *torchrun(*wrong))
    assert status == 1
    assert shown.startswith("Refused: 3 problems with the arguments.")
    for flag in ("--use-ring-exchange-p2p", "--save-dgrads-interval", "--save-params-interval"):
        assert re.search(rf"^  \d\. {flag}: ", shown, re.MULTILINE)
    assert "expected gain" not in shown


def test_megatrons_own_checks_and_the_rules_together() -> None:
    # Ahead of Megatron's checks, in them without a message, and behind them.
    first, second, third = verdict(
        torchrun(*TWO_VERSIONS, "--num-layers", "7", "--fp16", "--use-ring-exchange-p2p")
    ).problems
    assert first.startswith("--num-layers: 7 layers do not divide into 4")
    assert second.startswith("--use-ring-exchange-p2p")
    assert third.startswith("--fp16")
    found = verdict(torchrun(*TWO_VERSIONS, "--fp16")).problems
    assert found[0].startswith("Megatron itself: `assert not args.bf16` does not hold (arguments")
    assert found[1].startswith("--fp16")


def test_world_size_that_does_not_divide() -> None:
    (problem,) = verdict(torchrun(*TWO_VERSIONS, ranks=6)).problems
    assert problem.startswith("Megatron itself: world size (6)")


def test_too_few_microbatches_for_the_ranks_of_torchrun() -> None:
    assert verdict(torchrun(*TWO_VERSIONS, ranks=16)).accepted
    (problem,) = verdict(torchrun(*TWO_VERSIONS, ranks=32)).problems
    assert "a batch has 2 microbatches, and 4 stages need at least 3" in problem


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--no-such-flag", "3"], "--no-such-flag 3: Megatron's parser does not know it"),
        (["--lr"], "--lr: expected one argument"),
        (["--num-layers", "many"], "--num-layers: invalid int value: 'many'"),
        (["--yaml-cfg", "config.yaml"], "--yaml-cfg: "),
        (["--pipeline-schedule", "gpipe"], "--pipeline-schedule: "),
        (["@arguments.txt"], "@arguments.txt: Megatron's parser does not know it"),
        (["--help"], "Megatron's parser: it prints its help"),
    ],
)
def test_command_lines_that_megatron_does_not_parse(arguments: list[str], start: str) -> None:
    (problem,) = verdict(torchrun(*TWO_VERSIONS, *arguments)).problems
    assert problem.startswith(start)


def test_the_model_configuration_is_made() -> None:
    (problem,) = verdict(
        torchrun(*TWO_VERSIONS, "--num-experts", "4", "--moe-router-num-groups", "3",
                 "--moe-router-group-topk", "2", "--expert-model-parallel-size", "1")
    ).problems  # fmt: skip
    assert problem.startswith("Megatron itself: ")


def test_without_the_launcher(tmp_path: Path) -> None:
    words = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *MODEL, *TWO_VERSIONS]
    (problem,) = verdict(words).problems
    assert problem.startswith("-m megatron_async: ")
    script = tmp_path / "train.py"
    script.write_text("import megatron_async\nmegatron_async.install()\n")
    assert verdict([*words[:3], str(script), *words[4:]]).accepted
    assert verdict([*words[:4], *MODEL]).accepted  # no flag of the package


def test_a_script_that_is_not_here() -> None:
    assert any("is not here" in note for note in verdict(torchrun(*TWO_VERSIONS)).notes)


def test_cpu_ranks() -> None:
    found = verdict(torchrun("--cpu", *TWO_VERSIONS))
    assert found.accepted
    assert any("--distributed-backend gloo" in note for note in found.notes)
    problems = verdict(torchrun("--cpu", *TWO_VERSIONS, "--moe-grouped-gemm", "--log-energy"))
    assert [text.partition(" ")[0] for text in problems.problems[:2]] == [
        "--moe-grouped-gemm",
        "--log-energy",
    ]


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["--decoder-first-pipeline-num-layers", "9"], "--decoder-first-pipeline-num-layers, "),
        (["--use-torch-fsdp2"], "--use-torch-fsdp2: sharded parameters"),
        (["--optimizer-cpu-offload"], "--optimizer-cpu-offload: copies"),
        (["--micro-batch-size", "3"], "Megatron itself: eval_global_batch_size (16)"),
        (["--cpu", "--fp8-format", "hybrid"], "--fp8-format hybrid does not work on CPU ranks"),
        (["--cpu", "--log-energy"], "--log-energy does not work on CPU ranks"),
    ],
)
def test_one_mistake_is_listed_once(arguments: list[str], start: str) -> None:
    found = verdict(torchrun(*TWO_VERSIONS, *arguments))
    (problem,) = found.problems
    assert problem.startswith(start)
    assert found.warnings == ()


ROPE = ["--position-embedding-type", "rope"]


def on_a_machine(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, engine: bool) -> None:
    """What is installed here must not matter."""
    found = importlib.util.find_spec

    def find(name: str, *rest: str) -> object:
        if name == "transformer_engine":
            return object() if engine else None
        return found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_without_transformer_engine_where_the_run_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine(monkeypatch, gpu=False, engine=False)
    found = verdict(torchrun(*TWO_VERSIONS, *ROPE))
    assert found.problems == ()
    (note,) = [note for note in found.notes if "Transformer Engine" in note]
    assert "the machines that train must have it" in note
    assert "--transformer-impl local --no-rope-fusion" in note
    local = verdict(torchrun(*TWO_VERSIONS, "--transformer-impl", "local"))
    assert local.accepted
    assert not any("Transformer Engine" in note for note in local.notes)
    assert rope_utils.fused_apply_rotary_pos_emb is FUSED


def test_without_transformer_engine_where_the_run_could_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_machine(monkeypatch, gpu=True, engine=False)
    (problem,) = verdict(torchrun(*TWO_VERSIONS, *ROPE)).problems
    assert problem.startswith("--transformer-impl transformer_engine (the default): it needs")
    (problem,) = verdict(torchrun(*TWO_VERSIONS, *ROPE, "--transformer-impl", "local")).problems
    assert problem.startswith("--rope-fusion: it needs Transformer Engine")
    assert verdict(torchrun(*TWO_VERSIONS, "--transformer-impl", "local")).accepted


def test_a_variable_that_megatron_wants_is_said_how_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    words = ["pretrain_gpt.py", *MODEL, *TWO_VERSIONS, "--tensor-model-parallel-size", "2"]
    (problem,) = judge(read_command(words, world_size=8)).problems
    assert "put it in front: -- CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" in problem
    assert judge(read_command(["CUDA_DEVICE_MAX_CONNECTIONS=1", *words], world_size=8)).accepted


def test_unwise() -> None:
    (warning,) = verdict(torchrun(*TWO_VERSIONS, "--optimizer", "adam")).warnings
    assert "bears the delay worse" in warning


def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = asked(capsys, "--", "make", "train")
    assert status == 2
    assert shown.startswith("megatron-async doctor: `make train` is no training command")
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--"])
    assert ended.value.code == 2
    assert "the training command is missing" in capsys.readouterr().err


def test_world_size_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown = asked(
        capsys, "--world-size", "8", "--", "pretrain_gpt.py", *MODEL, *TWO_VERSIONS
    )
    assert status == 0
    assert "8 = 4 pipeline x 2 data parallel" in shown


def test_numbers_come_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that nobody knows by name."""
    record = replace(
        SCHEDULES["pipedream-2bw"],
        name="five-late",
        rule=lambda pipeline, microbatches: fixed_delay(lambda stage: 5),
    )
    monkeypatch.setitem(SCHEDULES._records, record.name, record)
    usual, late = (numbers("--pipeline-schedule", name) for name in ("pipedream-2bw", "five-late"))
    assert late.delays == (5.0,) * 4
    assert late.memory is not None
    assert usual.memory is not None
    assert [stage.second_version for stage in late.memory] == [
        5 * stage.second_version for stage in usual.memory
    ]


@pytest.mark.parametrize(
    ("name", "delays"),
    [
        ("pipedream-2bw", (1.0, 1.0, 1.0, 1.0)),
        # p - 1 of m = 8 microbatches are one update late.
        ("fresh-2bw", (0.375,) * 4),
    ],
)
def test_delays(name: str, delays: tuple[float, ...]) -> None:
    assert numbers("--pipeline-schedule", name).delays == pytest.approx(delays)


def test_what_is_advised_is_accepted() -> None:
    """PACI's delays differ between stages, for which error feedback is not defined."""
    for schedule, corrected in (("pipedream-2bw", True), ("paci", False)):
        found = verdict(torchrun("--pipeline-schedule", schedule, "--optimizer", "adam"))
        (advice,) = [text for text in found.warnings if text.startswith("--optimizer:")]
        assert ("--delay-correction" in advice) == corrected
        assert "--optimizer muon" in advice


def test_gains() -> None:
    deferred = numbers(*TWO_VERSIONS)
    assert deferred.ideal_gain == 11 / 8
    assert deferred.simulated_gain == pytest.approx(11 / 8, rel=0.02)
    waiting = numbers(*TWO_VERSIONS, "--no-deferred-update").simulated_gain
    assert waiting is not None
    assert deferred.simulated_gain is not None
    assert waiting < deferred.simulated_gain


def test_memory_by_hand() -> None:
    """Two layers of 12 h^2 + 13 h parameters on a stage, h = 64; bf16 and fp32."""
    layers = 2 * (12 * 64 * 64 + 13 * 64)
    vocabulary = 256 * 64
    parameters = [layers + vocabulary + 64 * 64, layers, layers, layers + vocabulary + 2 * 64]
    plain = numbers(*TWO_VERSIONS).memory
    assert plain is not None
    assert [stage.added for stage in plain] == [(2 + 4) * count for count in parameters]
    corrected = numbers(*TWO_VERSIONS, "--delay-correction", "error-feedback").memory
    assert corrected is not None
    assert [stage.added for stage in corrected] == [(2 + 4 + 4) * count for count in parameters]


def test_activations_of_microbatches_further_ahead_are_counted() -> None:
    flags = ("--pipeline-schedule", "fresh-2bw")
    usual = numbers(*flags)
    assert usual.more_activations == (0,) * 4
    ahead = numbers(*flags, "--pipeline-extra-warmup", "3")
    assert usual.memory is not None
    # 4, 3, 2, 1 in flight, and with three more on the first stage 7, 5, 3, 1.
    shares = [3 / 4, 2 / 3, 1 / 2, 0]
    for stage, (share, memory) in enumerate(zip(shares, usual.memory, strict=True)):
        assert ahead.more_activations[stage] == pytest.approx(share * memory.activations, rel=0.1)
        assert ahead.added(stage) == usual.added(stage) + ahead.more_activations[stage]


def test_layers_of_a_layout_are_counted() -> None:
    memory = numbers(
        *(*TWO_VERSIONS, "--pipeline-model-parallel-layout", "Et*3|t*3|t|tL"),
        "--untie-embeddings-and-output-weights",
    ).memory
    assert memory is not None
    layer = 12 * 64 * 64 + 13 * 64
    assert [stage.second_version // 2 for stage in memory[1:3]] == [3 * layer, layer]


def test_models_without_formulas_are_named() -> None:
    found = numbers(*TWO_VERSIONS, "--multi-latent-attention")
    assert found.memory is None
    assert found.uncounted == "multi-latent attention"


def test_says_what_a_start_says() -> None:
    """The same list of problems, from a run that is really started."""
    wrong = [*TWO_VERSIONS, *REFUSED]
    start = ["-m", "megatron_async", "--cpu", str(ROOT / "examples" / "pretrain_gpt.py")]
    one = [*MODEL, "--pipeline-model-parallel-size", "1", *wrong]
    result = subprocess.run(
        [sys.executable, *start, *one],
        env={**environment(), "WORLD_SIZE": "1", "RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    listed = re.findall(r"^  \d+\. (.*)$", result.stderr, re.MULTILINE)
    assert listed
    assert verdict(["python", *start, *one]).problems == tuple(listed)
