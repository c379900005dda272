"""Rules on quantized weights: Transformer Engine's fp8 and fp4, by recipe.

Source: ``quantize_weight`` in transformer_engine/pytorch/module/base.py and ``Linear.forward`` in
transformer_engine/pytorch/module/linear.py (the cache of a module, ``_fp8_workspaces``),
transformer_engine/common/recipe/__init__.py (the recipes), and
megatron/core/extensions/transformer_engine.py (``is_first_microbatch``); of quantized parameters,
megatron/core/distributed/param_and_grad_buffer.py and megatron/core/fp8_utils.py.
"""

from collections.abc import Callable, Mapping
from typing import Final

from megatron_async.config.validation.rule import Rule, Subject, dest_of, given, rule

__all__ = ["RULES"]

_CACHED: Final = (
    "a module keeps its quantized weights from a batch's first microbatch on, and overwrites them "
    "in place while microbatches of the version before are in flight"
)
_REMEDY: Final = "Use --bf16 alone."
_FP8: Final[Mapping[str, str]] = {
    "delayed": (
        f"{_CACHED}; and scales follow from the largest values of earlier microbatches, whose "
        "history both versions would share and a resume, which forwards microbatches again, would "
        "not repeat"
    ),
    "tensorwise": f"{_CACHED}, with one scale for each tensor",
    "blockwise": f"{_CACHED}, with a scale for each block",
    "mxfp8": f"{_CACHED}, in two copies, by rows and by columns, with a scale for each 32 elements",
    "custom": f"{_CACHED}; and what a quantizer factory of your own keeps is not known",
}
_FP4: Final[Mapping[str, str]] = {
    "nvfp4": (
        f"{_CACHED}; and gradients are rounded by random numbers of the device, which a resume "
        "would not repeat"
    ),
    "custom": _FP8["custom"],
}
_PARAMETERS: Final[Mapping[str, str]] = {
    "delayed": (
        "parameters are fp8 numbers in the parameter buffer with scales beside it, which the "
        "update writes, and of scales there is no second version"
    ),
    "tensorwise": (
        "parameters are fp8 numbers in the parameter buffer with scales beside it, which the "
        "update writes, and of scales there is no second version"
    ),
    "blockwise": (
        "parameters are fp8 numbers with a scale for each block and a transposed copy made behind "
        "the gather, outside of the buffer of which there is a second version"
    ),
    "mxfp8": (
        "parameters are quantized by rows and by columns from what was gathered, outside of the "
        "buffer of which there is a second version, or gathered into the gradient buffer, where "
        "the next batch's gradients are"
    ),
    "nvfp4": (
        "parameters are packed fp4 numbers with scales and a copy by columns made behind the "
        "gather, outside of the buffer of which there is a second version"
    ),
    "custom": "parameters kept in a format of your own have no second version",
}


def _reason(reasons: Mapping[str, str], recipe: str, default: str) -> Callable[[Subject], str]:
    """The reason of the recipe that was chosen (Megatron's default if none was)."""

    def reason(subject: Subject) -> str:
        given = subject.get(recipe) or default
        chosen = str(getattr(given, "value", given))  # a script may have set Megatron's enum
        text = reasons.get(chosen, reasons["custom"])
        return f"with the recipe {chosen}, {text}"

    return reason


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--fp8-format",
        _reason(_FP8, "fp8_recipe", "delayed"),
        _REMEDY,
        dest="fp8",
    ),
    rule(
        "--fp4-format",
        _reason(_FP4, "fp4_recipe", "nvfp4"),
        _REMEDY,
        dest="fp4",
    ),
    rule("--fp8-param-gather", _reason(_PARAMETERS, "fp8_recipe", "delayed"), _REMEDY),
    rule("--fp4-param-gather", _reason(_PARAMETERS, "fp4_recipe", "nvfp4"), _REMEDY),
    *(
        rule(flag, _CACHED, _REMEDY, when=given(dest_of(flag)))
        for flag in (
            "--te-precision-config-file",
            "--kitchen-config-file",
            "--kitchen-recipe-number",
        )
    ),
    # What these flags become, which a script may set itself.
    *(
        rule(f"{name} (model configuration)", _CACHED, "Leave it unset.", dest=name)
        for name in ("quant_recipe", "use_kitchen")
    ),
)
