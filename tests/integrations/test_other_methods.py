"""Are the methods of public models exact that read weights themselves: codecs, autoencoders, encoders of images?

`encode`, `decode`, `get_image_features`, `generate`: see tests/matrix/test_methods.py for what holds of any model.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from diffusers.pipelines.stable_diffusion.stable_unclip_image_normalizer import StableUnCLIPImageNormalizer
from torch import Tensor, nn
from transformers.models.musicgen import MusicgenDecoderConfig

from headrace.runtime.tensors import tensors_in
from tests.support.compare import Outcome, assert_on_host, assert_same, on_cpu
from tests.support.loops import adamw, trained_parameters
from tests.support.models import seeded
from tests.support.offloaded import budget_bytes, offload

pytestmark = [
    pytest.mark.core(name=["encodec", "mimi", "dac", "layoutlmv3", "bert", "normalizer"]),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning"),
]

ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
MIMI = {
    "hidden_size": 32,
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 16,
    "intermediate_size": 64,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
    "num_semantic_quantizers": 1,
    "upsample_groups": 32,
    "sampling_rate": 24000,
    **ATTENTION,
}
ENCODEC = {
    "target_bandwidths": [24.0],
    "sampling_rate": 16000,
    "hidden_size": 16,
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "codebook_size": 32,
    "codebook_dim": 16,
    "num_lstm_layers": 1,
}
DAC = {
    "encoder_hidden_size": 8,
    "downsampling_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "n_codebooks": 2,
    "codebook_size": 32,
    "codebook_dim": 4,
}
LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def sound(length: int, channels: int = 1) -> Tensor:
    return torch.randn(1, channels, length, generator=torch.Generator().manual_seed(0))


def codes(*shape: int, most: int = 30) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def encodec() -> Any:
    return transformers.EncodecModel(transformers.EncodecConfig(**ENCODEC))


def mimi() -> Any:
    return transformers.MimiModel(transformers.MimiConfig(**MIMI))


def dac() -> Any:
    return transformers.DacModel(transformers.DacConfig(**DAC))


def xcodec() -> Any:
    semantic = transformers.HubertConfig(
        **LAYER, conv_dim=[16] * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
    )
    acoustic = transformers.DacConfig(
        encoder_hidden_size=8, downsampling_ratios=[8, 5, 4, 2], decoder_hidden_size=32, hidden_size=32
    )
    config = transformers.XcodecConfig(
        target_bandwidths=[0.5, 1.0], codebook_size=1024, semantic_model_config=semantic, acoustic_model_config=acoustic
    )
    return transformers.XcodecModel(config)


def wav2vec2_bert() -> Any:
    return transformers.Wav2Vec2BertConfig(
        **LAYER, feature_projection_input_dim=160, conv_depthwise_kernel_size=3, position_embeddings_type="relative_key"
    )


def finite_codec(kind: str) -> Any:
    config = getattr(transformers, f"{kind}Config")(
        **LAYER,
        num_key_value_heads=4,
        head_dim=8,
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2, 4, 4, 5],
        semantic_model_config=wav2vec2_bert(),
        quantization_dim=64,
    )
    return getattr(transformers, f"{kind}Model")(config)


def musicgen() -> Any:
    decoder = MusicgenDecoderConfig(
        vocab_size=32,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_codebooks=2,
        max_position_embeddings=64,
        pad_token_id=31,
        bos_token_id=31,
    )
    text = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    config = transformers.MusicgenConfig(
        text_encoder=text, audio_encoder=transformers.EncodecConfig(**ENCODEC), decoder=decoder
    )
    model = transformers.MusicgenForConditionalGeneration(config)
    settings = {"pad_token_id": 31, "bos_token_id": 31, "decoder_start_token_id": 31, "guidance_scale": None}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def bark() -> Any:
    part = {"input_vocab_size": 64, "output_vocab_size": 64, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    config = transformers.BarkConfig(
        semantic_config=part,
        coarse_acoustics_config=part,
        fine_acoustics_config={**part, "n_codes_total": 2},
        codec_config={"model_type": "encodec", **ENCODEC},
    )
    return transformers.BarkModel(config)


def moshi() -> Any:
    config = transformers.MoshiConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_codebooks=4,
        audio_vocab_size=32,
        max_position_embeddings=64,
        audio_encoder_config={"model_type": "mimi", **MIMI},
        depth_decoder_config={
            "hidden_size": 32,
            "input_size": 32,
            "ffn_dim": 64,
            "num_codebooks": 4,
            "audio_vocab_size": 32,
            "vocab_size": 64,
            "max_position_embeddings": 5,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        **ATTENTION,
    )
    model = transformers.MoshiForConditionalGeneration(config)
    model.generation_config.pad_token_id = 0
    return model


def csm() -> Any:
    config = transformers.CsmConfig(
        num_codebooks=4,
        vocab_size=40,
        text_vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        pad_token_id=0,
        bos_token_id=1,
        codebook_pad_token_id=39,
        codebook_eos_token_id=38,
        audio_token_id=62,
        audio_eos_token_id=63,
        depth_decoder_config={
            "num_codebooks": 4,
            "backbone_hidden_size": 32,
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 64,
            "max_position_embeddings": 5,
            **ATTENTION,
        },
        codec_config={"model_type": "mimi", **MIMI, "codebook_size": 64},
        **ATTENTION,
    )
    return transformers.CsmForConditionalGeneration(config)


def kyutai() -> Any:
    config = transformers.KyutaiSpeechToTextConfig(
        codebook_vocab_size=33,
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_codebooks=4,
        audio_bos_token_id=32,
        audio_pad_token_id=196,
        bos_token_id=1,
        pad_token_id=3,
        codec_config={"model_type": "mimi", **MIMI},
        **ATTENTION,
    )
    return transformers.KyutaiSpeechToTextForConditionalGeneration(config)


def deepseek() -> Any:
    vision = {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, **LAYER}
    high = {
        "model_type": "sam_vision_model",
        "image_size": 64,
        "patch_size": 8,
        "output_channels": 16,
        "mlp_dim": 64,
        "global_attn_indexes": [1],
        "window_size": 2,
        **{name: LAYER[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    }
    text = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 4, **LAYER}
    config = transformers.DeepseekVLHybridConfig(
        vision_config=vision, high_res_vision_config=high, text_config=text, image_token_id=60
    )
    return transformers.DeepseekVLHybridModel(config)


def layoutlmv3() -> Any:
    config = transformers.LayoutLMv3Config(
        vocab_size=64, input_size=16, patch_size=8, coordinate_size=5, shape_size=6, **LAYER
    )
    return transformers.LayoutLMv3Model(config)


def sam2() -> Any:
    backbone = {
        "hidden_size": 16,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "window_size_per_stage": [4, 2, 4, 2],
        "global_attention_blocks": [3],
        "window_positional_embedding_background_size": [4, 4],
    }
    vision = transformers.Sam2VisionConfig(
        backbone_config=transformers.Sam2HieraDetConfig(**backbone),
        backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=32,
    )
    config = transformers.Sam2Config(
        vision_config=vision,
        prompt_encoder_config={"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 64, "iou_head_hidden_dim": 32, "num_attention_heads": 4},
    )
    return transformers.Sam2Model(config)


def consistency() -> Any:
    return diffusers.ConsistencyDecoderVAE(
        encoder_block_out_channels=(16, 16),
        encoder_down_block_types=("DownEncoderBlock2D",) * 2,
        encoder_norm_num_groups=4,
        decoder_block_out_channels=(32, 32),
        decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
        decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
        decoder_layers_per_block=1,
    )


def same() -> Any:
    return diffusers.AutoencoderSAME(
        patch_size=4,
        encoder_channels=8,
        encoder_c_mults=(2,),
        encoder_strides=(2,),
        encoder_transformer_depths=(2,),
        latent_dim=8,
        dim_heads=8,
    )


def mmaudio() -> Any:
    return diffusers.MMAudioVAE(
        mel_bins=16, latent_channels=4, hidden_channels=16, channel_multipliers=(1, 2), n_fft=64, hop_length=16
    )


def normalizer() -> Any:
    model = StableUnCLIPImageNormalizer(16)
    nn.init.uniform_(model.mean)
    nn.init.uniform_(model.std, 1, 2)
    return model


def safety_checker() -> Any:
    vision = {"image_size": 16, "patch_size": 8, **LAYER}
    return StableDiffusionSafetyChecker(transformers.CLIPConfig(vision_config=vision, projection_dim=16))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **LAYER))


Use = Callable[[Any, Callable[[Tensor], Tensor]], Any]  # of a model, and of how its inputs come to the device

MODELS: dict[str, tuple[Callable[[], Any], dict[str, Use]]] = {
    "encodec": (
        encodec,
        {
            "encode": lambda model, to: model.encode(to(sound(800))).audio_codes,
            "decode": lambda model, to: model.decode(to(codes(1, 1, 2, 20)), [None]),
            "quantizer.decode": lambda model, to: model.quantizer.decode(to(codes(2, 1, 20))),
        },
    ),
    "mimi": (
        mimi,
        {
            "encode": lambda model, to: model.encode(to(sound(640))).audio_codes,
            "decode": lambda model, to: model.decode(to(codes(1, 4, 6))).audio_values,
        },
    ),
    "dac": (
        dac,
        {
            "encode": lambda model, to: model.encode(to(sound(64))),
            "decode": lambda model, to: model.decode(audio_codes=to(codes(1, 2, 8))),
            "quantizer.from_latents": lambda model, to: model.quantizer.from_latents(to(numbers(1, 8, 8))),
            "quantizer.from_codes": lambda model, to: model.quantizer.from_codes(to(codes(1, 2, 8))),
        },
    ),
    "xcodec": (
        xcodec,
        {
            "encode": lambda model, to: model.encode(to(sound(3200))).audio_codes,
            "decode": lambda model, to: model.decode(to(codes(1, 2, 10))),
        },
    ),
    "xcodec2": (
        lambda: finite_codec("Xcodec2"),
        {
            "decode": lambda model, to: model.decode(to(codes(1, 1, 6))),
            "quantizer.from_codes": lambda model, to: model.quantizer.from_codes(to(codes(1, 6, 1))),
        },
    ),
    "neucodec": (lambda: finite_codec("NeuCodec"), {"decode": lambda model, to: model.decode(to(codes(1, 1, 6)))}),
    "musicgen": (
        musicgen,
        {
            "generate": lambda model, to: model.generate(
                input_ids=to(codes(1, 5)), attention_mask=to(torch.ones(1, 5).long()), max_new_tokens=6, do_sample=False
            )
        },
    ),
    "bark": (bark, {"codec_decode": lambda model, to: model.codec_decode(to(codes(1, 2, 12)))}),
    "moshi": (
        moshi,
        {
            "audio_encoder.encode": lambda model, to: model.audio_encoder.encode(to(sound(640))).audio_codes,
            "generate": lambda model, to: model.generate(
                input_ids=to(codes(1, 3)),
                user_audio_codes=to(codes(1, 4, 3)),
                moshi_audio_codes=to(codes(1, 4, 3)),
                max_new_tokens=3,
                do_sample=False,
            ),
        },
    ),
    "csm": (
        csm,
        {
            "generate": lambda model, to: model.generate(
                input_ids=to(codes(1, 5)),
                attention_mask=to(torch.ones(1, 5).long()),
                max_new_tokens=4,
                do_sample=False,
                depth_decoder_do_sample=False,
                output_audio=True,
            )
        },
    ),
    "kyutai": (
        kyutai,
        {
            "generate": lambda model, to: model.generate(
                input_values=to(sound(24000 // 4)), max_new_tokens=4, do_sample=False
            )
        },
    ),
    "deepseek": (
        deepseek,
        {
            "get_image_features": lambda model, to: model.get_image_features(
                to(numbers(1, 3, 32, 32)), to(numbers(1, 3, 64, 64))
            ),
            "get_high_res_image_features": lambda model, to: model.get_high_res_image_features(
                to(numbers(1, 3, 64, 64))
            ),
        },
    ),
    "layoutlmv3": (layoutlmv3, {"forward_image": lambda model, to: model.forward_image(to(numbers(1, 3, 16, 16)))}),
    "sam2": (
        sam2,
        {
            "get_image_embeddings": lambda model, to: model.get_image_embeddings(to(numbers(1, 3, 64, 64))),
            "get_image_features": lambda model, to: model.get_image_features(to(numbers(1, 3, 64, 64))),
        },
    ),
    "consistency": (
        consistency,
        {
            "encode": lambda model, to: model.encode(to(numbers(1, 3, 16, 16))).latent_dist.mean,
            "decode": lambda model, to: model.decode(
                to(numbers(1, 4, 2, 2)), generator=torch.Generator().manual_seed(0), num_inference_steps=2
            ),
        },
    ),
    "same": (
        same,
        {
            "encode": lambda model, to: model.encode(to(sound(64, 2))),
            "decode": lambda model, to: model.decode(to(numbers(1, 8, 8))),
        },
    ),
    "mmaudio": (
        mmaudio,
        {
            "encode": lambda model, to: model.encode(to(sound(512)[0])).latent_dist.mean,
            "decode": lambda model, to: model.decode(to(numbers(1, 4, 8))),
        },
    ),
    "normalizer": (
        normalizer,
        {
            "scale": lambda model, to: model.scale(to(numbers(2, 16))),
            "unscale": lambda model, to: model.unscale(to(numbers(2, 16))),
        },
    ),
    "safety_checker": (
        safety_checker,
        {
            "forward_onnx": lambda model, to: model.forward_onnx(to(numbers(2, 3, 16, 16)), to(numbers(2, 3, 16, 16))),
        },
    ),
    "bert": (
        bert,
        {"cls": lambda model, to: model.cls(model.bert.embeddings(to(codes(2, 5))))},
    ),
}


def tensors_of(output: Any) -> list[Tensor]:
    return [on_cpu(tensor) for tensor in tensors_in(output)]


def outputs_of(model: Any, uses: dict[str, Use], device: torch.device) -> list[Tensor]:
    """Each use twice, the last time in the other order."""
    found: list[Tensor] = []
    for use in (*uses.values(), *reversed(uses.values())):
        torch.manual_seed(3)
        with torch.no_grad():
            found += tensors_of(use(model, lambda tensor: tensor.to(device)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str, compute_device: torch.device) -> None:
    make, uses = MODELS[name]
    expected = outputs_of(seeded(make).eval().to(compute_device), uses, compute_device)
    on_host = outputs_of(seeded(make).eval(), uses, torch.device("cpu"))
    model = seeded(make).eval()
    with offload(model, compute_device, 1.0 if name == "normalizer" else 0.7) as handle:  # that is one block
        assert_same(outputs_of(model, uses, compute_device), expected)
        assert_on_host(model)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
        assert name == "normalizer" or stats.device_budget_bytes < budget_bytes(model, 1.0)
    assert_same(outputs_of(model, uses, torch.device("cpu")), on_host)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("dac", "decode"),
        ("layoutlmv3", "forward_image"),
        ("bert", "cls"),
        ("deepseek", "get_image_features"),
        ("sam2", "get_image_features"),
        ("normalizer", "scale"),
    ],
)
def test_training(name: str, use: str, compute_device: torch.device) -> None:
    make, uses = MODELS[name]

    def script(model: Any) -> Outcome:
        outcome = Outcome()
        optimizer = adamw(trained_parameters(model))
        for _ in range(3):
            output = uses[use](model, lambda tensor: tensor.to(compute_device))
            loss = sum(one.square().mean() for one in tensors_in(output) if one.requires_grad)
            loss.backward()
            outcome.outputs.append(on_cpu(loss))
            outcome.read_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return outcome.read(model)

    expected = script(seeded(make).eval().to(compute_device))
    assert any(gradient is not None for gradient in expected.gradients[-1].values())
    model = seeded(make).eval()
    with offload(model, compute_device, 1.0 if name == "normalizer" else 0.7) as handle:
        assert_same(script(model), expected)
        assert 0 < handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
