"""Adam for CPU ranks, with the interface and the state of Apex's and Transformer Engine's.

Source: transformer_engine/pytorch/optimizers/fused_adam.py, and where Megatron uses it:
megatron/core/optimizer/__init__.py and distrib_optimizer.py.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

__all__ = ["FusedAdam", "found_in_transformer_engine"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "master_param"
_HALF_OF_RANGE = torch.finfo(torch.float16).max / 2.0
"""Numbers in fp16 are scaled such that the largest of a tensor is this."""


class FusedAdam(torch.optim.Optimizer):
    """Adam as Megatron's distributed optimizer uses it.

    The step counter is the integer ``param_groups[i]["step"]``; a parameter's state is ``exp_avg``
    and ``exp_avg_sq``, of the parameter's shape and dtype.

    With one of the last five arguments it is Transformer Engine's, for
    ``--use-precision-aware-optimizer``: states have dtypes of their own, and numbers in fp16 a
    scale for each tensor. All numbers of a step are in fp32.

    Args:
        params, lr, betas, eps, weight_decay: as of torch's AdamW.
        adam_w_mode: decouple the weight decay.
        capturable, bias_correction: must keep their defaults.
        master_weights: keep each parameter in the state (``master_param``), step that, and write it
            to the parameter.
        master_weight_dtype: of ``master_param``: fp32 or fp16.
        exp_avg_dtype: of ``exp_avg``: fp32, fp16 or bf16. Likewise ``exp_avg_sq_dtype``.
        use_decoupled_grad: read gradients from ``decoupled_grad``.

    Raises:
        ValueError: an option asks for what this class does not do.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
        bias_correction: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype | None = None,
        exp_avg_sq_dtype: torch.dtype | None = None,
        use_decoupled_grad: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable Adam is for CUDA graphs: drop --optimizer-cuda-graph")
        if not bias_correction:
            raise ValueError("FusedAdam of the CPU backend always corrects the bias")
        if torch.uint8 in (exp_avg_dtype, exp_avg_sq_dtype):
            raise ValueError(
                "--exp-avg-dtype and --exp-avg-sq-dtype: fp8 needs Transformer Engine, which does "
                "not run on CPU ranks (--cpu). Use fp32, bf16 or fp16."
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self._gradient = "decoupled_grad" if use_decoupled_grad else "grad"
        # Of Transformer Engine's optimizer each state has a dtype.
        self._dtypes: dict[str, torch.dtype] | None = None
        if exp_avg_dtype is not None and exp_avg_sq_dtype is not None:
            self._dtypes = {
                "exp_avg": exp_avg_dtype,
                "exp_avg_sq": exp_avg_sq_dtype,
                _MAIN: master_weight_dtype,
            }
        self._scales: dict[tuple[torch.Tensor, str], torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            # The counter runs on in groups without gradients, as Apex's does.
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if getattr(p, self._gradient, None) is not None]
            if not params:
                continue
            for param in params:
                if "exp_avg" not in self.state[param]:
                    self.initialize_state(param)
            stepped, gradients, moments, squares = self._in_step(params)
            update(
                stepped,
                gradients,
                moments,
                squares,
                [],
                # torch counts these up itself.
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            self._store(params, stepped, moments, squares)

    def _in_step(self, params: list[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """What is stepped, its gradients and its two moments."""
        gradients = [getattr(param, self._gradient) for param in params]
        if self._dtypes is None:
            states = [[self.state[param][name] for param in params] for name in _MOMENTS]
            return params, gradients, states[0], states[1]
        moments, squares = (
            [self.get_unscaled_state(param, name).float() for param in params] for name in _MOMENTS
        )
        stepped = [
            self.get_unscaled_state(param, _MAIN) if self.master_weights else param.float()
            for param in params
        ]
        return stepped, [gradient.float() for gradient in gradients], moments, squares

    def _store(self, params: list[Any], stepped: list[Any], *moments: list[Any]) -> None:
        if self._dtypes is None:
            return
        for name, values in zip(_MOMENTS, moments, strict=True):
            for param, value in zip(params, values, strict=True):
                self.set_scaled_state(param, name, value)
        for param, value in zip(params, stepped, strict=True):
            if self.master_weights:
                self.set_scaled_state(param, _MAIN, value)
            param.copy_(value)

    def initialize_state(self, param: torch.Tensor) -> None:
        """Make the state of a parameter."""
        state = self.state[param]
        if self._dtypes is None:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
            return
        for name in _MOMENTS:
            self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
        if self.master_weights:
            self.set_scaled_state(param, _MAIN, param.detach().float())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state as it is meant, in fp32 unless it is in bf16."""
        value: torch.Tensor = self.state[param][name]
        return value.float() * self._scales[param, name] if value.dtype == torch.float16 else value

    @torch.no_grad()
    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Set a state to ``value``, made if it is not there; in fp16 it gets a scale."""
        assert self._dtypes is not None
        state, dtype = self.state[param], self._dtypes[name]
        if name not in state:
            state[name] = torch.empty_like(param, dtype=dtype)
        if dtype == torch.float16:
            largest = value.abs().amax() if value.numel() else torch.zeros(())
            scale = torch.where(largest > 0, largest / _HALF_OF_RANGE, 1.0)
            self._scales[param, name] = scale
            value = value / scale
        state[name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with states as :meth:`get_unscaled_state` has them."""
        found: dict[str, Any] = super().state_dict()
        if self._dtypes is not None:
            for key, param in self._numbered(found):
                found["state"][key] = {
                    name: self.get_unscaled_state(param, name) for name in self.state[param]
                }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would give each state the dtype of its parameter."""
        super().load_state_dict(state_dict)
        if self._dtypes is not None:
            for key, param in self._numbered(state_dict):
                self.state[param] = {}
                for name, value in state_dict["state"][key].items():
                    self.set_scaled_state(param, name, value)

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[int, torch.Tensor]]:
        """(number, parameter) of those with a state."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        pairs = zip(keys, params, strict=True)
        return [(key, param) for key, param in pairs if key in state_dict["state"]]


def found_in_transformer_engine(original: Callable[..., None]) -> Callable[..., None]:
    """Make ``OptimizerConfig.__post_init__`` find :class:`FusedAdam` where it looks for it."""
    place = "transformer_engine.pytorch.optimizers"

    def post_init(self: Any) -> None:
        module = ModuleType(place)
        module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
        hidden = sys.modules.get(place)
        sys.modules[place] = module
        try:
            original(self)
        finally:
            del sys.modules[place]
            if hidden is not None:
                sys.modules[place] = hidden

    return post_init
