"""Which calls do what a plan says? As lines of Python to paste."""

from headrace.planning.cost.forecast import Run
from headrace.planning.cost.tiers import CACHE, taken_by_cache
from headrace.planning.cost.work import Activations, Case, Overlap, Place


def calls_of(run: Run) -> list[str]:
    """The calls of the run, in their order; none if everything stays on the device."""
    case, method = run.case, run.method
    calls = []
    if case.trains and method.activations is Activations.RECOMPUTED:
        calls.append("model.gradient_checkpointing_enable()")
    offloads = case.trains and method.activations in (Activations.OFFLOADED, Activations.SPILLED)
    if method.streamed:
        layers = sum(held.nbytes for held in run.tiers.held if (held.place, held.purpose) == (Place.DEVICE, CACHE))
        room = max(run.tiers.least_bytes, run.tiers.streaming_bytes - taken_by_cache(case, run.tiers))
        settings = [f'device_memory="{_size_text(room + layers)}"']
        settings += ['disk="/a/local/drive/weights"'] if method.uses_disk else []
        settings += [f"activations={_activations(method.activations)}"] if offloads else []
        settings += ["mesh=mesh"] if case.spread.data > 1 else []
        settings += ['onload="gather"'] if run.sharing is not None and run.sharing.gathered else []
        calls.append(f"handle = headrace.offload(model, {', '.join(settings)})")
        if method.cache is not Place.DEVICE:
            tier = ', tier="disk"' if method.cache is Place.DISK else ""
            calls.append(f"cache = offload_cache(DynamicCache(config=model.config), handle{tier})")
    elif offloads:
        calls.append("headrace.offload_activations(model)")
    if case.trains and method.state is not Place.DEVICE:
        calls.append(_optimizer(case))
    if method.together > 1:
        calls.append(f"handle.forward_backward(micro_batches, loss_function, together={method.together})")
    return calls


def _optimizer(case: Case) -> str:
    """The call that makes the optimizer; moments are those of Adam."""
    method, work = case.method, case.work
    settings = ["model.parameters()"]
    by_device = method.update is Place.DEVICE
    settings += ['update="device"'] if by_device else []
    settings += [] if method.streamed or by_device else [f"device_fraction={method.device_share:.3g}"]
    settings += ['tier="disk"', 'disk="/a/local/drive/state"'] if method.state is Place.DISK else []
    settings += [f'overlap="{method.overlap.value}"'] if method.overlap is not Overlap.NONE else []
    if work.state_bytes < 8:
        settings.append("state_dtype=" + ("torch.bfloat16" if work.state_bytes == 4 else '"8bit"'))
    settings += [f'master_form="{work.master_form}"'] if work.master_form != "split" else []
    settings += ["mesh=mesh"] if case.spread.data > 1 else []
    settings += [f"zero_stage={case.spread.zero_stage}"] if case.spread.zero_stage else []
    return f"optimizer = headrace.optim.AdamW({', '.join(settings)})"


def _activations(kept: Activations) -> str:
    return '{"tier": "disk"}' if kept is Activations.SPILLED else "True"


def _size_text(nbytes: int) -> str:
    """In GB or MB, rounded down: a budget that the plan's bytes allow."""
    unit, name = (10**9, "GB") if nbytes >= 10**9 else (10**6, "MB")
    return f"{nbytes * 100 // unit / 100:g}{name}"
