"""Does every setting do something? Each is here with the test that shows it, and the plan's are shown here."""

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace import names
from headrace.cli.main import build_parser, main
from headrace.integrations import transformers as for_transformers
from headrace.optim.options import Given
from tests.cost.conftest import LLAMA_8B, QWEN3_30B_A3B

TESTS = Path(__file__).parent
OF_PLAN = "test_settings.py::test_a_setting_of_plan_changes_the_plan"
OF_RULES = "test_settings.py::test_a_setting_of_an_update_rule_changes_the_update"

# The test that shows what a setting does, in what is moved, held, written, computed, or planned.
SHOWN: dict[str, dict[str, str]] = {
    "offload": {
        "device": "units/test_bad_input.py::test_an_unknown_device",
        "device_memory": "units/test_bad_input.py::test_a_budget_may_be_a_share_of_the_weights",
        "host_memory": "units/test_bad_input.py::test_a_host_budget_below_the_weights",
        "disk": "weights/test_disk_safety.py::test_what_a_module_writes_to_its_weights_reaches_the_disk",
        "checkpoint": "weights/test_disk_tier.py::test_inference_reads_a_checkpoint_in_place",
        "blocks": "matrix/test_blocks.py::test_experts_as_blocks",
        "resident": "weights/test_lane_log.py::inference_with_a_resident_layer",
        "prefetch": "weights/test_lane_log.py::inference_loading_nothing_ahead",
        "param_dtype": "matrix/test_precision.py::test_param_dtype",
        "grad_dtype": "matrix/test_optimizers.py::test_accumulation_in_float32",
        "activations": "activations/test_with_weights.py::test_device_bytes_drop_by_the_bytes_on_the_host",
        "mesh": "distributed/test_mesh.py::test_one_copy_for_a_node",
        "onload": "distributed/test_gather.py::test_bytes",
        "packed": "packed/test_from_disk.py::test_three_quarters_of_the_bytes_are_read",
        "check_gradients": "weights/test_cut_off.py::test_it_is_off_with_one_word",
    },
    "budget": {
        "device_memory": "weights/test_shared_budget.py::test_models_in_turn_keep_one_budget",
        "host_memory": "weights/test_shared_budget.py::test_host_memory_is_what_others_left",
    },
    "offload_cache": {"tier": "integrations/test_kv_cache.py::test_on_disk"},
    "offload_activations": {
        "layers": "activations/test_bytes.py::test_layers_and_modules_choose",
        "modules": "activations/test_bytes.py::test_layers_and_modules_choose",
        "fraction": "activations/test_bytes.py::test_fraction_caps_what_leaves",
        "min_bytes": "activations/test_sizes.py::test_settings_hold_for_any_size",
        "tier": "activations/test_disk.py::test_disk_is_used_again",
        "disk": "activations/test_disk.py::test_disk_is_used_again",
        "device_memory": "activations/test_bytes.py::test_device_bytes_drop_by_the_bytes_on_the_host",
        "host_memory": "activations/test_orders.py::test_host_memory_is_kept_to",
        "most_in_flight": "activations/test_bytes.py::test_at_most_so_many_copies_are_in_flight",
        "all_leave": "activations/test_bytes.py::test_what_attention_saves_leaves",
    },
    "plan": dict.fromkeys(inspect.signature(headrace.plan).parameters.keys() - {"model"}, OF_PLAN),
    "probe": {
        "device": "ahead/test_probe.py::test_plans_count_with_pageable_memory_where_nothing_can_be_locked",
        "disk": "ahead/test_probe.py::test_a_directory_that_is_missing_is_an_error",
        "cache": "ahead/test_probe.py::test_a_probe_is_kept_and_planned_with",
    },
    "save": {
        "optimizer": "checkpoint/test_beside_training.py::test_a_step_changes_nothing_that_is_being_saved",
        "extra": "checkpoint/test_other_programs.py::test_what_is_returned_outlives_the_file",
        "files": "checkpoint/test_resuming.py::test_more_files_are_parts_of_the_checkpoint",
        "keep": "checkpoint/test_beside_training.py::test_only_the_newest_are_kept",
        "wait": "checkpoint/test_beside_training.py::test_training_does_not_wait_for_the_drive",
        "host_memory": "checkpoint/test_beside_training.py::test_optimizers_of_pytorch_wait_too",
    },
    "load": {"optimizer": "checkpoint/test_damage.py::test_a_file_that_is_not_whole_is_told_before_anything_changes"},
    "experts": {"argument": "weights/test_own_experts.py::test_numbers_of_no_expert_are_left_out"},
    "from_pretrained": {"trainable": "quantised/test_pretrained.py::test_adapters_train_on_a_quantised_directory"},
    "open_pretrained": {"disk": "units/test_odd_values.py::test_paths_of_models"},
    "micro_batches_together": {
        "together": "integrations/test_trainer.py::test_micro_batches_together_equal_the_trainers_loop"
    },
    "HeadraceCallback": {"save": "integrations/test_trainer.py::test_checkpoints_beside_the_trainers_own"},
    "forward_backward": {"together": "weights/test_forward_backward.py::test_some_go_together_and_then_the_next"},
    "sleep": {"host": "weights/test_sleep.py::test_between_forward_and_backward"},
    "limit_copies": {"window_seconds": "weights/test_copy_control.py::test_no_window_carries_more_than_the_limit"},
    "stats": {"wait_for_updates": "optim/test_overlap.py::test_stats_that_need_not_wait_for_updates"},
    "options": {
        "master_dtype": "optim/test_conventions.py::test_bad_settings",
        "master_form": "optim/test_rounding.py::test_state_has_the_bytes_of_the_moments_alone",
        "state_dtype": "optim/test_eight_bit.py::test_bytes_of_each_parameter",
        "tier": "optim/test_disk.py::test_state_is_not_in_host_memory",
        "disk": "optim/test_disk.py::test_state_is_not_in_host_memory",
        "update": "optim/test_on_device.py::test_the_memory_for_updates_is_part_of_the_budget",
        "device_fraction": "optim/test_shares.py::test_the_share_is_what_was_asked_for",
        "pin": "optim/test_shares.py::test_ways_to_travel",
        "overlap_d2h_h2d": "optim/test_shares.py::test_ways_to_travel",
        "overlap": "optim/test_overlap.py::test_stats_that_need_not_wait_for_updates",
        "max_grad_norm": "optim/test_conventions.py::test_clipping_equals_clip_grad_norm",
        "mesh": "optim/test_bytes.py::test_sharded_models",
        "zero_stage": "distributed/test_dealt.py::test_two_ranks",
    },
    **{
        rule: dict.fromkeys(
            (one.name for one in inspect.signature(getattr(headrace.optim, rule)).parameters.values()), OF_RULES
        )
        for rule in headrace.optim.__all__
    },
    "headrace plan": {
        **dict.fromkeys(("hardware", "training", "overlap", "state_dtype", "batch_size", "sequence_length"), OF_PLAN),
        "master_form": OF_PLAN,
        **dict.fromkeys(("micro_batches", "devices", "nodes", "zero_stage", "optimizer_fraction"), OF_PLAN),
        **dict.fromkeys(("expert_hit_rate", "adapter_rank", "weight_bits", "method", "no_disk"), OF_PLAN),
        **dict.fromkeys(("device_memory", "host_memory", "disk", "json"), OF_PLAN),
        "set": "cost/test_asked_plans.py::test_own_rates",
    },
    "headrace generate": {
        "model": "integrations/test_transformers.py::test_the_command_line_writes_text",
        "prompt": "integrations/test_transformers.py::test_several_prompts_are_written_on_together",
        "chat": "integrations/test_transformers.py::test_a_chat_has_the_models_template",
        **dict.fromkeys(
            ("json", "max_new_tokens", "sample", "temperature", "seed"),
            "integrations/test_transformers.py::test_the_command_line_writes_text",
        ),
        **dict.fromkeys(
            ("device", "device_memory", "host_memory", "disk"),
            "integrations/test_transformers.py::test_the_command_line_writes_text",
        ),
        "cache_tier": "integrations/test_transformers.py::test_keys_and_values_rest_in_a_tier",
    },
    "headrace probe": {
        "device": "ahead/test_probe.py::test_a_probe_is_kept_and_planned_with",
        "disk": "ahead/test_probe.py::test_a_directory_that_is_missing_is_an_error",
        "no_cache": "ahead/test_bad_input.py::test_a_measurement_that_cannot_be_kept_is_not_begun",
        "json": "ahead/test_probe.py::test_a_probe_is_kept_and_planned_with",
    },
    "headrace report": {
        **dict.fromkeys(("html", "png", "trace"), "report/test_report.py::test_a_saved_run_is_shown_again"),
        "with_profiler": "report/test_report.py::test_a_run_on_the_cpu_and_the_profiler_share_a_trace",
    },
    "headrace doctor": {
        "device": "ahead/test_bad_input.py::test_devices_and_directories",
        "disk": "ahead/test_bad_input.py::test_devices_and_directories",
        "checkpoint": "checkpoint/test_damage.py::test_the_doctor_reads_all_of_it",
        "symptoms": "ahead/test_doctor.py::test_symptoms_by_words",
    },
}


def with_default(function: Any) -> set[str]:
    """The parameters that need not be given."""
    return {one.name for one in inspect.signature(function).parameters.values() if one.default is not one.empty}


def public_settings() -> Iterator[tuple[str, set[str]]]:
    """Functions, classes and commands, and what can be set on each. `headrace train`: tests/train/test_flags.py."""
    functions = [getattr(headrace, name) for name in names.__all__ if inspect.isfunction(getattr(headrace, name))]
    functions += [getattr(for_transformers, name) for name in for_transformers.__all__]
    functions += [
        one for name, one in inspect.getmembers(headrace.Offloaded) if inspect.isfunction(one) and name[0] != "_"
    ]
    functions += [getattr(headrace.optim, name) for name in headrace.optim.__all__]
    yield "options", set(Given.__annotations__)
    for function in functions:
        if settings := with_default(function):
            yield function.__name__, settings
    for command, parser in build_parser().commands.items():
        if command != "train":
            yield f"headrace {command}", {one.dest for one in parser._actions if one.option_strings} - {"help"}


def test_every_setting_has_a_test_that_shows_it() -> None:
    known: dict[str, set[str]] = {}
    for name, settings in public_settings():
        missing = settings - SHOWN.get(name, {}).keys()
        assert not missing, f"{name}: say here which test shows what {sorted(missing)} does, or take it away"
    for tests in SHOWN.values():
        for test in tests.values():
            file, _, function = test.partition("::")
            if file not in known:
                tree = ast.parse((TESTS / file).read_text())
                known[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in known[file], f"there is no {test}"


# Another value for each setting of plan, what it needs beside it, and what of the plan differs then.
OF_PLANS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "hardware": ("4090", {}, "hardware"),
    "batch_size": (4, {}, "work"),
    "sequence_length": (512, {}, "busy_seconds"),
    "micro_batches": (4, {}, "tokens_per_second"),
    "device_memory": ("30GiB", {}, "method"),
    "host_memory": ("20GiB", {}, "capacity_bytes"),
    "disk": ("1TB", {}, "capacity_bytes"),
    "no_disk": (False, {}, "options"),
    "devices": (2, {}, "spread"),
    "nodes": (2, {"hardware": headrace.Hardware.named("8xh100").changed(network="12GB/s")}, "spread"),
    "training": ("inference", {}, "tiers"),
    "adapter_rank": (64, {"training": "adapter"}, "tiers"),
    "weight_bits": (4.5, {"training": "adapter"}, "tiers"),
    "overlap": ("forward", {}, "step_seconds"),
    "state_dtype": ("8bit", {}, "tiers"),
    "master_form": ("none", {}, "tiers"),
    "zero_stage": (2, {"devices": 2, "hardware": "8xh100"}, "tiers"),
    "method": ("stream-weights", {}, "method"),
    "optimizer_fraction": (0.5, {"device_memory": "200GB"}, "method"),
    "expert_hit_rate": (0.5, {"training": "inference", "device_memory": "30GiB"}, "decoding"),
}


@pytest.mark.parametrize("name", OF_PLANS)
def test_a_setting_of_plan_changes_the_plan(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the command's flag of that name is the same setting."""
    value, beside, differs = OF_PLANS[name]
    (tmp_path / "model.json").write_text(json.dumps(QWEN3_30B_A3B if name == "expert_hit_rate" else LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    before = {"hardware": "h100", **beside}
    settings = {**before, "disk" if name == "no_disk" else name: value}
    flags = []
    for each, given in settings.items():
        if isinstance(given, headrace.Hardware):
            flags += ["--hardware=8xh100", "--set=network=12GB/s"]
        else:
            flags.append("--no-disk" if given is False else f"--{each.replace('_', '-')}={given}")
    planned = headrace.plan("model.json", **settings).to_dict()
    assert planned[differs] != headrace.plan("model.json", **before).to_dict()[differs]
    assert main(["plan", "model.json", "--json", *flags]) in (0, 1)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(planned))


# Another value for each setting of an update rule; what must be set beside it to have an effect.
OTHERS: dict[str, Any] = {
    "lr": 0.5,
    "weight_decay": 0.5,
    "momentum": 0.5,
    "dampening": 0.5,
    "nesterov": True,
    "maximize": True,
    "betas": (0.5, 0.6),
    "eps": 0.5,
    "amsgrad": True,
    "beta2_decay": -0.1,
    "d": 100.0,
    "ns_steps": 2,
    "ns_coefficients": (2.0, -1.5, 0.5),
    "adjust_lr_fn": "match_rms_adamw",
    "adamw_lr": 0.5,
    "adamw_betas": (0.5, 0.6),
    "adamw_eps": 0.5,
    "adamw_weight_decay": 0.5,
}
BESIDE = {"SGD": {"momentum": 0.9}}
RULES = [
    (rule, name) for rule in headrace.optim.__all__ for name in sorted(with_default(getattr(headrace.optim, rule)))
]


def updated(rule: str, settings: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = getattr(headrace.optim, rule)(net.named_parameters(), **settings)
    for size in (0.5, 8.0, -2.0, 0.01):
        for parameter in net.parameters():
            parameter.grad = size * (1 + torch.arange(parameter.numel()).view_as(parameter) / 8)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.parametrize(("rule", "name"), RULES)
def test_a_setting_of_an_update_rule_changes_the_update(rule: str, name: str) -> None:
    beside = BESIDE.get(rule, {})
    other = {"Muon": {"nesterov": False, "eps": 1e3}, "Adafactor": {"eps": (0.5, 0.5)}}.get(rule, {}).get(
        name, OTHERS[name]
    )
    assert not torch.equal(updated(rule, beside), updated(rule, {**beside, name: other}))
