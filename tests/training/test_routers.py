"""What routers balance the experts by, against its formulas: which batch's counts make the bias of
which version, which version's bias a microbatch finds, and what it counts of its own batch."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.shared_jobs import MODELS, Job, Results, job
from tests.training.cases import RECOMPUTED, check_close

BATCHES = 10
RATE = float(str(MODELS["balanced"]["moe_router_bias_update_rate"]))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A schedule and a layout.

    Attributes:
        name: the test's.
        schedule: flags of the schedule.
        delayed: how many microbatches of a batch run on the version before the newest, of each
            stage.
        replicas: number of data-parallel ranks; 2 stages.
        flags: more of them.
        slow: whether the test is left out of CI.
    """

    name: str
    schedule: dict[str, Any]
    delayed: tuple[int, int]
    replicas: int = 1
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    slow: bool = False

    @property
    def jobs(self) -> tuple[Job]:
        """As the fixture ``results`` asks for them."""
        return (
            job(
                2 * self.replicas,
                model="balanced",
                dump=("routers",),
                pipeline_model_parallel_size=2,
                clip_grad=0.5,
                **self.schedule,
                **self.flags,
            ),
        )

    @property
    def microbatches(self) -> int:
        """Of a batch of 8 samples, on a rank."""
        return 4 // self.replicas


FRESH: dict[str, Any] = {"pipeline_schedule": "fresh-2bw", "delayed_microbatches": 1}
TWO_VERSIONS: dict[str, Any] = {"pipeline_schedule": "pipedream-2bw"}
SETTINGS = [
    Setting("fresh", FRESH, (1, 1)),
    Setting("two-versions", TWO_VERSIONS, (4, 4), slow=True),
    Setting("recomputed", FRESH, (1, 1), flags=dict(RECOMPUTED), slow=True),
    Setting("replicas", FRESH, (1, 1), replicas=2, slow=True),
    Setting(
        "experts-spread",
        TWO_VERSIONS,
        (2, 2),
        replicas=2,
        flags={"expert_model_parallel_size": 2},
        slow=True,
    ),
    Setting("undeferred", {**FRESH, "no_deferred_update": True}, (1, 1), slow=True),
    Setting("paci", {**FRESH, "pipeline_schedule": "paci"}, (1, 1), slow=True),
    Setting("pipedream", {"pipeline_schedule": "pipedream"}, (4, 0), slow=True),
]


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.slow else [])
        for each in SETTINGS
    ],
)
def test_biases_are_of_the_version_and_counts_of_the_batch(
    results: Results, setting: Setting
) -> None:
    result = results[setting.jobs[0]]
    ranks = [result.tensors(rank)["routers"] for rank in range(setting.jobs[0].ranks)]
    m = setting.microbatches
    seen = set()
    for stage, delayed in enumerate(setting.delayed):
        replicas = ranks[stage * setting.replicas : (stage + 1) * setting.replicas]
        for layer in replicas[0]:
            seen.add(layer)
            records = [replica[layer] for replica in replicas]
            assert all(len(each) == BATCHES * m for each in records)
            # The checkpoint that all jobs start from has made one update.
            versions: list[torch.Tensor] = [records[0][0][0]]
            for batch in range(BATCHES):
                counted, unbiased = torch.zeros(4), torch.zeros(4)
                for microbatch in range(m):
                    version = max(batch - 1, 0) if microbatch < delayed else batch
                    here = [each[batch * m + microbatch] for each in records]
                    for _, sent, would_be_sent, _, _ in here:
                        counted += sent
                        unbiased += would_be_sent
                    for bias, _, _, in_batch, steps in here:
                        assert torch.equal(bias, versions[version])
                        # The auxiliary loss counts as if there were no bias.
                        assert torch.equal(in_batch, unbiased)
                        assert steps == microbatch + 1
                change = torch.sign(counted.mean() - counted) * RATE
                versions.append(versions[-1] + change)
            assert not torch.equal(versions[0], versions[-1])
    assert seen == {1, 2, 3, 4}


@dataclasses.dataclass(frozen=True)
class Undelayed:
    """The asynchronous schedule on one stage without a delayed microbatch, and Megatron's own.

    Attributes:
        model: what is trained.
    """

    model: str

    @property
    def jobs(self) -> tuple[Job, Job]:
        """As the fixture ``results`` asks for them."""
        undelayed: dict[str, Any] = {"pipeline_schedule": "fresh-2bw"}
        return job(1, model=self.model, **undelayed), job(1, model=self.model)


@pytest.mark.parametrize(
    "case",
    [Undelayed("balanced"), pytest.param(Undelayed("quantile"), marks=pytest.mark.slow)],
    ids=lambda case: case.model,
)
def test_without_delay_it_is_megatrons_own_training(results: Results, case: Undelayed) -> None:
    found, wanted = (dict(enumerate(results[each].losses)) for each in case.jobs)
    check_close("losses", found, wanted, 1e-6)
