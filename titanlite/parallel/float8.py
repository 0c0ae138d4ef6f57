"""float8 training of linear layers through torchao (https://github.com/pytorch/ao), the extra ``float8``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import nn

from titanlite.errors import UserError
from titanlite.models.decoder import Decoder

if TYPE_CHECKING:
    from titanlite.config import Config
    from titanlite.config.schema import Float8Linear
    from titanlite.distributed.mesh import Mesh

MULTIPLE = 16
"""float8 matmuls take dimensions that are multiples of this."""

CAPABILITY = (8, 9)
"""The first CUDA compute capability with float8 matmuls: Ada and Hopper."""


def convert(part: Decoder, config: Config, mesh: Mesh) -> None:
    """Swap the linear layers of ``part`` for float8 ones; prints what was converted, what not, and why.

    Raises:
        UserError: torchao is missing, or the device has no float8 matmuls and ``emulate`` is off.
    """
    settings = config.quantize.linear.float8
    try:
        from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, convert_to_float8_training
    except ImportError as error:
        raise UserError(f"model.converters float8 needs torchao: pip install 'titanlite[float8]' ({error})") from None
    _require_hardware(settings, mesh.root.device_type)
    if settings.recipe_name in (None, "tensorwise"):
        cast = CastConfig(scaling_granularity=ScalingGranularity.TENSORWISE)
        recipe = Float8LinearConfig(
            cast_config_input=cast,
            cast_config_weight=cast,
            cast_config_grad_output=CastConfig(
                scaling_granularity=ScalingGranularity.TENSORWISE,
                target_dtype=Float8LinearConfig().cast_config_grad_output.target_dtype,
            ),
            enable_fsdp_float8_all_gather=settings.enable_fsdp_float8_all_gather,
            emulate=settings.emulate,
        )
    else:
        made = Float8LinearConfig.from_recipe_name(settings.recipe_name)
        recipe = _with_emulation(made, settings.emulate)
    reasons = {
        name: _why_not(name, module, settings, mesh.tp)
        for name, module in part.named_modules()
        if isinstance(module, nn.Linear)
    }
    convert_to_float8_training(part, config=recipe, module_filter_fn=lambda module, name: reasons.get(name) == "")
    _print_table(reasons)
    if config.model.print_after_conversion:
        print(part)


def after_update(parts: list[Decoder], config: Config) -> None:
    """Compute all weights' scales in one all-reduce, where ``precompute_float8_dynamic_scale_for_fsdp`` asks for it."""
    if not config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp:
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


def _with_emulation(recipe, emulate: bool):
    from dataclasses import replace

    return replace(recipe, emulate=emulate)


def _require_hardware(settings: Float8Linear, device_type: str) -> None:
    if settings.emulate:
        return
    if device_type != "cuda":
        raise UserError(
            "float8 needs a GPU of compute capability 8.9 or more; quantize.linear.float8.emulate = true runs anywhere"
        )
    found = torch.cuda.get_device_capability()
    if found < CAPABILITY:
        raise UserError(
            f"float8 needs compute capability 8.9 or more, this GPU has {found[0]}.{found[1]}; "
            "quantize.linear.float8.emulate = true runs anywhere"
        )


def _why_not(name: str, module: nn.Linear, settings: Float8Linear, tp: int) -> str:
    """Why a linear layer stays as it is; "" where it is converted."""
    named = next((fqn for fqn in settings.filter_fqns if fqn in name), None)
    if named is not None:
        return f"filter_fqns has {named!r}"
    if module.in_features % (MULTIPLE * tp) or module.out_features % (MULTIPLE * tp):
        return f"its {module.out_features} x {module.in_features} weight is not in multiples of {MULTIPLE * tp}"
    return ""


def _print_table(reasons: dict[str, str]) -> None:
    """A line for each kind of layer: blocks are alike."""
    kinds: dict[tuple[str, str], int] = {}
    for name, reason in reasons.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds[kind, reason] = kinds.get((kind, reason), 0) + 1
    for (kind, reason), count in kinds.items():
        print(f"float8  {kind:32} x {count:<4} {'converted' if not reason else 'kept: ' + reason}", file=sys.stdout)
