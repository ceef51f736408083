"""What do flags of other systems become, and is each one told of?"""

from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.cli.other_flags import _KNOWN, in_our_words
from headrace.errors import TrainInputError

BECOME = {
    # DiffSynth-Studio's runner
    "--enable_model_cpu_offload": "",
    "--enable_model_cpu_offload --enable_optimizer_cpu_offload": "",
    "--cpu_offload_split_threshold 200": "--blocks=200MB",
    "--task sft:data_process": "--data-only",
    "--task sft:train": "",
    "--task sft": "",
    "--use_gradient_checkpointing": "--gradient-checkpointing",
    "--use_gradient_checkpointing_offload": "--gradient-checkpointing --offload-activations",
    "--num_epochs 5 --output_path out": "--epochs=5 --output=out",
    "--lora_target_modules to_q,to_k --lora_rank 32": "--lora-targets to_q to_k --lora-rank 32",
    "--lora_base_model dit --lora_rank 8": "--lora-rank 8 --lora-alpha=8",
    "--lora_base_model dit --lora_rank=8": "--lora-rank=8 --lora-alpha=8",
    "--lora_base_model dit --lora_rank 8 --lora_alpha 4": "--lora-rank 8 --lora-alpha 4",
    "--lora_base_model dit": "--lora-rank=32 --lora-alpha=32",
    "--num_epochs 5 --dataset_repeat 50": "--epochs=250",
    "--dataset_repeat 3": "--epochs=3",
    "--remove_prefix_in_ckpt pipe.dit. --trainable_models dit": "",
    "--gradient_accumulation_steps 2 --save_steps 10": "--accumulate=2 --save-every=10",
    "--dataset_num_workers 8 --find_unused_parameters": "",
    # Megatron
    "--optimizer-cpu-offload": "--device-fraction=0",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.25": "--device-fraction=0.75",
    "--optimizer-offload-fraction 0.25": "",
    "optimizer.optimizer_cpu_offload=True optimizer.optimizer_offload_fraction=0.5": "--device-fraction=0.5",
    "optimizer.optimizer_cpu_offload=False": "",
    "--overlap-cpu-optimizer-d2h-h2d": "",
    "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d": "--device-fraction=0 --overlap-d2h-h2d",
    "--optimizer-cpu-offload optimizer.overlap_cpu_optimizer_d2h_h2d=False": (
        "--device-fraction=0 --no-overlap-d2h-h2d"
    ),
    "--cpu-offloading-num-layers 16": "--offload-activations layers=16 all_leave=True",
    "model.cpu_offloading=True model.cpu_offloading_num_layers=8 model.cpu_offloading_activations=False"
    " model.cpu_offloading_weights=True": "",
    "model.cpu_offloading=False model.cpu_offloading_num_layers=8": "",
    "cfg.model.cpu_offloading=True cfg.model.cpu_offloading_num_layers=8 cfg.model.cpu_offloading_weights=True"
    " --optimizer-cpu-offload": "--offload-activations layers=8 all_leave=True",
    "--fine-grained-activation-offloading --offload-modules core_attn,mlp_norm": (
        "--offload-activations modules=*core_attn*,*mlp_norm*"
    ),
    "--offload-modules core_attn": "",
    "--cpu-offloading-double-buffering --cpu-offloading-retain-pinned-cpu-buffers": "",
    "--recompute-granularity full": "--gradient-checkpointing",
    "model.recompute_granularity=None model.pipeline_model_parallel_size=1 model.cuda_graph_impl=none": "",
    "--use-torch-optimizer-for-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer": "",
    "--pin-cpu-grads --pin-cpu-params": "",
    "--cpu_offload_split_threshold .05": "--blocks=0.05MB",
    "--cpu_offload_split_threshold 0.05": "--blocks=0.05MB",
    "--micro-batch-size 2 --seq-length 8 --train-iters 5 --lr 1e-3 --clip-grad 1 --save-interval 4": (
        "--batch-size=2 --sequence-length=8 --steps=5 --learning-rate=1e-3 --max-grad-norm=1 --save-every=4"
    ),
}

REFUSED = {
    "--model_id_with_origin_paths x:y": "take OffloadTrainingManager from headrace.compat",
    "--dataset_base_path data": "name files and directories of texts with --text",
    "--dataset_metadata_path data": "name files and directories of texts with --text",
    "--max_pixels 100": "headrace train is for language models",
    "--model_paths a.safetensors": "takes one directory, with --model",
    "--lora_checkpoint a.safetensors": "merge it into the model first",
    "--dataset_repeat often": "give whole numbers",
    "--dataset_repeat 2 --num_epochs many": "give whole numbers",
    "--cpu_offload_split_threshold many": "give a number of megabytes above 0",
    "--cpu_offload_split_threshold 0.0": "give a number of megabytes above 0",
    "--optimizer-cpu-offload --optimizer-offload-fraction 2": "the fraction is to be from 0 to 1",
    "--optimizer-cpu-offload --optimizer-offload-fraction half": "the fraction is to be from 0 to 1",
    "--cpu-offloading-num-layers few": "the number of layers is to be 0 or more",
    "model.pipeline_model_parallel_size=2": "headrace train has 1 of these",
    "--cuda-graph-impl local": "headrace train has none of these",
    "--cpu-offloading-num-layers 2 --cpu-offloading-weights --optimizer-cpu-offload --optimizer-offload-fraction 0.5": (
        "all of the optimizer's state is on the host; give the fraction 1"
    ),
    "--cpu-offloading-num-layers 2 --fine-grained-activation-offloading": "says for a second time what leaves",
}


@pytest.mark.parametrize("given", BECOME)
def test_each_flag_becomes_one_of_ours_or_nothing_with_a_note(given: str):
    flags, notes = in_our_words(given.split())
    assert sorted(flags) == sorted(BECOME[given].split())
    for word in given.split():
        if word.startswith("--") and not word.startswith(("--lora_rank", "--lora_alpha")):
            assert any(word in note for note in notes), word


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_done_is_refused(given: str):
    with pytest.raises(TrainInputError) as raised:
        in_our_words(given.split())
    assert REFUSED[given] in str(raised.value)


def test_every_flag_of_others_is_in_a_test():
    words = " ".join([*BECOME, *REFUSED]).replace("-", "_")
    assert [name for name in _KNOWN if name not in words] == []


def test_what_holds_in_any_case_is_not_called_off():
    _, notes = in_our_words(["--pin_cpu_grads", "False", "--enable_model_cpu_offload=false", "--cpu_offloading", "no"])
    assert notes[:2] == [
        "--pin_cpu_grads False: nothing to do: gradients on the host are page-locked anyway",
        "--enable_model_cpu_offload=false: nothing to do: weights come to the device block by block anyway, trained or"
        " not, and adapters stay",
    ]
    assert "--cpu_offloading no: off, as without it" in notes


def test_our_own_flags_may_be_written_with_underscores_and_keep_their_values():
    given = ["--learning_rate", "0.1", "--no_packing", "--text", "a=b", "--steps=3", "--unknown_flag", "1"]
    expected = ["--learning-rate", "0.1", "--no-packing", "--text", "a=b", "--steps=3", "--unknown_flag", "1"]
    assert in_our_words(given) == (expected, [])


def test_a_run_tells_what_became_of_them(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*arguments, "--cpu_offload_split_threshold", "1", "--enable_optimizer_cpu_offload"]) == 0
    staying = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
    assert main([*arguments, *staying, "--output", str(tmp_path / "staying")]) == 0
    errors = capsys.readouterr().err
    assert "--cpu_offload_split_threshold 1: became --blocks=1MB\n" in errors
    assert "--optimizer-cpu-offload --optimizer-offload-fraction 0.5: became --device-fraction=0.5: weights" in errors
    assert "--enable_optimizer_cpu_offload: nothing to do: gradients, state and updates are on the host" in errors
