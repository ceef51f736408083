"""Does what docs/limits.md says hold: what is refused, and how, and what works instead?"""

import pytest
import torch

import headrace
from headrace.weights.passes import engine
from tests.support.held import weight_bytes
from tests.support.loops import loss_of


@pytest.fixture
def handle(compute_device, decoder):
    with headrace.offload(decoder, device=compute_device, device_memory=weight_bytes(decoder) // 2) as handle:
        yield handle


def test_autograd_grad_does_not_find_parameters(handle, decoder, tokens):
    parameters = list(decoder.parameters())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss_of(decoder, tokens), parameters)
    found = torch.autograd.grad(loss_of(decoder, tokens), parameters, allow_unused=True)
    assert found == (None,) * len(parameters)
    loss_of(decoder, tokens).backward(inputs=parameters)
    assert all(parameter.grad is None for parameter in parameters)
    loss_of(decoder, tokens).backward()
    assert all(parameter.grad is not None for parameter in parameters)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_a_graph_over_the_gradients_of_parameters_is_refused(handle, decoder, tokens):
    with pytest.raises(headrace.StateError, match="create_graph=True"):
        loss_of(decoder, tokens).backward(create_graph=True)
    assert all(parameter.grad is None for parameter in decoder.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
def test_compilation_goes_around_blocks(handle, decoder, tokens):
    plain = loss_of(decoder, tokens).detach()
    compiled = torch.compile(decoder, backend="eager")
    with pytest.warns(RuntimeWarning, match="compiles its blocks"):
        found = loss_of(compiled, tokens).detach()
    assert torch.equal(found, plain)
    torch.compiler.reset()
    for layer in decoder.layers:
        layer.compile(backend="eager")
    assert torch.equal(loss_of(decoder, tokens).detach(), plain)
    torch.compiler.reset()


def test_a_write_through_a_kept_tensor_needs_refresh(compute_device, decoder, tokens):
    with headrace.offload(decoder, device=compute_device, device_memory=2 * weight_bytes(decoder)) as handle:
        kept = decoder.head.weight.data
        with torch.no_grad():
            for _ in range(3):  # after these every block stays on the device
                decoder(tokens)
            kept.zero_()
            assert decoder(tokens).any()
            handle.refresh()
            assert not decoder(tokens).any()


def test_a_cuda_graph_of_an_offloaded_model_is_refused(handle, decoder, tokens, monkeypatch):
    expected = loss_of(decoder, tokens).detach()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "is_capturing", lambda device: True)
        with pytest.raises(headrace.StateError, match=r"CUDA graph.*handle\.remove"):
            decoder(tokens)
    assert torch.equal(loss_of(decoder, tokens), expected)
