"""Are tensors saved that are not plain bytes in order, or refused by name before anything is written?"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "of the layout torch.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "of the layout torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    "lazy": (nn.parameter.UninitializedBuffer, "it is not initialised yet; call the model once"),
    "meta": (lambda: torch.empty(3, device="meta"), "it is on meta and has no value; load the model first"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"call dequantize\(\)"),
    "freed": (freed, "its storage of 12 bytes was freed"),
    "overlapping": (lambda: torch.ones(9).as_strided((5, 5), (1, 1)), "its elements overlap in memory"),
}


@pytest.mark.filterwarnings("ignore:.*[Nn]ested:UserWarning", "ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("place", ["parameter", "buffer", "state"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_plain_bytes_is_refused_by_name(tmp_path: Path, kind: str, place: str) -> None:
    make, reason = REFUSED[kind]
    model, name = nn.Linear(2, 2), "'odd'"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if place == "buffer":
        model.register_buffer("odd", make())
    elif place == "state":
        optimizer.state[model.bias]["odd"] = make()
        name = r"'state\.1\.odd of optimizer\.pt'"
    elif kind == "lazy":
        model.odd = nn.parameter.UninitializedParameter()
    else:
        model.odd = nn.Parameter(make(), False)
    with pytest.raises(headrace.CheckpointError, match=f"{name} cannot be saved: .*{reason}"):
        headrace.save(tmp_path / "step-1", model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_lazy_module_that_was_not_called(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(headrace.CheckpointError, match=r"'1\.running_mean' cannot be saved: it is not initialised yet"):
        headrace.save(tmp_path / "step-1", model)
    model(torch.ones(2, 2))
    headrace.save(tmp_path / "step-1", model)


EXPANDED: dict[str, tuple[Callable[[], torch.Tensor], tuple[int, ...]]] = {
    "rows": (lambda: torch.randn(1, 7), (5, 7)),
    "columns": (lambda: torch.randn(5, 1), (5, 7)),
    "all": (lambda: torch.randn(()), (5, 7)),
    "middle": (lambda: torch.randn(3, 1, 4), (3, 5, 4)),
    "not a number": (lambda: torch.full((1, 7), torch.nan), (5, 7)),
    "large": (lambda: torch.randn(1, 1500), (1200, 1500)),  # in more than one piece
}


@pytest.mark.parametrize("kind", EXPANDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expanded_tensors(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    make, shape = EXPANDED[kind]
    model, again = nn.Module(), nn.Module()
    for one, kept in ((model, torch.float32), (again, dtype)):
        one.odd = nn.Parameter(make().to(kept).expand(shape), requires_grad=False)
        one.register_buffer("other", make().to(kept).expand(shape))
        assert 0 in one.odd.stride()
        assert 0 in one.other.stride()
    headrace.save(tmp_path / "step-1", model)
    headrace.load(tmp_path / "step-1", again)
    for found, wanted in ((again.odd, model.odd), (again.other, model.other)):
        assert torch.equal(found.nan_to_num(7.0), wanted.to(dtype).nan_to_num(7.0))
        assert 0 in found.stride()


def test_other_values_do_not_fit_an_expanded_tensor(tmp_path: Path) -> None:
    model, again = nn.Module(), nn.Module()
    model.odd = nn.Parameter(torch.randn(5, 7))
    again.odd = nn.Parameter(torch.randn(1, 7).expand(5, 7))
    headrace.save(tmp_path / "step-1", model)
    with pytest.raises(headrace.CheckpointError, match=r"is expanded in the model .* and its elements differ"):
        headrace.load(tmp_path / "step-1", again)
