"""What a job computes, with all its digits; in the process of a rank."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Recorder"]


class Recorder:
    """Records a job on one rank.

    ``rank<R>.json`` has:

    - ``losses``: of each iteration, what ``train_step`` returned; on the last stage only.
    - ``reported``: of each iteration, the gradient norm that ``train_step`` returned or null.
    - ``norms``, ``zeros``: of each update of an asynchronous schedule, its iteration (0 is the
      first) and its gradient norm, or the number of zeros in the gradient.
    - ``validation``: [number of iterations done, loss] of each evaluation; on the last stage.
    - ``further``: of each iteration, the losses that are logged of multi-token prediction, one of
      each further token; on the last stage.

    ``rank<R>.pt`` has what ``dump`` asks for:

    - "trajectory": ``initial`` (name -> tensor) and ``steps``, a list of such, one for each step of
      the torch optimizer, right after it. The optimizer must hold the model's own parameters.
    - "embedding": ``embedding``, the weight that the first and the last stage share, at the end.
    - "routers": ``routers`` (layer -> list), of each microbatch that a router has sent to experts
      in training, with the global auxiliary loss: the bias it found; the tokens that each expert
      got, and would have got without a bias; what the router had counted of the latter in the batch
      by then, this microbatch included, and in how many microbatches.
    """

    def __init__(self, dump: Sequence[str]) -> None:
        self._dump = dump
        self._model: Any = None
        self.numbers: dict[str, list[Any]] = {
            "losses": [],
            "reported": [],
            "norms": [],
            "zeros": [],
            "validation": [],
            "further": [],
        }
        self.tensors: dict[str, Any] = {}

    def install(self) -> None:
        """Record from now on; Megatron is imported."""
        from megatron.training import training

        from megatron_async.runtime.updates import Updates

        train_step, evaluate = training.train_step, training.evaluate
        setup = training.setup_model_and_optimizer
        made = Updates._made

        def recorded_train_step(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            losses, norm = result[0], result[5]
            if "lm loss" in losses:
                self.numbers["losses"].append(float(losses["lm loss"]))
            self.numbers["reported"].append(None if norm is None else float(norm))
            return result

        def recorded_evaluate(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            if result[0] and "lm loss" in result[0]:
                done = len(self.numbers["reported"])
                self.numbers["validation"].append([done, float(result[0]["lm loss"])])
            return result

        def recorded_setup(*args: Any, **kwargs: Any) -> Any:
            result = setup(*args, **kwargs)
            self._model = result[0][0]
            if "trajectory" in self._dump:
                self._record_trajectory()
            return result

        def recorded_made(updates: Any, update: Any) -> None:
            made(updates, update)
            self.numbers["norms"].append([update.iteration - 1, update.grad_norm])
            self.numbers["zeros"].append([update.iteration - 1, update.num_zeros])

        self._record_further_losses()
        if "routers" in self._dump:
            self._record_routers()
        Updates._made = recorded_made  # type: ignore[method-assign, assignment]
        training.train_step = recorded_train_step
        training.evaluate = recorded_evaluate
        training.setup_model_and_optimizer = recorded_setup

    def _record_trajectory(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        names = {parameter: name for name, parameter in _named_parameters(self._model)}
        self.tensors["initial"] = {name: p.detach().clone() for p, name in names.items()}
        self.tensors["steps"] = []

        def after_step(optimizer: Any, *_: Any) -> None:
            self.tensors["steps"].append(
                {
                    names[p]: p.detach().clone()
                    for group in optimizer.param_groups
                    for p in group["params"]
                }
            )

        # A global hook: it runs behind those that the package put on the optimizer itself.
        register_optimizer_step_post_hook(after_step)

    def _record_further_losses(self) -> None:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        track = MTPLossLoggingHelper.track_mtp_metrics

        def recorded_track(*args: Any) -> None:
            *others, totals = args
            own: dict[str, Any] = {}
            track(*others, own)
            if own:
                self.numbers["further"].append([float(loss) for loss in own.values()])
            for name, loss in own.items():
                totals[name] = totals.get(name, 0.0) + loss

        MTPLossLoggingHelper.track_mtp_metrics = recorded_track

    def _record_routers(self) -> None:
        import torch
        from megatron.core.transformer.moe.router import TopKRouter

        records: dict[int, list[Any]] = {}
        self.tensors["routers"] = records
        routing, add_loss = TopKRouter.routing, TopKRouter._apply_global_aux_loss
        unbiased: list[Any] = []

        def recorded_loss(router: Any, probs: Any, scores: Any, map: Any, **kwargs: Any) -> Any:
            unbiased[:] = [map.sum(dim=0)]
            return add_loss(router, probs, scores, map, **kwargs)

        def recorded_routing(router: Any, *args: Any, **kwargs: Any) -> Any:
            if not (router.training and torch.is_grad_enabled()):
                return routing(router, *args, **kwargs)
            bias = router.expert_bias.clone()
            result = routing(router, *args, **kwargs)
            counted, steps = router.global_tokens_per_expert.clone(), int(router.ga_steps)
            record = [bias, result[1].sum(dim=0), *unbiased, counted, steps]
            records.setdefault(router.layer_number, []).append(record)
            return result

        TopKRouter._apply_global_aux_loss = recorded_loss
        TopKRouter.routing = recorded_routing

    def write(self, directory: Path, rank: int) -> None:
        """Write what was recorded."""
        import torch

        if "embedding" in self._dump:
            from megatron.core.utils import get_attr_wrapped_model

            chunk = get_attr_wrapped_model(self._model, "pre_process", return_model_obj=True)
            weight = chunk.shared_embedding_or_output_weight()
            if weight is not None:
                self.tensors["embedding"] = weight.detach().clone()
        if self.tensors:
            torch.save(self.tensors, directory / f"rank{rank}.pt")
        (directory / f"rank{rank}.json").write_text(json.dumps(self.numbers))


def _named_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Parameters with the names that they have in a model of one stage."""
    from megatron.core.utils import get_attr_wrapped_model

    chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
        yield ".".join(parts), parameter
