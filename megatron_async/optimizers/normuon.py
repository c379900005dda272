"""NorMuon: Muon with one adaptive step size for each row (output neuron) of a matrix.

With O_k the momentum of the gradients, orthogonalised by Newton-Schulz iterations as in Muon, and n
the number of columns:

    v_k = beta2 v_{k-1} + (1 - beta2) rowsum(O_k^2) / n        one number a row, v_0 = 0
    P_k = O_k / (sqrt(v_k) + eps)                              row by row
    x_k = x_{k-1} - lr (weight_decay x_{k-1} + s P_k)

The scalar s gives the update a norm. By default that is Muon's, |s P_k| = |c O_k| with c Muon's
scale for the matrix's shape, as in the authors' code (there c = sqrt(max(1, rows / columns)),
Megatron's ``--muon-scale-mode shape_scaling``). With an ``update_rms`` it is
s = update_rms sqrt(rows columns) / |P_k|, Algorithm 1 of the paper for 0.2; the two agree for
``--muon-scale-mode spectral --muon-extra-scale-factor 0.2`` where O_k is exactly orthogonal.

Source: Li, Liu, Zhang, Chen, Wang, Zhao: "NorMuon: Making Muon more efficient and scalable",
arXiv 2510.05491.

It is not Megatron's ``--optimizer adaptive_muon`` with ``moment2_method`` "normuon". That takes the
second moment of columns where a matrix has more columns than rows, cannot be saved in the
torch_dist format, and fails at its first step with megatron-core 0.19.2 and emerging-optimizers
0.3.0 (TensorParallelAdaptiveMuon has no attribute scale_mode).
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.optim.optimizer import ParamsT

__all__ = ["TensorParallelNorMuon", "row_step_sizes"]

_MOMENTUM, _SECOND_MOMENT = "momentum_buffer", "second_moment"


def row_step_sizes(
    row_squares: torch.Tensor,
    second_moment: torch.Tensor,
    *,
    columns: int,
    beta2: float,
    eps: float,
) -> torch.Tensor:
    """Advance the second moment in place and return the step size of each row.

    Args:
        row_squares: sum of the squares of each row of O_k over all of its columns, shape (rows,).
        second_moment: v, same shape; updated in place.
        columns: number of columns of the whole matrix.
        beta2: decay rate of v.
        eps: added to the denominator.

    Returns:
        1 / (sqrt(v_k) + eps), shape (rows,).
    """
    second_moment.lerp_(row_squares / columns, 1.0 - beta2)
    return second_moment.sqrt().add_(eps).reciprocal_()


class TensorParallelNorMuon(TensorParallelMuon):
    """NorMuon for matrices, whole or split over tensor-parallel ranks.

    Momentum, weight decay, orthogonalisation, its tensor-parallel modes and the split of a fused
    QKV are Megatron's Muon. Queries, keys and values keep a norm each where Muon splits them. With
    ``tp_mode`` "duplicated" or "distributed" the second moment and the norm are those of the whole
    matrix, at the cost of one all-reduce of a number for each row (split along the columns) or of
    two numbers (along the rows). With "blockwise" every shard is a matrix of its own, as in Muon,
    and the result depends on the tensor-parallel size.

    State of a parameter of shape (rows, columns): ``momentum_buffer`` of the same shape and
    ``second_moment`` of shape (rows, 1). In :meth:`state_dict` the latter is expanded to the
    parameter's shape, since Megatron's torch_dist format knows only state of that shape; it then
    also follows a change of the tensor-parallel size.

    Args:
        params: parameters with two dimensions, or groups of them.
        lr: learning rate.
        beta2: decay rate of the second moment.
        eps: added to the denominator.
        update_rms: root mean square of the update's elements, None for the norm of Muon's update.
        **muon: arguments of ``TensorParallelMuon``, the class of Megatron's ``--optimizer muon``.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        *,
        beta2: float = 0.95,
        eps: float = 1e-10,
        update_rms: float | None = None,
        **muon: Any,
    ) -> None:
        if not 0.0 <= beta2 < 1.0:
            raise ValueError(f"NorMuon: beta2 must be in [0, 1), got {beta2}")
        if eps <= 0.0 or (update_rms is not None and update_rms <= 0.0):
            raise ValueError(
                f"NorMuon: eps and update_rms must be positive, got {eps} and {update_rms}"
            )
        super().__init__(params, lr, **muon)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
            group.setdefault("update_rms", update_rms)

    @torch.no_grad()
    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        """Make the state of parameters that have none; Megatron calls it ahead of a load."""
        for p in group["params"]:
            if skip_non_grad_params and p.grad is None:
                continue
            if p.ndim != 2:
                raise ValueError(f"NorMuon is for matrices, got a parameter of shape {p.shape}")
            state = self.state[p]
            if _MOMENTUM not in state:
                state[_MOMENTUM] = torch.zeros_like(p)
                state[_SECOND_MOMENT] = p.new_zeros(p.size(0), 1)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **group: Any) -> torch.Tensor:
        """Return the update of a parameter, without learning rate.

        Called by the step of ``emerging_optimizers``' ``OrthogonalizedOptimizer``.

        Args:
            p: the parameter.
            grad: its momentum, same shape.
            **group: the parameter group, less its parameters.

        Raises:
            ValueError: the parameter is split over a gtp_remat group (Megatron's generalised tensor
                parallelism), of which NorMuon does not know the rows.
        """
        if getattr(p, "is_gtp_weight_remat", False):
            raise ValueError(
                "--optimizer normuon does not support weights split over a gtp_remat group; use "
                "--optimizer muon"
            )
        # Scaled for its shape already: a factor that is the same at every step cancels in P.
        update: torch.Tensor = super().orthogonalize(p, grad, **group)
        ranks, split_dim = self._split(p)
        columns = update.size(1)
        squares = update.square().sum(dim=1)
        if ranks is not None and split_dim == 1:
            dist.all_reduce(squares, group=ranks)
            columns *= ranks.size()
        steps = row_step_sizes(
            squares,
            self._second_moment_of(p),
            columns=columns,
            beta2=group["beta2"],
            eps=group["eps"],
        )
        # A row's norm after its step follows from the one before; nothing more to sum over columns.
        before = self._matrices(p, squares)
        after = self._matrices(p, squares * steps.square())
        sums = torch.stack(
            [torch.stack([b.sum(), a.sum()]) for b, a in zip(before, after, strict=True)]
        )
        if ranks is not None and split_dim == 0:
            dist.all_reduce(sums, group=ranks)
        target, norm = sums.sqrt().unbind(dim=1)
        rms = group["update_rms"]
        for index, rows in enumerate(self._matrices(p, steps)):
            if rms is None:
                wanted = target[index]
            else:
                height = rows.numel() * (ranks.size() if ranks and split_dim == 0 else 1)
                wanted = rms * (height * columns) ** 0.5
            rows.mul_(wanted / (norm[index] + group["eps"]))
        return update * steps.unsqueeze(1)

    def _split(self, p: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
        """Return the ranks that share the matrix and the dimension it is split along.

        The same rule as for the orthogonalisation in ``TensorParallelMuon``.
        """
        dim = int(getattr(p, "partition_dim", -1))
        if self.tp_mode == "blockwise" or dim == -1 or self.pg_collection is None:
            return None, -1
        expert = getattr(p, "expert_tp", False)
        ranks = self.pg_collection.expt_tp if expert else self.pg_collection.tp
        return (None, -1) if ranks is None or ranks.size() == 1 else (ranks, dim)

    def _matrices(self, p: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return views of ``rows``, one number a row of ``p``, for each of the fused matrices."""
        if not (self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(p)):
            return [rows]
        heights = getattr(p, "qkv_split_shapes", None) or self.qkv_split_shapes
        return list(rows.view(-1, sum(heights)).split(heights, dim=1))

    def _second_moment_of(self, p: torch.Tensor) -> torch.Tensor:
        """Return v of a parameter, shape (rows,), to be updated in place."""
        moment: torch.Tensor = self.state[p][_SECOND_MOMENT]
        if moment.size(1) != 1:  # prepared for a load that did not happen
            moment = self.state[p][_SECOND_MOMENT] = moment[:, :1].clone()
        return moment.squeeze(1)

    def prepare_for_load(self) -> None:
        """Make the state that :meth:`state_dict` shall offer as the target of a load in place.

        The second moments take the parameters' shape, with memory of their own, until
        :meth:`load_state_dict`.
        """
        for group in self.param_groups:
            self._init_group(group, skip_non_grad_params=False)
            for p in group["params"]:
                self.state[p][_SECOND_MOMENT] = torch.zeros_like(p)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with each ``second_moment`` expanded to (rows, columns).

        Unless prepared for a load, these are views without memory of their own: read them only.
        """
        result: dict[str, Any] = super().state_dict()
        result["state"] = {
            index: _with_second_moment(state, expand=True)
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        states = {
            index: _with_second_moment(state, expand=False)
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})


def _with_second_moment(state: dict[str, Any], *, expand: bool) -> dict[str, Any]:
    moment = state.get(_SECOND_MOMENT)
    if moment is None:
        return state
    moment = moment.expand(state[_MOMENTUM].shape) if expand else moment[:, :1].clone()
    return {**state, _SECOND_MOMENT: moment}
