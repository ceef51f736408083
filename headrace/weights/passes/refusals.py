"""Which models cannot be offloaded? Those whose modules somebody else manages, or that have no Python to be called."""

import torch
from torch import nn

from headrace.errors import LayoutError, StateError
from headrace.runtime.autograd import in_gradient_transform
from headrace.weights.model.data_parallel import refuse_wrapped
from headrace.weights.passes.managed import site_of


def refuse_unmanageable(model: nn.Module, *, with_checkpoint: bool) -> None:
    """Raises StateError for a model that something else manages already, or that cannot be; names the module.

    Raises LayoutError for parameters without values, unless a checkpoint has them.
    """
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        refuse_script(where, module)
        if site_of(module) is not None:
            raise StateError(f"{where} is offloaded already; use that handle, or call remove() on it first")
        if hasattr(module, "_hf_hook"):
            raise StateError(
                f"{where} carries an accelerate hook, which moves weights too; call"
                " accelerate.hooks.remove_hook_from_submodules(model) first, and load without device_map"
            )
        if hasattr(module, "ct_decompress_hook"):
            raise StateError(
                f"{where} is to be unpacked by compressed-tensors at its first call, which would replace weights that"
                " are offloaded; call it once before offload(), or"
                " compressed_tensors.compressors.ModelCompressor.decompress_model(model)"
            )
        registry = getattr(module, "_diffusers_hook", None)  # of caches, too, and empty where one was disabled
        if registry is not None and any("offloading" in hook for hook in registry.hooks):
            raise StateError(
                f"{where} carries a diffusers hook, which moves weights too; disable group offloading first"
            )
        if registry is not None and "layerwise_casting" in registry.hooks:
            raise StateError(
                f"{where} carries a diffusers hook, which converts its weights in each call; load the model without"
                " layerwise casting"
            )
    refuse_wrapped(model)
    if not with_checkpoint:
        _refuse_meta(model)


def _refuse_meta(model: nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if names:
        more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
        raise LayoutError(
            f"parameter {names[0]!r} cannot be offloaded: it{more} on the meta device (init_empty_weights,"
            " torch.device('meta')), without values; pass checkpoint=, the directory of the model's safetensors files,"
            " to headrace.offload(), or call headrace.from_pretrained() with it, or load the weights before"
        )


def refuse_script(where: str, module: nn.Module) -> None:
    """Raises StateError for a module of TorchScript."""
    if isinstance(module, torch.jit.ScriptModule):
        raise StateError(
            f"{where} is compiled by TorchScript, which headrace cannot manage; use the plain module in its place"
        )


def refuse_call(model: nn.Module) -> None:
    """Raises StateError for a pass that cannot be what it would be without offloading."""
    registry = model.__dict__.get("_diffusers_hook")
    if registry is not None and any("group_offloading" in name for name in registry.hooks):
        raise StateError(
            "diffusers' group offloading was enabled on this model, and moves its weights as headrace does: use one of"
            " the two. Call remove() on the handle, or take the hooks off: for module in model.modules(): if"
            " hasattr(module, '_diffusers_hook'): module._diffusers_hook.remove_hook('group_offloading'), and so on for"
            f" {sorted(name for name in registry.hooks if 'offloading' in name)}"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise StateError(
            "tracing would keep what is on the device now as constants; trace copy.deepcopy(model), which is a plain"
            " model, or call remove() on the handle first"
        )
    if in_gradient_transform():
        raise StateError(
            "torch.func.grad, vjp, jacrev and hessian keep all that autograd saves, and so all weights of an offloaded"
            " model; call backward(), torch.autograd.grad for inputs, or torch.func.jvp; or transform"
            " copy.deepcopy(model), which is a plain model"
        )
