"""Which modules of the user's own have experts that travel one by one? Those that `experts()` was told of."""

import inspect
from typing import TypeVar

from torch import nn

from headrace.errors import StateError
from headrace.weights.model.experts import mark_experts, picks_experts
from headrace.weights.passes.managed import site_of

_Module = TypeVar("_Module", bound=nn.Module)


def experts(module: _Module, *, argument: str | None = None) -> _Module:
    """Makes experts of your own module travel one by one when its model is offloaded. Returns the module.

    All parameters of the module must have the experts as their first dimension: shape (experts, ...). `argument` names
    the argument of its `forward` that says which experts a call uses: a tensor of integers of any shape, such as the
    indices of a router's top k, shape (tokens, k). Numbers outside 0 to experts - 1 stand for no expert.

    A call loads those experts, unless they are on the device already. The module may index one expert
    (`self.weight[expert]`) or several at once (`self.weight[index]`), in any order; if it indexes others, these are
    loaded as well. Code that uses a weight in another way (`torch.bmm` with all of it) loads all experts. So do calls
    that train more than half of them. Results equal those of the plain module bit for bit.

    If the module is a ModuleList or ModuleDict of experts, give no `argument`: each expert is loaded when it is called.
    Lists whose name ends with "experts" need no call of this function if the model is in eval mode when it is
    offloaded. In training the call pays if a batch uses few of the experts; `forward_backward` moves them once for each
    micro-batch.

    Call it before `offload()`. It holds for copies of the module, too. Models that use transformers' experts interface
    do not need it.

    Raises TypeError for anything but a module, ValueError for an argument that `forward` does not have and for
    parameters that do not all have the same first dimension of at least two, and StateError for a module that is
    offloaded.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module that holds the experts' weights")
    if site_of(module) is not None:
        raise StateError(
            f"the {type(module).__name__} is offloaded already; call headrace.experts() before headrace.offload()"
        )
    kind = type(module).__name__
    if picks_experts(module):
        raise ValueError(f"experts of {kind} travel one by one as it is: it has transformers' experts interface")
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        if argument is not None or len({type(child) for child in module.children()}) != 1 or len(module) < 2:
            raise ValueError(
                f"experts of a {kind} come when they are called: give two or more of one class, and no argument"
            )
        mark_experts(module, None)
        return module
    if argument is None:
        raise ValueError(f"which argument of {kind}.forward says which experts a call uses? Pass argument=")
    found = inspect.signature(module.forward).parameters
    if (
        not isinstance(argument, str)
        or argument not in found
        or found[argument].kind
        in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
    ):
        raise ValueError(f"{kind}.forward has no argument {argument!r}; it has {', '.join(map(repr, found)) or 'none'}")
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if not shapes:
        raise ValueError(f"{kind} has no parameters; give the module that holds the experts' weights")
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) > 1 or min(counts) < 2 or any("." in name for name in shapes):
        listed = ", ".join(f"{name!r} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"parameters of {kind} do not all have the experts as first dimension: {listed}; put the experts' weights"
            " into a module of their own"
        )
    mark_experts(module, argument)
    return module
