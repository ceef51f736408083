"""What may a program do to a model between passes? Edits of weights and gradients, freezing, copies, other budgets."""

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs.world import World, has_weights

Edit = Callable[[list[nn.Parameter], random.Random], None]


# edits of weights -----------------------------------------------------------------------------------------------------
def noise(parameter: Tensor, rng: random.Random) -> Tensor:
    """Small random values, the same on every device."""
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rng.randrange(10**6)))
    return (values * 0.01).to(parameter.device, parameter.dtype)


def each(edit: Callable[[nn.Parameter, random.Random], Any]) -> Edit:
    """Of one parameter after the other, without gradients."""

    def edit_all(parameters: list[nn.Parameter], rng: random.Random) -> None:
        with torch.no_grad():
            for parameter in parameters:
                edit(parameter, rng)

    return edit_all


def set_data(parameter: nn.Parameter, rng: random.Random) -> None:
    parameter.data = parameter.data * 0.9 if rng.random() < 0.5 else parameter.detach().clone()


def write_first(parameter: nn.Parameter, rng: random.Random) -> None:
    if parameter.ndim:
        parameter[0] = 0.01
    else:
        parameter.fill_(0.01)


def write_through_view(parameter: nn.Parameter, rng: random.Random) -> None:
    parameter.data.view(-1)[: rng.randrange(1, 4)].zero_()


def by_hand(parameter: nn.Parameter, rng: random.Random) -> None:
    """A step of gradient descent."""
    if parameter.grad is not None:
        parameter.data.add_(parameter.grad, alpha=-0.01)
    else:
        parameter.data -= 0.001


def initialise(parameter: nn.Parameter, rng: random.Random) -> None:
    if parameter.ndim == 2 and rng.random() < 0.5:
        nn.init.eye_(parameter)
    else:
        nn.init.constant_(parameter, 0.02)


def by_foreach(parameters: list[nn.Parameter], rng: random.Random) -> None:
    with torch.no_grad():
        if rng.random() < 0.5:
            torch._foreach_mul_(parameters, 0.9)
        else:
            torch._foreach_clamp_max_(parameters, 0.2)


def by_vector(parameters: list[nn.Parameter], rng: random.Random) -> None:
    parameters = [p for p in parameters if p.dtype == torch.float32]
    if parameters:
        vector = nn.utils.parameters_to_vector(parameters)
        nn.utils.vector_to_parameters(vector.detach() * 0.9, parameters)


EDITS: dict[str, Edit] = {
    "data.mul_": each(lambda p, rng: p.data.mul_(0.9)),
    "data = ": each(set_data),
    "add_": each(lambda p, rng: p.add_(noise(p, rng))),
    "copy_": each(lambda p, rng: p.copy_(p + noise(p, rng))),
    "data.copy_": each(lambda p, rng: p.data.copy_(p.data + noise(p, rng))),
    "detach().mul_": each(lambda p, rng: p.detach().mul_(0.9)),
    "clamp_": each(lambda p, rng: p.clamp_(-0.2, 0.2)),
    "p[0] = ": each(write_first),
    "a view of data": each(write_through_view),
    "by hand": each(by_hand),
    "nn.init": each(initialise),
    "foreach": by_foreach,
    "vector_to_parameters": by_vector,
}


def edit(world: World, rng: random.Random) -> None:
    way = rng.choice(list(EDITS))
    EDITS[way](world.some(rng), rng)


def scaled_state(world: World) -> dict[str, Tensor]:
    state = world.model.state_dict()
    return {name: value * 0.9 if value.is_floating_point() else value for name, value in state.items()}


def load_state(world: World, rng: random.Random) -> None:
    world.model.load_state_dict(scaled_state(world))


def assign_state(world: World, rng: random.Random) -> None:
    """Parameters become other objects, tied ones several; so the optimizer is a new one.

    The first call moves them, and whoever took their `data` before that has other memory (docs/limits.md).
    """
    if world.model.spec.tied_head or world.model.spec.tied_layers:
        return
    world.model.load_state_dict(scaled_state(world), assign=True)
    world.names = {}
    world.new_optimizer(rng)
    world.forward(world.batch(rng))


def swap_average(world: World, rng: random.Random) -> None:
    """Evaluates with other weights, and puts the own ones back."""
    parameters = world.some(rng)
    others = [p.detach() * 0.9 for p in parameters]
    swaps = rng.choice(["data", "copy"])
    for _ in range(2):
        if swaps == "data":
            for index, parameter in enumerate(parameters):
                parameter.data, others[index] = others[index], parameter.data
        else:
            own = [p.detach().clone() for p in parameters]
            with torch.no_grad():
                for parameter, other in zip(parameters, others, strict=True):
                    parameter.copy_(other)
            others = own
        with torch.no_grad():
            world.forward(world.batch(rng))


def write_unnoticed(world: World, rng: random.Random) -> None:
    """Through tensors that were taken from `p.data` before a pass: with a refresh."""
    kept = [p.data for p in world.some(rng)]
    world.forward(world.batch(rng))
    for tensor in kept:
        tensor.mul_(0.9)
    if has_weights(world.handle):
        world.handle.refresh()


# gradients, freezing --------------------------------------------------------------------------------------------------
def edit_gradients(world: World, rng: random.Random) -> None:
    """After a backward; they are added to in what follows."""
    world.forward(world.batch(rng)).backward()
    way = rng.choice(["mul_", "replaced", "dropped", "zero_", "kept", "data"])
    for parameter in world.some(rng):
        if parameter.grad is None:
            continue
        if way == "mul_":
            parameter.grad.mul_(2)
        elif way == "replaced":
            parameter.grad = parameter.grad * 0.5
        elif way == "dropped":
            parameter.grad = None
        elif way == "zero_":
            parameter.grad.zero_()
        elif way == "data":
            parameter.grad.data.mul_(0.5)
        else:
            kept = parameter.grad
            parameter.grad = None
            world.see("kept gradient", kept)
            parameter.grad = kept
    if rng.random() < 0.5:
        world.forward(world.batch(rng)).backward()


def freeze(world: World, rng: random.Random) -> None:
    """Or thaw."""
    for parameter in world.model.parameters():
        if rng.random() < 0.3:
            parameter.requires_grad_(not parameter.requires_grad)
    if rng.random() < 0.3:
        world.model.requires_grad_(rng.random() < 0.8)
    if not world.trained():
        world.model.requires_grad_(True)
    if rng.random() < 0.5:
        world.new_optimizer(rng)


def new_optimizer(world: World, rng: random.Random) -> None:
    world.new_optimizer(rng)


# copies ---------------------------------------------------------------------------------------------------------------
def copy_model(world: World, rng: random.Random) -> None:
    """A copy is a plain model, and computes the same."""
    other = copy.deepcopy(world.model).to(world.device)
    with torch.no_grad():
        batch = {name: v.to(world.device) if isinstance(v, Tensor) else v for name, v in world.batch(rng).items()}
        world.see("output of the copy", other(**batch))
    for name, parameter in other.named_parameters():
        world.see(f"{name} of the copy", parameter)


def save(world: World, rng: random.Random) -> None:
    file = io.BytesIO()
    torch.save(world.model.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file, map_location="cpu").items():
        world.see(f"{name} in the file", value)
    if world.optimizer is not None and rng.random() < 0.5:
        world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))


# other budgets --------------------------------------------------------------------------------------------------------
def offload_again(world: World, rng: random.Random) -> None:
    """The model is plain for a while: computes, or is parametrised; then it is offloaded with another budget."""
    way = rng.choice(["nothing", "pass", "weight_norm", "edit"])
    seed = rng.random()
    if world.handle is not None:
        world.handle.remove()
        world.see("class of parameters", {type(p) is nn.Parameter for p in world.model.parameters()} - {True})
        world.model.to(world.device)
    else:
        world.see("class of parameters", set())
    if way == "pass":
        batch = {n: v.to(world.device) if isinstance(v, Tensor) else v for n, v in world.batch(rng).items()}
        world.forward(batch).backward()
    elif way == "weight_norm":
        linear = world.model.head
        if not nn.utils.parametrize.is_parametrized(linear) and not world.model.spec.tied_head:
            nn.utils.parametrizations.weight_norm(linear)
            world.optimizer = None
            world.names = {}
    elif way == "edit":
        edit(world, rng)
    if world.offload is not None:
        world.handle = world.offload(world.model, random.Random(seed))
        world.passes, world.keeps_budget = 0, True


CHANGES = {
    "edit": (edit, 2.5),
    "load_state": (load_state, 0.5),
    "assign_state": (assign_state, 0.2),
    "swap_average": (swap_average, 0.4),
    "write_unnoticed": (write_unnoticed, 0.3),
    "edit_gradients": (edit_gradients, 0.5),
    "freeze": (freeze, 0.6),
    "new_optimizer": (new_optimizer, 0.3),
    "copy_model": (copy_model, 0.3),
    "save": (save, 0.3),
    "offload_again": (offload_again, 0.6),
}
