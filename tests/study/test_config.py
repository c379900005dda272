"""What a study's configuration may say, and which runs it means."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_async.schedules import asynchronous_names
from megatron_async.study import config
from megatron_async.study.cells import Cell, choose, count, plan
from megatron_async.study.config import ConfigError, Study
from megatron_async.study.results import DIVERGED, FINISHED, CellResult

MINIMAL: dict[str, Any] = {
    "flags": {"train-iters": 10},
    "optimizers": {"adam": {"learning-rates": [1e-3]}},
    "delays": ["none", "one-step"],
    "corrections": ["none", "error-feedback"],
    "seeds": [1, 2],
}
IDENTITY = ("cpu", "1", "", "data")


def study_of(**changes: Any) -> Study:
    return config.parse({**MINIMAL, **changes}, name="test")


def result_of(cell: Cell, loss: float | None) -> CellResult:
    return CellResult(
        name=cell.name,
        settings={},
        command=[],
        status=DIVERGED if loss is None else FINISHED,
        validation_loss=loss,
        losses=[],
        validation=[],
        seconds_per_iteration=None,
        seconds=0.0,
        versions={},
    )


def run_all(study: Study, loss: Any) -> dict[str, CellResult]:
    """Results of all cells, as a runner would make them."""
    results: dict[str, CellResult] = {}
    while todo := [c for c in plan(study, results, identity=IDENTITY) if c.name not in results]:
        results[todo[0].name] = result_of(todo[0], loss(todo[0]))
    return results


@pytest.mark.parametrize("name", config.shipped())
def test_shipped_configurations(name: str) -> None:
    study = config.load(name)
    assert study.description
    assert len(study.description) <= 90
    results = run_all(study, lambda cell: cell.learning_rate)
    cells = plan(study, results, identity=IDENTITY)
    assert len(cells) == len(results) == count(study, identity=IDENTITY)
    for cell in cells:
        assert cell.flags["optimizer"] in [(one,) for one in (*ALL_OPTIMIZERS, "nadamw")]
        asynchronous = cell.delay != "none"
        assert ("pipeline-schedule" in cell.flags) == asynchronous
        assert ("delay-correction" in cell.flags) == (cell.correction != "none")


ALL_OPTIMIZERS = ("adam", "muon", "normuon", "soap", "lion", "adan", "mars")


def test_shipped_table_has_all_optimizers_and_three_seeds() -> None:
    study = config.load("table")
    assert {variant.optimizer for variant in study.variants} == set(ALL_OPTIMIZERS)
    assert len(study.seeds) >= 3
    assert all(len(variant.learning_rates) > 1 for variant in study.variants)


def test_command_of_a_cell() -> None:
    study = study_of(
        flags={"train-iters": 10, "clip-grad": 1, "swiglu": True, "bf16": False, "list": [1, 2]},
        optimizers={
            "mine": {"flags": {"optimizer": "muon", "clip-grad": 2}, "learning-rates": [0.002]}
        },
        **{"min-lr-ratio": 0.5},
    )
    cell = plan(study, {}, identity=IDENTITY)[-1]
    assert cell.label == "mine one-step error-feedback lr0.002 seed2"
    words = " ".join(cell.words)
    for part in (
        *("--train-iters 10", "--clip-grad 2", "--list 1 2", "--optimizer muon", "--lr 0.002"),
        *("--min-lr 0.001", "--seed 2", "--pipeline-schedule pipedream-2bw"),
        *("--delay-correction error-feedback", "--swiglu --"),
    ):
        assert part in words
    assert "bf16" not in words


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "flags: {train-iters: 10, norm-epsilon: 1e-5}\ndelays: [none]\nseeds: [1]\n"
        "optimizers: {adam: {learning-rates: [1e-3, 2E-3, 1.5e-3]}}\n"
    )
    study = config.load(str(path))
    assert study.variants[0].learning_rates == (0.001, 0.0015, 0.002)
    assert study.flags["norm-epsilon"] == ("1e-05",)


def test_base_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "flags: {train-iters: 10, swiglu: true}\ndelays: [none]\nseeds: [1]\n"
        "optimizers: {adam: {learning-rates: [1]}, lion: {learning-rates: [2]}}\n"
    )
    own = tmp_path / "own.yaml"
    own.write_text("base: base.yaml\nflags: {swiglu: null}\noptimizers: {lion: null}\nseeds: [2]\n")
    study = config.load(str(own), overrides=["flags.train-iters=20", "optimizers.adam.flags.x=1"])
    assert study.flags == {"train-iters": ("20",)}
    assert [variant.name for variant in study.variants] == ["adam"]
    assert study.variants[0].flags == {"optimizer": ("adam",), "x": ("1",)}
    assert study.seeds == (2,)


def test_what_is_written_down_reads_back(tmp_path: Path) -> None:
    for name in config.shipped():
        study = config.load(name)
        path = tmp_path / f"{name}.yaml"
        path.write_text(config.dump(study))
        again = config.load(str(path))
        assert plan(again, {}, identity=IDENTITY) == plan(study, {}, identity=IDENTITY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeed": [1]}, "seeed is unknown: did you mean seeds?"),
        ({"flags": {}}, "flags.train-iters is missing"),
        ({"flags": {"train-iters": 10, "lr": 1}}, "flags.lr: the study sets this flag"),
        ({"flags": {"train-iters": 10, "--log_interval": 1}}, "the study sets this flag"),
        ({"flags": {"train-iters": 10, "a": {"b": 1}}}, "flags.a is {'b': 1}: give a text"),
        ({"seeds": []}, "seeds is []: give a list with at least one entry"),
        ({"seeds": [1, 1]}, "seeds: 1 stands there twice"),
        ({"seeds": [0, 1]}, "seeds is [0, 1]: give a list of integers from 1 on"),
        ({"tuning": {"seed": 0}}, "tuning.seed is 0: give an integer from 1 on"),
        ({"seeds": ["a"]}, "seeds is ['a']: give a list of integers"),
        ({"device": "tpu"}, "device is 'tpu': give one of cpu, gpu"),
        ({"ranks": 0}, "ranks is 0: give an integer of at least 1"),
        ({"optimizers": {"adam": {}}}, "optimizers.adam.learning-rates is missing"),
        ({"optimizers": {"adam": {"learning-rates": [0.0]}}}, "positive numbers"),
        ({"optimizers": {"a b": {"learning-rates": [1]}}}, "'a b' is no name"),
        (
            {"optimizers": {"adam": {"learning-rates": [1], "momentum": {"values": [1]}}}},
            "optimizers.adam.momentum.flag is missing",
        ),
        (
            {"delays": ["two-step"]},
            (
                f"two-step is unknown: give none, one-step, {', '.join(asynchronous_names()[1:])}, "
                "pipedream-STAGES, or {name: NAME, flags: {...}}"
            ),
        ),
        ({"delays": [{"name": "mine"}]}, "delays[0].flags is missing"),
        ({"delays": ["none", "none"]}, "delays: none stands there twice"),
        ({"corrections": ["magic"]}, "magic is unknown: give one of none, error-feedback"),
        ({"corrections": [{"name": "none", "optimizers": ["sgd"]}]}, "none is for sgd"),
        (
            {"delays": ["pipedream-4"]},
            "error-feedback is defined for a delay of one step, not for pipedream-4",
        ),
        ({"dataset": "books"}, "dataset is 'books': give stdlib, mock"),
        ({"dataset": {"prefix": None}}, "dataset.prefix is missing"),
        ({"script": "nowhere.py"}, "script: there is no file nowhere.py"),
        ({"tuning": {"seed": "a"}}, "tuning.seed is 'a': give an integer"),
        ({"checkpoints": {"keep": True}}, "checkpoints.interval is missing"),
        ({"min-lr-ratio": -1}, "min-lr-ratio is -1: give a number that is not negative"),
    ],
)
def test_wrong_configurations(changes: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        study_of(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "line 2: a stands there twice"),
        ("no: 1\n", "line 1: the key False is no text"),
        ("- 1\n", "is not a mapping of keys to values"),
        ("a: [\n", "is not YAML"),
        ("base: own.yaml\n", "base leads back to itself"),
        ("base: missing.yaml\n", "base missing.yaml: No such file"),
    ],
)
def test_wrong_files(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.load(str(path))


def test_unknown_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match=r"there is no file nowhere: .* quick"):
        config.load("nowhere")


@pytest.mark.parametrize("override", ["flags", "=1", "seeds.a=1"])
def test_wrong_overrides(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        config.load("quick", overrides=[override])


def test_modes_of_corrections() -> None:
    study = study_of(
        delays=["none", "one-step", "pipedream-4"],
        corrections=[
            "none",
            {"name": "error-feedback", "strengths": [0.5, 1.5], "delays": ["one-step"]},
            {"name": "late", "flags": {"x": 1}, "optimizers": ["adam"]},
        ],
    )
    modes = {(mode.delay, mode.correction): mode for mode in study.modes}
    assert list(modes) == [
        ("none", "none"),
        ("one-step", "none"),
        ("one-step", "error-feedback-0.5"),
        ("one-step", "error-feedback-1.5"),
        ("one-step", "late"),
        ("pipedream-4", "none"),
        ("pipedream-4", "late"),
    ]
    assert modes["one-step", "error-feedback-1.5"].flags == {
        "pipeline-schedule": ("pipedream-2bw",),
        "delay-correction": ("error-feedback",),
        "delay-correction-strength": ("1.5",),
    }
    assert modes["pipedream-4", "late"].flags == {
        "pipeline-schedule": ("pipedream",),
        "emulate-pipeline-stages": ("4",),
        "x": ("1",),
    }
    assert modes["one-step", "late"].optimizers == ("adam",)


def test_momentum_makes_variants() -> None:
    study = study_of(
        optimizers={
            "adam": {
                "momentum": {"flag": "adam-beta1", "values": [0.8, 0.95]},
                "learning-rates": [1e-3],
            }
        }
    )
    assert [(v.name, v.momentum, v.flags["adam-beta1"]) for v in study.variants] == [
        ("adam-m0.8", 0.8, ("0.8",)),
        ("adam-m0.95", 0.95, ("0.95",)),
    ]


TUNED = {
    "optimizers": {
        "adam": {"learning-rates": [1e-3, 2e-3, 4e-3]},
        "muon": {"learning-rates": [1e-2]},
    }
}


def test_learning_rate_is_chosen_by_synchronous_runs() -> None:
    study = study_of(**TUNED)
    adam, muon = study.variants
    first = plan(study, {}, identity=IDENTITY)
    tuning = [cell for cell in first if cell.variant == "adam"]
    assert [(c.delay, c.seed, c.learning_rate) for c in tuning] == [
        ("none", 1, rate) for rate in (1e-3, 2e-3, 4e-3)
    ]
    assert len([cell for cell in first if cell.variant == "muon"]) == 6  # nothing to choose
    results = {cell.name: result_of(cell, None) for cell in tuning[:2]}
    assert choose(study, adam, results, identity=IDENTITY) is None
    results[tuning[2].name] = result_of(tuning[2], 3.0)
    results[tuning[0].name] = result_of(tuning[0], 2.0)
    choice = choose(study, adam, results, identity=IDENTITY)
    assert choice is not None
    assert choice.learning_rate == 1e-3
    assert choice.at_edge
    assert choice.losses == {1e-3: 2.0, 2e-3: float("inf"), 4e-3: 3.0}
    then = [c for c in plan(study, results, identity=IDENTITY) if c.variant == "adam"]
    assert {c.learning_rate for c in then if c.delay != "none"} == {1e-3}
    assert len(then) == 3 + 6 - 1  # one run has both uses
    single = choose(study, muon, {}, identity=IDENTITY)
    assert single is not None
    assert not single.at_edge


def test_learning_rate_is_chosen_for_each_mode() -> None:
    study = study_of(**TUNED, tuning={"seed": 1, "per-mode": True})
    # The best rate is 1e-3 synchronous, 2e-3 delayed and 1e-3 corrected.
    best = {"none": 1e-3, "one-step": 2e-3, "error-feedback": 1e-3}

    def loss(cell: Cell) -> float:
        mode = cell.correction if cell.correction != "none" else cell.delay
        return abs(cell.learning_rate - best[mode])

    results = run_all(study, loss)
    cells = plan(study, results, identity=IDENTITY)
    assert len(cells) == len(results) == count(study, identity=IDENTITY)
    seed_2 = {
        (cell.delay, cell.correction): cell.learning_rate
        for cell in cells
        if cell.variant == "adam" and cell.seed == 2
    }
    assert seed_2 == {
        ("none", "none"): 1e-3,
        ("one-step", "none"): 2e-3,
        ("one-step", "error-feedback"): 1e-3,
    }


def test_fast_model_differs_from_the_small_one_in_speed_alone() -> None:
    fast = config.load("long-small").flags
    small = config.load("fresh-small").flags
    changed = {name for name in {*fast, *small} if fast.get(name) != small.get(name)}
    assert changed == {
        *("micro-batch-size", "no-create-attention-mask-in-dataloader", "fused-cpu-kernels"),
        "train-iters",
    }


def test_all_rates_diverged_leaves_the_optimizer_out() -> None:
    study = study_of(**TUNED)
    results = run_all(study, lambda cell: None if cell.variant == "adam" else 1.0)
    cells = plan(study, results, identity=IDENTITY)
    assert {cell.delay for cell in cells if cell.variant == "adam"} == {"none"}
    assert {cell.delay for cell in cells if cell.variant == "muon"} == {"none", "one-step"}


def test_without_tuning_every_rate_is_run() -> None:
    study = study_of(**TUNED, tuning=False)
    cells = plan(study, {}, identity=IDENTITY)
    assert len(cells) == count(study, identity=IDENTITY) == (3 + 1) * 3 * 2


def test_only_what_changed_is_run_again() -> None:
    def names(study: Study) -> dict[str, str]:
        return {cell.label: cell.name for cell in plan(study, {}, identity=IDENTITY)}

    two = {"adam": {"learning-rates": [1e-3]}, "muon": {"learning-rates": [1e-2]}}
    before = names(study_of(optimizers=two, flags={"train-iters": 10, "x": 1}))
    assert before == names(study_of(optimizers=two, flags={"x": 1, "train-iters": 10}))
    assert len(set(before.values())) == 12
    other = {**two, "muon": {"learning-rates": [1e-2], "flags": {"muon-momentum": 0.9}}}
    changed = names(study_of(optimizers=other, flags={"train-iters": 10, "x": 1}))
    assert {label for label in before if before[label] != changed[label]} == {
        label for label in before if label.startswith("muon")
    }
    longer = names(study_of(optimizers=two, flags={"train-iters": 11, "x": 1}))
    assert not set(before.values()) & set(longer.values())
    more = names(study_of(optimizers=two, flags={"train-iters": 10, "x": 1}, seeds=[1, 2, 3]))
    assert before.items() <= more.items()
    elsewhere = plan(study_of(optimizers=two), {}, identity=("cpu", "1", "", "other data"))
    assert not set(before.values()) & {cell.name for cell in elsewhere}
