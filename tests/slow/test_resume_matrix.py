"""Every optimizer, layout and checkpoint format: saved, stopped, resumed.

Takes half an hour on two idle cores:

    pytest -m slow tests/slow/test_resume_matrix.py

A part of it: ``-k muon``, ``-k torch_dist``; only the selected jobs run.
"""

import dataclasses
import functools
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.gpt import ASYNC, Value
from tests.support.steps import Outcome, Step, run_steps

pytestmark = pytest.mark.slow

type Flags = Mapping[str, Value]

CORRECTED: Flags = {"delay_correction": "error-feedback"}
ADAPTIVE: Flags = {**CORRECTED, "delay_correction_adaptive_strength": True}
PREDICTED: Flags = {"delay_correction": "weight-prediction"}
NESTEROV: Flags = {"delay_correction": "nesterov", "delay_correction_momentum": 0.9}
COMPENSATED: Flags = {
    "delay_correction": "delay-compensation",
    "delay_correction_strength": 1000.0,
}
ADAPTIVELY_COMPENSATED: Flags = {**COMPENSATED, "delay_correction_adaptive_strength": True}
NO_DROPOUT: Flags = {"hidden_dropout": 0, "attention_dropout": 0}
BF16: Flags = {"bf16": True}
DISTRIBUTED: Flags = {"use_distributed_optimizer": True}
UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
STAGES_2: Flags = {"pipeline_model_parallel_size": 2}
STAGES_4: Flags = {"pipeline_model_parallel_size": 4}
TENSORS_2: Flags = {"tensor_model_parallel_size": 2}
FRESH: Flags = {"pipeline_schedule": "fresh-2bw", **CORRECTED}
LATE: Flags = {"pipeline_extra_warmup": 1}
MUON: Flags = {"optimizer": "muon", "muon_tp_mode": "duplicated"}
DIST_MUON: Flags = {"optimizer": "dist_muon", "bf16": True}
MOE: Flags = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
}
PRECISION_AWARE: Flags = {
    **BF16,
    **DISTRIBUTED,
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "fp16",
    "exp_avg_sq_dtype": "fp16",
}
EXPERTS_2: Flags = {**MOE, "expert_model_parallel_size": 2}
RESHARDABLE: Flags = {"dist_ckpt_optim_fully_reshardable": True}
SPARING: Flags = {**RESHARDABLE, "distrib_optim_fully_reshardable_mem_efficient": True}
BACKGROUND: Flags = {"async_save": True, "use_persistent_ckpt_worker": True}
OVERLAPPED: Flags = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination; the flags are hashed by their text."""

    name: str
    ranks: int
    format: str
    flags: Flags = dataclasses.field(hash=False, compare=False)
    prelude: str = dataclasses.field(default="", compare=False)

    @property
    def steps(self) -> list[Step]:
        flags: dict[str, Value] = {**ASYNC, "ckpt_format": self.format, **self.flags}
        place = "{dir}/" + self.name
        interval = {"save_interval": 3}
        if "non_persistent_ckpt_type" in flags:
            interval = {"save_interval": 5, "non_persistent_save_interval": 3}
        saved: dict[str, Value] = {**flags, "save": place, **interval, "exit_interval": 5}
        from_3: dict[str, Value] = {**flags, "load": place, "ckpt_step": 3}
        if "non_persistent_ckpt_type" in flags:
            saved["exit_interval"] = 4
            # The one of iteration 4 persists, and Megatron would prefer it.
            from_3 |= {"ckpt_step": None, "load": f"{place}/nothing"}
            from_3["non_persistent_global_ckpt_dir"] = f"{place}/non_persistent"
        return [
            Step(f"{self.name} uninterrupted", flags),
            Step(f"{self.name} stopped", saved, prelude=self.prelude),
            Step(f"{self.name} resumed", from_3),
            Step(f"{self.name} resumed from its end", {**flags, "load": place}),
        ]


def sharded_as(kind: str) -> str:
    """Save the distributed optimizer's state as older releases of Megatron did."""
    return f"""
from megatron.training import checkpointing
build = checkpointing._build_sharded_state_dict_metadata
def as_before(*args, **kwargs):
    return {{**build(*args, **kwargs), "distrib_optim_sharding_type": {kind!r}}}
checkpointing._build_sharded_state_dict_metadata = as_before
"""


def cells() -> list[Cell]:
    both: list[tuple[str, int, Flags]] = [
        ("adam", 2, {**STAGES_2}),
        ("adam corrected", 2, {**STAGES_2, **CORRECTED}),
        ("adam untied", 2, {**STAGES_2, **CORRECTED, **UNTIED}),
        ("adam undeferred", 2, {**STAGES_2, **CORRECTED, "no_deferred_update": True}),
        (
            "adam norm of the stage",
            2,
            {**STAGES_2, **CORRECTED, **UNTIED, "grad_norm_scope": "stage"},
        ),
        ("adam swiglu", 2, {**STAGES_2, **CORRECTED, "swiglu": True, "disable_bias_linear": True}),
        ("adam tensors", 2, {**TENSORS_2, **CORRECTED}),
        ("adam one stage", 1, {**BF16, **CORRECTED}),
        ("distributed", 2, {**DISTRIBUTED, **BF16}),
        ("distributed corrected", 2, {**DISTRIBUTED, **BF16, **CORRECTED}),
        ("distributed fp32", 2, {**DISTRIBUTED, **CORRECTED}),
        (
            "distributed overlapped",
            2,
            {**DISTRIBUTED, **BF16, **CORRECTED, **OVERLAPPED, "second_grad_buffer": True},
        ),
        ("muon", 2, {**STAGES_2, **MUON}),
        (
            "muon layout",
            2,
            {**STAGES_2, **MUON, **UNTIED, "pipeline_model_parallel_layout": "Ettt|tL"},
        ),
        ("muon corrected", 2, {**STAGES_2, **MUON, **BF16, **CORRECTED}),
        ("muon untied", 2, {**STAGES_2, **MUON, **CORRECTED, **UNTIED}),
        ("dist_muon", 2, {**DIST_MUON}),
        ("dist_muon corrected", 2, {**DIST_MUON, **CORRECTED}),
        ("dist_muon untied", 2, {**STAGES_2, **DIST_MUON, **CORRECTED, **UNTIED}),
        ("experts", 2, {**STAGES_2, **MOE}),
        ("experts corrected", 2, {**EXPERTS_2, **DISTRIBUTED, **BF16, **CORRECTED}),
        ("fresh", 2, {**STAGES_2, **FRESH}),
        ("fresh muon untied", 2, {**STAGES_2, **MUON, **FRESH, **UNTIED}),
        (
            "fresh overlapped",
            2,
            {**DISTRIBUTED, **BF16, **FRESH, **OVERLAPPED, "second_grad_buffer": True},
        ),
        ("fresh experts", 2, {**STAGES_2, **MOE, **FRESH}),
        ("late messages", 2, {**STAGES_2, **CORRECTED, **LATE}),
        ("four stages", 4, {**STAGES_4, **CORRECTED}),
        ("four stages fresh", 4, {**STAGES_4, **FRESH}),
        ("precision-aware", 2, {**STAGES_2, **PRECISION_AWARE}),
        ("contexts", 2, {"context_parallel_size": 2, **DISTRIBUTED, **BF16, **CORRECTED}),
        ("2x2 fresh", 4, {**STAGES_2, **DISTRIBUTED, **BF16, **FRESH}),
        ("2x2 fresh dist_muon late", 4, {**STAGES_2, **DIST_MUON, **FRESH, **LATE}),
        ("four stages muon", 4, {**STAGES_4, **MUON, **CORRECTED}),
        ("2x2 distributed", 4, {**STAGES_2, **DISTRIBUTED, **BF16, **CORRECTED}),
        ("2x2 muon", 4, {**STAGES_2, **MUON, **BF16, **CORRECTED}),
        ("2x2 dist_muon", 4, {**STAGES_2, **DIST_MUON, **CORRECTED}),
        ("2x2 tensors", 4, {**STAGES_2, **TENSORS_2, **CORRECTED}),
        ("2x2 experts", 4, {**STAGES_2, **EXPERTS_2, **CORRECTED}),
    ]
    both += [
        (f"{layout} {name}", 2, {**flags, **correction})
        for name, correction in (
            ("adaptive", ADAPTIVE),
            ("predicted", PREDICTED),
            ("nesterov", NESTEROV),
            ("compensated", COMPENSATED),
            ("adaptively compensated", ADAPTIVELY_COMPENSATED),
        )
        for layout, flags in (
            ("adam", STAGES_2),
            ("distributed", {**DISTRIBUTED, **BF16}),
            ("dist_muon", DIST_MUON),
        )
    ]
    found = [
        Cell(f"{name} {kind}", ranks, kind, flags)
        for name, ranks, flags in both
        for kind in ("torch", "torch_dist")
    ]
    distributed: Flags = {**DISTRIBUTED, **BF16, **CORRECTED}
    one_format: list[tuple[str, int, Flags, str]] = [
        ("fully_reshardable", 2, {**distributed, **RESHARDABLE}, ""),
        ("fully_reshardable fp32", 2, {**DISTRIBUTED, **CORRECTED, **RESHARDABLE}, ""),
        ("fully_reshardable sparing memory", 2, {**distributed, **SPARING}, ""),
        ("dp_zero_gather_scatter", 2, distributed, sharded_as("dp_zero_gather_scatter")),
        ("2x2 fully_reshardable", 4, {**STAGES_2, **distributed, **RESHARDABLE}, ""),
        ("async_save", 2, {**STAGES_2, **CORRECTED, **BACKGROUND}, ""),
        ("async_save distributed", 2, {**distributed, **BACKGROUND}, ""),
        (
            "parallel save and load",
            2,
            {**distributed, "ckpt_fully_parallel_load": True},
            "",
        ),
        (
            "non-persistent",
            2,
            {**STAGES_2, **CORRECTED, "non_persistent_ckpt_type": "global"},
            "",
        ),
    ]
    found += [
        Cell(f"{name} torch_dist", ranks, "torch_dist", flags, prelude)
        for name, ranks, flags, prelude in one_format
    ]
    return found


@functools.cache
def _outcomes(session: pytest.Session, ranks: int, directory: Path) -> dict[str, Outcome]:
    parameters = [getattr(getattr(item, "callspec", None), "params", {}) for item in session.items]
    selected: list[Cell] = [each["cell"] for each in parameters if "cell" in each]
    steps = [step for cell in selected if cell.ranks == ranks for step in cell.steps]
    outcomes = run_steps(ranks, steps, directory, may_fail=True)
    for cell in selected:
        shutil.rmtree(directory / cell.name, ignore_errors=True)
    return outcomes


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name.replace(" ", "-"))
def test_a_resumed_run_is_the_uninterrupted_one(
    request: pytest.FixtureRequest, directory: Path, cell: Cell
) -> None:
    outcomes = _outcomes(request.session, cell.ranks, directory)
    found = {step.name.removeprefix(f"{cell.name} "): outcomes[step.name] for step in cell.steps}
    for name, outcome in found.items():
        assert not outcome.failed, f"{name} failed:\n{outcome.log[-4000:]}"
    expected = found["uninterrupted"]
    assert list(expected.by_iteration) == [1, 2, 3, 4, 5, 6, 7]
    for name in ("stopped", "resumed", "resumed from its end"):
        run = found[name]
        assert run.losses, name
        assert run.by_iteration == {i: expected.by_iteration[i] for i in run.by_iteration}, name
        assert run.norms == {i: expected.norms[i] for i in run.norms}, name
        if name != "stopped":
            assert list(run.norms)[-1] == 7, name
            assert any("resumes at iteration" in line for line in run.notices), name
    assert found["resumed"].first == 4


# Another layout


@pytest.fixture(scope="session")
def reference(directory: Path) -> dict[str, Outcome]:
    flags: dict[str, Value] = {**ASYNC, **CORRECTED, **NO_DROPOUT, "ckpt_format": "torch_dist"}
    saved: dict[str, Value] = {"save": "{dir}/reference", "save_interval": 3}
    sharded: dict[str, Value] = {**flags, **DISTRIBUTED, **RESHARDABLE}
    return run_steps(
        2,
        [
            Step("reference", {**flags, **STAGES_2, **saved}),
            Step("sharded", {**sharded, **STAGES_2, **saved, "save": "{dir}/sharded"}),
        ],
        directory,
    )


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_another_layout_agrees_to_rounding(
    reference: dict[str, Outcome], directory: Path, ranks: int
) -> None:
    # Megatron pads the vocabulary to a multiple of this times the number of tensor-parallel ranks,
    # and the loss counts the padding.
    tensors: Flags = {**TENSORS_2, "make_vocab_size_divisible_by": 64}
    of_ranks: dict[int, dict[str, Flags]] = {
        1: {"one stage": {}},
        2: {"two tensors": tensors, "two replicas": {}},
        4: {
            "four stages": STAGES_4,
            "2x2 replicas": STAGES_2,
            "2x2 tensors": {**STAGES_2, **tensors},
        },
    }
    layouts = of_ranks[ranks]
    common: dict[str, Value] = {**ASYNC, **CORRECTED, **NO_DROPOUT, "ckpt_format": "torch_dist"}
    sharded: dict[str, Value] = {**common, **DISTRIBUTED, **RESHARDABLE}
    outcomes = run_steps(
        ranks,
        [
            step
            for name, flags in layouts.items()
            for step in (
                Step(name, {**common, **flags, "load": "{dir}/reference", "ckpt_step": 3}),
                Step(
                    f"{name} sharded", {**sharded, **flags, "load": "{dir}/sharded", "ckpt_step": 3}
                ),
            )
        ],
        directory,
    )
    expected = reference["reference"].by_iteration
    assert reference["sharded"].by_iteration == pytest.approx(expected, rel=2e-6)
    for name, outcome in outcomes.items():
        found = outcome.by_iteration
        assert list(found) == [4, 5, 6, 7], name
        assert found == pytest.approx({i: expected[i] for i in found}, rel=2e-6), name


def test_a_truncated_torch_dist_checkpoint_is_named(
    reference: dict[str, Outcome], directory: Path
) -> None:
    shutil.copytree(directory / "reference", directory / "truncated")
    files = sorted((directory / "truncated" / "iter_0000003").glob("*.distcp"))
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    flags: dict[str, Value] = {**ASYNC, **CORRECTED, **STAGES_2, "ckpt_format": "torch_dist"}
    steps = [Step("truncated", {**flags, "load": "{dir}/truncated", "ckpt_step": 3})]
    outcome = run_steps(2, steps, directory, may_fail=True)["truncated"]
    assert outcome.failed
    assert f"the checkpoint in {directory / 'truncated'} cannot be read" in outcome.log
