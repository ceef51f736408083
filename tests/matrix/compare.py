"""Did offloading change anything, and did it happen? Runs of a model, what they gave, and what they held and moved."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headrace
from headrace.memory.arena import aligned

GRANULE_BYTES = 512  # a device's allocator rounds every allocation up to a multiple


@dataclass
class Outcome:
    """What must not depend on offloading; all on the CPU."""

    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)  # of each step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def read(self, model: nn.Module) -> "Outcome":
        """Takes over parameters and state."""
        self.parameters = {name: on_cpu(p) for name, p in model.named_parameters()}
        self.state = {name: on_cpu(tensor) for name, tensor in model.state_dict().items()}
        return self

    def read_gradients(self, model: nn.Module) -> None:
        """Takes over the gradients of one step."""
        self.gradients.append({n: None if p.grad is None else on_cpu(p.grad) for n, p in model.named_parameters()})

    def assert_equals(self, plain: "Outcome") -> None:
        """Bit for bit."""
        assert len(self.outputs) == len(plain.outputs)
        for index, (output, expected) in enumerate(zip(self.outputs, plain.outputs, strict=True)):
            assert same(output, expected), f"output {index}"
        assert len(self.gradients) == len(plain.gradients)
        for step, (gradients, wanted) in enumerate(zip(self.gradients, plain.gradients, strict=True)):
            assert_same_tensors(gradients, wanted, f"gradients of step {step}")
        assert_same_tensors(self.parameters, plain.parameters, "parameters")
        assert_same_tensors(self.state, plain.state, "state_dict")


def same(tensor: Tensor, expected: Tensor) -> bool:
    """Equal in dtype and in every bit; NaN in the same places."""
    if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
        return False
    if tensor.layout != torch.strided:
        tensor, expected = tensor.to_dense(), expected.to_dense()
    return torch.equal(tensor.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))


def assert_same_tensors(tensors: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Names, presence and bits of two dicts of tensors."""
    assert list(tensors) == list(expected), what
    for name, tensor in tensors.items():
        wanted = expected[name]
        assert (tensor is None) == (wanted is None), f"{what}: {name} is {'missing' if tensor is None else 'there'}"
        assert tensor is None or same(tensor, wanted), f"{what}: {name} differs"


def on_cpu(tensor: Tensor) -> Tensor:
    """A copy that nothing changes later."""
    return tensor.detach().to("cpu", copy=True)


def to_device(value: Any, device: torch.device) -> Any:
    """A batch on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    return value


Forward = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]  # model and batch to output and loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """One implementation on every device: the plain loop over parameters."""
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


def train(
    model: nn.Module,
    batches: Sequence[Any],
    forward: Forward,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    after_forward: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """A step for each batch."""
    outcome = Outcome()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        optimizer.zero_grad()
        output, loss = forward(model, batch)
        after_forward(step)
        outcome.outputs += [on_cpu(output), on_cpu(loss)]
        del output
        loss.backward()
        del loss
        outcome.read_gradients(model)
        optimizer.step()
    optimizer.zero_grad()
    return outcome.read(model)


def infer(
    model: nn.Module, batches: Sequence[Any], forward: Forward, after_forward: Callable[[int], None] = lambda step: None
) -> Outcome:
    """A pass without gradients for each batch, the last one in inference mode."""
    outcome = Outcome()
    for step, batch in enumerate(batches):
        with torch.inference_mode() if step == len(batches) - 1 else torch.no_grad():
            output, loss = forward(model, batch)
            after_forward(step)
            outcome.outputs += [on_cpu(output), on_cpu(loss)]
            del output, loss
    return outcome.read(model)


# what is held -------------------------------------------------------------------------------------------------------
def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def is_counted(device: torch.device) -> bool:
    """Whether an allocator counts the device's bytes: not on the CPU."""
    return device.type != "cpu"


def allocated_bytes(device: torch.device) -> int:
    """Live bytes on the device."""
    return torch.accelerator.memory_allocated(device) if is_counted(device) else 0


class Allocations:
    """Live bytes of one device from here on, by its allocator; all zero on the CPU, which has none that counts."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        self.before_bytes = allocated_bytes(device)
        self.after_forward_bytes: list[int] = []
        if is_counted(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def forward_done(self, _step: int) -> None:
        """To be called when forward has ended and its output is alive."""
        self.after_forward_bytes.append(allocated_bytes(self.device) - self.before_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that was added."""
        return torch.accelerator.max_memory_allocated(self.device) - self.before_bytes if is_counted(self.device) else 0


def peak_activation_bytes(model: nn.Module, batch: Any, forward: Forward, device: torch.device) -> int:
    """The most that a pass of a plain model on the device adds to its weights, were every gradient to leave at once."""
    if not is_counted(device):
        return 0

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    allocations = Allocations(device)
    output, loss = forward(model, batch)
    if loss.requires_grad:
        loss.backward()
    del output, loss
    for hook in hooks:
        hook.remove()
    return allocations.peak_bytes


def largest_block_bytes(handle: headrace.Offloaded) -> int:
    """Of the blocks that come and go."""
    assert handle.plan is not None, "no plan was made"
    return max(handle.plan.problem.block_bytes)


def resident_bytes(handle: headrace.Offloaded, model: nn.Module) -> int:
    """Of the weights that stay."""
    assert handle.plan is not None, "no plan was made"
    total = sum(aligned(p.nbytes) for p in model.parameters())
    return total - sum(handle.plan.problem.block_bytes)


def rounding_bytes(handle: headrace.Offloaded, model: nn.Module) -> int:
    """The most that rounding adds to what the budget counts: for each block, resident part, dtype and module buffer."""
    assert handle.plan is not None, "no plan was made"
    return GRANULE_BYTES * (len(handle.plan.problem.block_bytes) + len(list(model.buffers())) + 8)


# what is moved ------------------------------------------------------------------------------------------------------
def settle(handle: headrace.Offloaded, cycle: Callable[[], None], limit: int = 12) -> None:
    """Repeats the cycle until its plan stays the same."""
    unchanged = 0
    plan = handle.plan
    for _ in range(limit):
        cycle()
        unchanged = unchanged + 1 if handle.plan is plan else 0
        plan = handle.plan
        if plan is not None and unchanged >= 2 * len(plan.cycles):
            return
    raise AssertionError(f"no plan lasted within {limit} cycles")


def assert_moves_as_planned(handle: headrace.Offloaded, model: nn.Module, cycle: Callable[[], None]) -> None:
    """Settled cycles bring exactly what is planned, when it is planned; residents that changed are renewed besides."""
    settle(handle, cycle)
    plan = handle.plan
    assert plan is not None
    rounds = len(plan.cycles)
    handle.reset_stats()
    for _ in range(rounds):
        cycle()
    stats = handle.stats()
    planned = plan.predicted.onload_bytes * rounds
    late = [  # where memory is short, a block may be planned to come only at the visit that needs it
        block
        for steps in plan.cycles
        for visit, step in zip(plan.problem.visits, steps, strict=False)
        for block in step.loads
        if block in visit.blocks
    ]
    assert stats.demand_onloads == len(late)
    in_plan_bytes = stats.onload_bytes - stats.expert_bytes  # experts come when they are called
    assert planned - rounds <= in_plan_bytes  # the prediction is rounded
    assert in_plan_bytes <= planned + rounds * (1 + resident_bytes(handle, model))
    assert plan.predicted.peak_bytes <= stats.device_budget_bytes
    trained = sum(p.nbytes for p in model.parameters() if p.grad is not None)
    assert stats.offload_bytes == trained * rounds


# both runs ----------------------------------------------------------------------------------------------------------
Script = Callable[[nn.Module], Outcome]


def budget_bytes(model: nn.Module, share: float) -> int:
    """That share of the weights, and room for the buffers of modules."""
    return int(weight_bytes(model) * share) + sum(buffer.nbytes for buffer in model.buffers())


def offload(model: nn.Module, device: torch.device, share: float = 0.4, **options: Any) -> headrace.Offloaded:
    """Offloads with a budget of that share of the weights."""
    options.setdefault("device_memory", budget_bytes(model, share))
    return headrace.offload(model, device=device, **options)


def assert_streamed(handle: headrace.Offloaded, model: nn.Module) -> None:
    """The budget was below the weights and was kept, and weights came again and again."""
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < weight_bytes(model)
    assert stats.onload_bytes > weight_bytes(model)


def assert_exact(
    make: Callable[[], nn.Module], script: Script, device: torch.device, share: float = 0.4, **options: Any
) -> tuple[headrace.Offloaded, nn.Module]:
    """Runs the script on the plain model and on the offloaded one: everything must be equal."""
    plain = script(make().to(device))
    model = make()
    handle = offload(model, device, share, **options)
    script(model).assert_equals(plain)
    assert_streamed(handle, model)
    return handle, model
