"""Is the model an ordinary CPU model to whoever saves, loads, copies, moves, averages or removes it?"""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import headrace
from tests.matrix.models import CASES, DENSE, Decoder
from tests.matrix.test_transformers import built, llama, text_inputs
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.held import Allocations, comes_true
from tests.support.loops import to_device, train
from tests.support.offloaded import assert_exact, assert_streamed, offload

UNET = CASES[3]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: on_cpu(tensor) for name, tensor in model.state_dict().items()}


# state_dict ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", [DENSE, UNET], ids=["dense", "unet"])
def test_state_dict_at_any_time(case: Any, compute_device: torch.device) -> None:
    """Before and after forward, backward and step; its tensors are on the CPU, whole, and the model's own."""

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

        def look() -> None:
            outcome.outputs += state_of(model).values()

        for inputs, wanted in case.on(compute_device):
            look()
            loss = case.loss(model(inputs), wanted)
            look()
            loss.backward()
            look()
            optimizer.step()
            look()
            optimizer.zero_grad()
        return outcome.read(model)

    _, model = assert_exact(case.build, script, compute_device, case.share)
    state = model.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in state.values())
    for name, parameter in model.named_parameters():
        assert state[name].data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool, compute_device: torch.device) -> None:
    """Between steps, and again: what is loaded computes and trains."""
    torch.manual_seed(5)
    other = state_of(Decoder())

    def script(model: nn.Module) -> Outcome:
        first = train(model, DENSE.on(compute_device)[:1], DENSE.forward)
        plain = next(model.parameters()).device.type != "cpu"
        state = {name: tensor.to(compute_device) if plain else tensor.clone() for name, tensor in other.items()}
        model.load_state_dict(state, assign=assign)
        second = train(model, DENSE.on(compute_device), DENSE.forward)
        second.outputs += first.outputs
        return second

    assert_exact(DENSE.build, script, compute_device)


def test_save_pretrained_and_from_pretrained(tmp_path: Path, compute_device: torch.device) -> None:
    def lm_forward(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = model(**batch)
        return output.logits, output.loss

    inputs = to_device([{**text_inputs(0), "labels": text_inputs(0)["input_ids"]}] * 2, compute_device)
    model: Any = built(llama)
    handle = offload(model, compute_device, 0.5)
    train(model, inputs, lm_forward)
    model.save_pretrained(tmp_path)
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same(state_of(loaded), state_of(model), "saved weights")
    again = offload(loaded, compute_device, 0.5)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs[0]).logits.cpu(), model(**inputs[0]).logits.cpu())
    assert again.stats().onload_bytes > 0
    assert_streamed(handle, model)


def test_torch_save(compute_device: torch.device) -> None:
    """A checkpoint holds the weights and nothing besides: not the memory around them."""
    model = DENSE.build()
    plain = io.BytesIO()
    torch.save(model.state_dict(), plain)
    offload(model, compute_device)
    train(model, DENSE.on(compute_device), DENSE.forward)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.1 * plain.tell()
    file.seek(0)
    assert_same(torch.load(file, weights_only=True), state_of(model), "checkpoint")


# copies --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_plain_models(how: str, compute_device: torch.device) -> None:
    model = DENSE.build()
    handle = offload(model, compute_device)
    train(model, DENSE.on(compute_device), DENSE.forward)
    copied: Any = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert type(copied) is Decoder
    assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
    assert_same(state_of(copied), state_of(model), how)
    plain = train(copied.to(compute_device), DENSE.on(compute_device), DENSE.forward)
    assert_same(train(model, DENSE.on(compute_device), DENSE.forward), plain)  # and the model is still offloaded
    assert_streamed(handle, model)


def test_tied_weights_stay_tied_in_copies(compute_device: torch.device) -> None:
    model = Decoder(tied=True)
    offload(model, compute_device)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight
    assert copied.head.weight is not model.head.weight


# moves ---------------------------------------------------------------------------------------------------------------
def test_moves_are_harmless(compute_device: torch.device) -> None:
    def move(model: nn.Module) -> None:
        model.to(compute_device)
        model.to(compute_device, torch.float32)
        model.cpu()
        getattr(model, compute_device.type)()  # as model.cuda()
        model.float()
        model.requires_grad_(True).train()

    def script(model: nn.Module) -> Outcome:
        offloaded = "_headrace_handle" in model.__dict__
        first = train(model, DENSE.on(compute_device)[:1], DENSE.forward)
        if offloaded:
            move(model)
        second = train(model, DENSE.on(compute_device), DENSE.forward)
        second.outputs += first.outputs
        return second

    _, model = assert_exact(DENSE.build, script, compute_device)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.parametrize("change", ["half", "double", "bfloat16"])
def test_changes_of_a_parts_dtype_are_refused(change: str, compute_device: torch.device) -> None:
    model = DENSE.build()
    handle = offload(model, compute_device)
    before = state_of(model)
    part = next(child for child in model.children() if any(True for _ in child.parameters()))
    with pytest.raises(headrace.StateError, match=r"a part of an offloaded model cannot change .* convert the whole"):
        getattr(part, change)()
    assert_same(state_of(model), before, "weights")
    train(model, DENSE.on(compute_device), DENSE.forward)
    assert_streamed(handle, model)


def test_device_of_a_transformers_model(compute_device: torch.device) -> None:
    model: Any = built(llama)
    handle = offload(model, compute_device, 0.5)
    assert model.device == compute_device
    assert model.model.device == compute_device
    handle.remove()
    assert model.device == torch.device("cpu")


def test_batches_on_the_cpu_are_moved(compute_device: torch.device) -> None:
    """Nested ones too; outputs stay on the device."""

    class Nested(Decoder):
        def forward(self, batch: Any) -> Any:
            return {"logits": super().forward(batch["inputs"][0]), "same": batch["inputs"][1]}

    torch.manual_seed(0)
    model = Nested()
    offload(model, compute_device)
    tokens = DENSE.batches(1)[0][0]
    output = model({"inputs": (tokens, tokens), "name": "a text"})
    assert output["logits"].device == output["same"].device == compute_device


# averages ------------------------------------------------------------------------------------------------------------
def test_averages_swapped_in_through_data(compute_device: torch.device) -> None:
    """An EMA kept beside the model, swapped in for evaluation by every way of writing to a parameter."""

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for step, batch in enumerate(DENSE.on(compute_device)):
            output, loss = DENSE.forward(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.outputs.append(on_cpu(output))
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter, mean in zip(model.parameters(), average, strict=True):
                mean.mul_(0.5).add_(parameter.data, alpha=0.5)
            for parameter, mean in zip(model.parameters(), average, strict=True):
                if step == 0:
                    parameter.data = mean.clone()
                elif step == 1:
                    parameter.data.copy_(mean)
                else:
                    with torch.no_grad():
                        parameter.copy_(mean)
            with torch.no_grad():
                outcome.outputs.append(on_cpu(DENSE.forward(model, batch)[0]))
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.data.copy_(value)
            with torch.no_grad():
                outcome.outputs.append(on_cpu(DENSE.forward(model, batch)[0]))
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


def test_refresh_sees_what_nobody_could_notice(compute_device: torch.device) -> None:
    """A write through a tensor that was taken from `p.data` long ago."""
    plain, model = DENSE.build().to(compute_device), DENSE.build()
    handle = offload(model, compute_device)
    batch = DENSE.on(compute_device)[0]
    kept = model.head.weight.data
    with torch.no_grad():
        assert same(on_cpu(model(batch[0])), on_cpu(plain(batch[0])))
        kept.mul_(2)
        handle.refresh()
        plain.head.weight.mul_(2)
        assert same(on_cpu(model(batch[0])), on_cpu(plain(batch[0])))


# removal -------------------------------------------------------------------------------------------------------------
def test_remove_and_offload_again(compute_device: torch.device) -> None:
    plain_model = DENSE.build().to(compute_device)
    plain = [train(plain_model, DENSE.on(compute_device), DENSE.forward) for _ in range(2)]
    model = DENSE.build()
    identities = [id(parameter) for parameter in model.parameters()]
    classes = [type(module) for module in model.modules()]
    with offload(model, compute_device):
        assert_same(train(model, DENSE.on(compute_device), DENSE.forward), plain[0])
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert [type(module) for module in model.modules()] == classes
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert_same(state_of(model), plain[0].state, "after removal")
    model(DENSE.on(torch.device("cpu"))[0][0]).sum().backward()  # an ordinary CPU model
    model.zero_grad()
    handle = offload(model, compute_device)
    assert_same(train(model, DENSE.on(compute_device), DENSE.forward), plain[1])
    handle.remove()
    handle.remove()


def test_removal_lets_go_of_device_memory(compute_device: torch.device) -> None:
    moved = DENSE.on(compute_device)
    allocations = Allocations(compute_device)
    model = DENSE.build()
    handle = offload(model, compute_device)
    train(model, moved, DENSE.forward)
    handle.remove()
    assert handle.stats().host_bytes >= 0
    assert comes_true(lambda: allocations.added_bytes <= 512 * 16)  # a scalar for each block
