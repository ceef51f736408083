"""Is what PyTorch keeps to itself still as headrace/runtime/autograd.py and torch_rules.py rely on?"""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from headrace.runtime import torch_rules
from headrace.runtime.autograd import (
    NO_TASK,
    DispatchMode,
    EndOfBackward,
    FakeTensorMode,
    FunctionNode,
    WeakTensor,
    address_of,
    backward_task,
    check_version,
    data_of,
    dispatch_modes,
    function_modes,
    has_storage,
    hooks_are_enabled,
    in_backward,
    in_gradient_transform,
    innermost_transform,
    is_costly,
    is_wrapper,
    make_subclass,
    more_flops,
    neg_view,
    no_override,
    patched_keeping,
    patched_policies,
    pop_hooks,
    push_hooks,
    running_node,
    runs_in_backward,
    sequence_number,
    sharing_versions,
    storage_use_count,
    tensor_use_count,
    top_hooks,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
    without_modes,
    without_overrides,
    without_transforms,
)


def as_saved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def as_packed(packed: Any) -> Any:
    return packed


@torch.enable_grad()
def in_a_backward(action: Callable[[], None]) -> None:
    """Runs it in the backward of a node."""
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _gradient: action())
    product.sum().backward()


# hooks on what autograd saves -----------------------------------------------------------------------------------------
@pytest.fixture
def pushed() -> Iterator[None]:
    push_hooks(as_saved, as_packed)
    yield
    pop_hooks()


def test_top_hooks_are_the_last_pair_that_was_pushed(pushed: None) -> None:
    assert top_hooks(True) == (as_saved, as_packed)
    with torch.autograd.graph.saved_tensors_hooks(as_packed, as_packed):
        assert top_hooks(True) == (as_packed, as_packed)
    assert top_hooks(True) == (as_saved, as_packed)


def test_top_hooks_are_those_of_the_thread(pushed: None) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(top_hooks(True)))
    thread.start()
    thread.join()
    assert found == [None]


def test_push_hooks_reach_only_the_innermost_pair(pushed: None) -> None:
    calls = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor.detach()

    push_hooks(pack, as_packed)
    try:
        leaf = torch.ones(2, requires_grad=True)
        product = leaf * leaf
    finally:
        pop_hooks()
    leaf * leaf  # the pair below is on top again
    product.sum().backward()
    assert len(calls) == 2
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))


def test_pop_hooks_takes_off_a_pair_of_somebody_else() -> None:
    torch.autograd.graph.saved_tensors_hooks(as_saved, as_packed).__enter__()
    assert top_hooks(True) == (as_saved, as_packed)
    pop_hooks()
    assert top_hooks(True) is None


def test_hooks_are_enabled_but_not_inside_of_torch_func_grad() -> None:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(hooks_are_enabled())
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    assert found == [False]
    assert hooks_are_enabled()


# the backward under way -----------------------------------------------------------------------------------------------
def test_backward_task_numbers_backwards_also_nested_ones() -> None:
    found = []

    def nested() -> None:
        found.append(backward_task())
        in_a_backward(lambda: found.append(backward_task()))
        found.append(backward_task())

    in_a_backward(nested)
    in_a_backward(lambda: found.append(backward_task()))
    outer, inner, again, later = found
    assert outer == again
    assert len({outer, inner, later, NO_TASK}) == 4
    assert backward_task() == NO_TASK


def test_in_backward_also_within_callbacks_of_its_end() -> None:
    found = []
    in_a_backward(lambda: EndOfBackward(lambda completed: found.append(in_backward())).queue())
    assert found[0] is True  # as it completes
    assert not in_backward()


def test_end_of_backward_comes_when_all_gradients_are_there() -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen = []
    product = leaf * 2
    ended = lambda *, completed: seen.append((completed, leaf.grad is not None))  # noqa: E731
    product.register_hook(lambda _gradient: EndOfBackward(ended).queue())
    product.sum().backward()
    assert seen == [(True, True), (False, True)]


def test_end_of_backward_of_a_nested_one_comes_before_the_outer_one_goes_on() -> None:
    seen = []

    def nested() -> None:
        in_a_backward(lambda: EndOfBackward(lambda *, completed: seen.append(completed)).queue())
        seen.append("outer")

    in_a_backward(nested)
    assert seen == [True, False, "outer"]


def test_end_of_backward_is_let_go_of_where_the_backward_raises() -> None:
    seen = []

    def fail() -> None:
        EndOfBackward(lambda *, completed: seen.append(completed)).queue()
        raise ValueError("in a hook")

    with pytest.raises(ValueError, match="in a hook"):
        in_a_backward(fail)
    gc.collect()
    assert seen == [False]


def test_end_of_backward_outside_of_one_is_refused() -> None:
    seen = []
    with pytest.raises(RuntimeError):
        EndOfBackward(lambda *, completed: seen.append(completed)).queue()
    assert seen == [False]


def test_end_of_backward_that_was_not_made_wholly_says_nothing() -> None:
    EndOfBackward.__new__(EndOfBackward).__del__()


def test_check_version_raises_what_autograd_does() -> None:
    leaf = torch.ones(2, requires_grad=True)
    factor = torch.ones(2)
    product = leaf * factor
    factor.detach().view(2, 1).add_(1)  # one counter for all of these
    with pytest.raises(RuntimeError) as by_autograd:
        product.sum().backward()
    check_version(factor, 1)
    with pytest.raises(RuntimeError) as by_us:
        check_version(factor, 0)
    assert str(by_autograd.value).startswith(str(by_us.value).split(": a tensor")[0])


# tensors and their memory ---------------------------------------------------------------------------------------------
def test_address_of_is_one_for_all_objects_of_a_storage_and_of_a_tensor() -> None:
    tensor = torch.empty(4)
    address = address_of(tensor.untyped_storage())
    assert address == address_of(tensor[1:].untyped_storage()) == address_of(tensor.detach().untyped_storage())
    assert address != address_of(torch.empty(4).untyped_storage())
    assert address_of(torch.empty(0).untyped_storage()) != address_of(torch.empty(0).untyped_storage())
    part = tensor[1:]
    assert address_of(part._base) == address_of(tensor) != address_of(part)


def test_storage_use_count_counts_tensors_not_python_objects() -> None:
    tensor = torch.empty(4)
    address = address_of(tensor.untyped_storage())
    alone = storage_use_count(address)
    another_name = tensor
    assert storage_use_count(address) == alone
    view = tensor[1:]
    assert storage_use_count(address) == alone + 1
    detached = view.detach()
    assert storage_use_count(address) == alone + 2
    del view, detached, another_name
    assert storage_use_count(address) == alone


def test_tensor_use_count_counts_holders_in_autograd() -> None:
    tensor = torch.ones(2)
    alone = tensor_use_count(tensor)
    another_name = tensor
    assert tensor_use_count(tensor) == alone
    other = torch.empty(2, requires_grad=True)
    other.grad = tensor
    assert tensor_use_count(tensor) + sys.getrefcount(tensor) > alone + sys.getrefcount(another_name) - 1
    assert tensor_use_count(tensor) == alone + 1
    other.grad = None
    assert tensor_use_count(tensor) == alone


def test_weak_tensor_lets_the_memory_go_and_keeps_the_address() -> None:
    tensor = torch.empty(2)
    address, storage = address_of(tensor), weakref.ref(tensor.untyped_storage())
    kept = WeakTensor(tensor)
    assert not kept.expired()
    del tensor
    assert kept.expired()
    assert storage() is None
    others = [torch.empty(2) for _ in range(100)]
    assert address not in map(address_of, others)


def test_has_storage_is_false_for_tensors_of_transforms() -> None:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(has_storage(x))
        return x.sum()

    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.grad(function)(torch.ones(2))
    assert found == [False, False]
    assert has_storage(torch.ones(2))


class Hidden(nn.Parameter):
    @property
    def data(self) -> torch.Tensor:
        raise AssertionError("its own")


def test_data_of_reads_and_writes_past_a_property_of_the_class() -> None:
    parameter = Hidden(torch.ones(2))
    version = parameter._version
    assert type(data_of.__get__(parameter)) is torch.Tensor
    assert data_of.__get__(parameter).data_ptr() == parameter.data_ptr()
    data_of.__get__(parameter).mul_(2)
    other = torch.zeros(2)
    data_of.__set__(parameter, other)
    assert parameter.data_ptr() == other.data_ptr()
    assert parameter._version == version


def test_neg_view_is_the_same_memory_read_as_negative() -> None:
    numbers = torch.tensor([1 + 2j])
    part = numbers.conj().imag
    assert part.is_neg()
    view = neg_view(torch.view_as_real(numbers)[:, 1])
    assert view.is_neg()
    assert torch.equal(view, part)
    assert view.data_ptr() == part.data_ptr()


# torch functions and transforms ---------------------------------------------------------------------------------------
class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("it was called")


class Quiet(torch.Tensor):
    __torch_function__ = no_override


def test_without_overrides_no_class_is_asked() -> None:
    tensor = torch.ones(2).as_subclass(Loud)
    with pytest.raises(AssertionError, match="it was called"):
        tensor + 1
    with without_overrides():
        assert type(tensor + 1) is torch.Tensor
        assert tensor.shape == (2,)
        assert tensor.grad is None
        assert tensor._version == 0


def test_without_transforms_tensors_are_those_of_outside() -> None:
    made = []

    def function(x: torch.Tensor) -> torch.Tensor:
        made.append(x * 1)
        with without_transforms():
            made.append(torch.ones(2))
            assert torch.ones(2, requires_grad=True).mul(2).grad_fn is not None
        return x.sum()

    torch.func.grad(function)(torch.ones(2))
    inside, outside = made
    assert not has_storage(inside)
    assert has_storage(outside)


def test_no_override_makes_plain_tensors() -> None:
    tensor = torch.ones(2).as_subclass(Quiet)
    assert type(tensor + 1) is torch.Tensor
    assert not torch.overrides.has_torch_function((tensor,))


def test_in_transform_of_any_kind() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(innermost_transform() is not None)
        return x.sin()

    torch.vmap(function)(torch.ones(3))
    torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),))
    assert seen == [True, True]
    assert innermost_transform() is None


def test_runs_in_backward_of_nodes_that_it_goes_through() -> None:
    used, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, other)]
    seen = []
    hidden = torch.ones(2, requires_grad=True) * 2
    hidden.register_hook(lambda _: seen.append([runs_in_backward(node) for node in nodes]))
    later = torch.autograd.Variable._execution_engine.queue_callback
    hidden.register_hook(lambda _: later(lambda: seen.append([runs_in_backward(node) for node in nodes])))
    (hidden.sum() + used.sum()).backward()
    assert seen == [[True, False], [True, False]]


class Doubling(torch.autograd.Function):
    """Notes what `running_node` says in its backward, and what hooks see that are registered there."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        node = running_node()
        assert isinstance(node, FunctionNode)
        Doubling.seen.append(node.name())
        hook = node.register_hook(lambda *_: (hook.remove(), Doubling.seen.append("over"))[0])
        return gradients[0] * 2


def test_the_running_node_and_hooks_that_are_registered_in_it() -> None:
    Doubling.seen.clear()
    assert running_node() is None
    hidden = torch.ones(2, requires_grad=True).exp()
    hidden.register_hook(lambda _: Doubling.seen.append(isinstance(running_node(), FunctionNode)))
    result = Doubling.apply(hidden).sum()  # type: ignore[no-untyped-call]
    for _ in range(2):
        result.backward(retain_graph=True)
    assert Doubling.seen == ["DoublingBackward", "over", False] * 2


def test_in_gradient_transform_and_no_other() -> None:
    found = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(in_gradient_transform())
        return x.sum()

    ones = torch.ones(2)
    torch.func.grad(function)(ones)
    torch.func.vjp(function, ones)
    torch.func.vmap(torch.func.grad(function))(torch.ones(2, 2))
    assert found == [True, True, True]
    found.clear()
    torch.func.vmap(function)(torch.ones(2, 2))
    torch.func.jvp(function, (ones,), (ones,))
    function(ones)
    assert found == [False, False, False]


def test_tree_flatten_finds_tensors_in_nested_containers() -> None:
    leaves = [torch.ones(1), torch.ones(2), torch.ones(3)]
    assert tree_flatten(([leaves[0]], {"a": (leaves[1], leaves[2])}))[0] == leaves


def test_tree_map_only_changes_those_of_a_class() -> None:
    home = nn.Parameter(torch.ones(1))
    assert tree_map_only(nn.Parameter, lambda _home: "leaf", ((home, 1), {"a": [home]})) == (
        ("leaf", 1),
        {"a": ["leaf"]},
    )


def test_tree_unflatten_undoes_tree_flatten() -> None:
    given = (1, [2, {"a": 3}])
    leaves, structure = tree_flatten(given)
    assert tree_unflatten([-leaf for leaf in leaves], structure) == (-1, [-2, {"a": -3}])


# what optimizers compute with -----------------------------------------------------------------------------------------
def weights() -> tuple[nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 4, generator=generator))
    weight.grad = torch.randn(8, 4, generator=generator)
    return weight, weight.detach().clone()


@pytest.mark.parametrize(
    ("rule", "kind"), [(torch_rules.fused_adam, torch.optim.Adam), (torch_rules.fused_adamw, torch.optim.AdamW)]
)
def test_fused_adam_and_adamw_are_a_fused_step(rule: Any, kind: type[torch.optim.Optimizer]) -> None:
    weight, ours = weights()
    kind([weight], weight_decay=0.1, fused=True).step()
    rule(
        [ours],
        [weight.grad],
        [torch.zeros_like(ours)],
        [torch.zeros_like(ours)],
        [],
        [torch.ones(())],
        amsgrad=False,
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        maximize=False,
    )
    assert torch.equal(ours, weight)


def test_fused_sgd_is_a_fused_step() -> None:
    weight, ours = weights()
    torch.optim.SGD([weight], 0.1, momentum=0.9, fused=True).step()
    torch_rules.fused_sgd(
        [ours],
        [weight.grad],
        [torch.zeros_like(ours)],
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    assert torch.equal(ours, weight)


def test_adafactor_is_a_step_of_torch_optim() -> None:
    weight, ours = weights()
    torch.optim.Adafactor([weight], foreach=False).step()
    step = torch.zeros(())
    torch_rules.adafactor(
        [ours],
        [weight.grad],
        [torch.zeros(8, 1)],
        [torch.zeros(1, 4)],
        [None],
        [step],
        foreach=False,
        d=1.0,
        lr=1e-2,
        beta2_decay=-0.8,
        weight_decay=0.0,
        eps1=None,
        eps2=1e-3,
        maximize=False,
    )
    assert torch.equal(ours, weight)
    assert step == 1


def test_muon_is_a_step_of_torch_optim() -> None:
    weight, ours = weights()
    torch.optim.Muon([weight]).step()
    with torch.no_grad():
        torch_rules.muon(
            [ours],
            [weight.grad],
            [torch.zeros_like(ours)],
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.95,
            nesterov=True,
            ns_coefficients=(3.4445, -4.7750, 2.0315),
            ns_steps=5,
            eps=1e-7,
            adjust_lr_fn=None,
            has_complex=False,
        )
    assert torch.equal(ours, weight)


def test_foreach_add_counts_steps_in_place() -> None:
    steps = [torch.zeros(()), torch.ones(())]
    torch_rules.foreach_add(steps, 1)
    assert steps == [1, 2]


def test_foreach_norm_and_group_tensors_give_pytorchs_norm_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(5, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
    norms = {id(tensor): norm for tensor, norm in zip(tensors, torch_rules.foreach_norm(tensors), strict=True)}
    groups = torch_rules.group_tensors([tensors])
    ordered = [norms[id(tensor)] for (alike,), _ in groups.values() for tensor in alike]
    assert len(ordered) == 6
    total = torch.linalg.vector_norm(torch.stack([norm.to(torch.float32) for norm in ordered]), 2.0)
    assert torch.equal(total, torch.nn.utils.get_total_norm(tensors))


def test_a_tensor_of_a_class_counts_the_versions_of_what_it_was_made_of() -> None:
    class Special(nn.Parameter):
        def __new__(cls) -> "Special":
            raise AssertionError("not called")

    tensor = torch.zeros(3)
    special = make_subclass(Special, tensor, False)
    assert type(special) is Special
    assert not special.requires_grad
    special.add_(1)
    assert tensor.tolist() == [1, 1, 1]
    assert tensor._version == special._version == 1


def test_a_wrapper_says_what_it_is_made_of() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    wrapper = TwoTensor(torch.ones(2, 3), torch.zeros(2, 3))
    assert is_wrapper(wrapper)
    names, context = wrapper.__tensor_flatten__()
    assert [getattr(wrapper, name) for name in names] == [wrapper.a, wrapper.b]
    inner = {name: getattr(wrapper, name) + 1 for name in names}
    made = TwoTensor.__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())
    assert is_wrapper(made)
    assert made.a is inner["a"]
    assert not any(map(is_wrapper, (torch.ones(2), nn.Parameter(torch.ones(2)))))


def test_nodes_are_numbered_in_the_order_in_which_a_thread_makes_them_and_backward_goes_the_other_way() -> None:
    seen: list[int] = []
    x = torch.ones((), requires_grad=True)

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(ctx._sequence_nr())
            return gradient

    noted: Any = Noted.apply
    parts = [noted(x) for _ in range(4)]
    numbers = [sequence_number(part.grad_fn) for part in parts]
    assert numbers == sorted(numbers)
    total = parts[2] + parts[0] + (parts[3] * parts[1])
    assert sequence_number(total.grad_fn) > numbers[-1]
    total.backward()
    assert seen == numbers[::-1]


def test_a_stretch_of_a_graph_adds_up_as_the_whole_graph_does() -> None:
    """The gradient of a tensor with several uses, where the later ones' sum is put in as a root."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, generator=generator).requires_grad_()
    factors = torch.randn(5, 64, generator=generator)

    def used(tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return sum((factor * tensor for factor in of), torch.zeros(64)).sum()

    made = x * 1
    (used(made, factors[:2]) + used(made, factors[2:])).backward()
    whole, x.grad = x.grad, None
    later = (x * 1).detach().requires_grad_() * 1
    kept: list[torch.Tensor] = []
    later.register_hook(kept.append)
    used(later, factors[2:]).backward()
    made = x * 1
    edge = get_gradient_edge(made)
    torch.autograd.backward([edge, get_gradient_edge(used(made, factors[:2]))], [kept[0], torch.ones(())])
    assert whole is not None
    assert x.grad is not None
    assert torch.equal(x.grad, whole)


def test_function_modes_are_those_of_this_thread_outermost_first() -> None:
    assert function_modes() == []
    outer, inner = torch.device("cpu"), BaseTorchFunctionMode()
    with outer, inner:
        found = function_modes()
        elsewhere: list[list[Any]] = []
        thread = threading.Thread(target=lambda: elsewhere.append(function_modes()))
        thread.start()
        thread.join()
    assert len(found) == 2
    assert found[-1] is inner
    assert elsewhere == [[]]


def test_fake_tensor_mode_has_shapes_storages_and_graphs_but_no_memory() -> None:
    saved = []
    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        huge = torch.empty((2**20, 2**20), requires_grad=True)
        result = huge.exp()
    assert result.shape == huge.shape
    assert [tensor.untyped_storage() for tensor in saved] == [result.untyped_storage()]
    assert result.untyped_storage() is result.untyped_storage()
    assert result.untyped_storage().nbytes() == 2**42


def test_more_flops_are_those_of_attention_on_the_cpu() -> None:
    counter = FlopCounterMode(display=False, custom_mapping=more_flops)
    with FakeTensorMode(), counter:
        query = torch.empty(2, 4, 8, 16)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert counter.get_total_flops() == 2 * (2 * 2 * 4 * 8 * 8 * 16)


def test_costly_operations_are_products_convolutions_and_attention_that_is_not_random() -> None:
    found: list[str] = []

    class Finding(DispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_costly(func, types, args, kwargs or {}):
                found.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    x, weight = torch.ones(1, 4, 4), nn.Parameter(torch.ones(4, 4))
    attend = torch.nn.functional.scaled_dot_product_attention
    for _ in range(2):
        with Finding():
            (x @ weight).relu_().sin()
            torch.mm(x[0], x[0], out=torch.empty(4, 4))
            torch.nn.functional.conv1d(x, torch.ones(4, 4, 1))
            attend(x[None], x[None], x[None], is_causal=True)
            with FakeTensorMode():
                torch.ones(4, 4) @ torch.ones(4, 4)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), Finding():
            attend(x[None], x[None], x[None], dropout_p=0.0)
        assert found == ["mm", "convolution", *["_scaled_dot_product_flash_attention_for_cpu"] * 2]
        found.clear()
    random = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert not is_costly(random, (), (x, x, x, 0.1), {})
    assert not is_costly(random, (), (x, x, x), {"dropout_p": 0.1})
    assert is_costly(random, (), (x, x, x), {})


def test_operations_of_others_are_not_costly_whatever_their_flops() -> None:
    @torch.library.custom_op("headrace_tests::random_product", mutates_args=())
    def random_product(x: torch.Tensor, p: float) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ x, p)

    operator = torch.ops.headrace_tests.random_product
    register_flop_formula(operator)(lambda *_, **__: 1)
    try:
        assert not is_costly(operator.default, (), (torch.ones(4, 4), 0.5), {})
    finally:
        del flop_registry[operator]


class Named(TorchDispatchMode):
    """Notes the operators that it sees, under its name."""

    def __init__(self, name: str, seen: list[str]) -> None:
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{self.name} {func}")
        return func(*args, **(kwargs or {}))


def test_modes_are_counted_and_see_nothing_without_modes() -> None:
    seen: list[str] = []
    one, both = torch.ones(2), ["inner aten.neg.default", "outer aten.neg.default"]
    assert not dispatch_modes()
    with Named("outer", seen), Named("inner", seen):
        assert dispatch_modes() == 2
        with without_modes():
            assert not dispatch_modes()
            one.add(1)
        assert seen == []
        one.neg()
        assert seen == both
        with pytest.raises(KeyError), without_modes():
            raise KeyError
        one.neg()
        assert seen == 2 * both
    assert not dispatch_modes()


def test_patched_keeping_and_policies_are_what_a_selective_checkpoint_calls() -> None:
    asked: list[Any] = []
    kept: list[torch.Tensor] = []

    def policy(_context: Any, operator: Any, *_: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    @patched_policies
    def saves_all(own: Any) -> Any:
        def __init__(mode: Any, policy: Any, *arguments: Any) -> None:  # noqa: N807
            asked.append(policy)
            own(mode, lambda *_, **__: CheckpointPolicy.MUST_SAVE, *arguments)

        return __init__

    @patched_keeping
    def in_a_list(own: Any) -> Any:
        class Kept(own):  # type: ignore[misc]
            def __init__(self, value: torch.Tensor) -> None:
                super().__init__(None)
                kept.append(value)

            def get_val(self, allowed: bool) -> torch.Tensor:
                assert not allowed
                return kept.pop(0)

        return Kept

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    ends = [change.use(policy) for change in (saves_all, in_a_list)]
    x = torch.ones(2, requires_grad=True)
    result: Any = checkpoint(lambda x: x.exp().sin().square(), x, use_reentrant=False, context_fn=contexts)
    for end in ends:
        end()
    assert asked == [policy]
    assert len(kept) == 3
    assert not any(value.requires_grad for value in kept)
    result.sum().backward()
    assert len(kept) == 1  # the last operator saves what the one before it gave: nothing asks for its own
    assert torch.equal(x.grad, (2 * x.exp().sin() * x.exp().cos() * x.exp()).detach())  # type: ignore[arg-type]


def test_sharing_versions_within_a_mode() -> None:
    found: list[bool] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            apart = result.detach()
            with sharing_versions():
                shared = result.detach()
            torch.autograd.graph.increment_version(result)
            found.append(shared._version == result._version > apart._version)
            return result

    with Mode():
        torch.ones(2).exp()
    assert found == [True, True]
