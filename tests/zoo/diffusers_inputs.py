"""What do single model classes of diffusers take, where it does not follow from names?"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.zoo.diffusers_configs import WORDS

BATCH = 2


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


SIZES = torch.tensor([[64.0, 64.0]] * BATCH)
SIZED = {"original_size": SIZES, "target_size": SIZES, "crop_coords": SIZES}
HUNYUAN_DIT = {
    "text_embedding_mask": ones(BATCH, WORDS),
    "encoder_hidden_states_t5": torch.ones(BATCH, WORDS, 32),
    "text_embedding_mask_t5": ones(BATCH, WORDS),
    "image_meta_size": torch.full((BATCH, 6), 64.0),
    "style": torch.zeros(BATCH, dtype=torch.long),
    "image_rotary_emb": (torch.ones(16, 16), torch.zeros(16, 16)),
}

INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "JoyImageEditPlusTransformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 16, 16, 1, 2, 2),
        "encoder_hidden_states_mask": ones(BATCH, WORDS),
        "shape_list": [[(1, 4, 4)]] * BATCH,
    },
    "SanaWMLTX2RefinerTransformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 16, 128),
        "video_rotary_emb": (ones(BATCH, 16, 64), torch.zeros(BATCH, 16, 64)),
    },
    "UNetMotionModel": lambda config: {"encoder_hidden_states": noise(BATCH * 3, WORDS, 32)},
    "HiDreamImageTransformer2DModel": lambda config: {
        "hidden_states": noise(BATCH, 4, 8, 8),
        "timesteps": torch.tensor([0.5, 0.1]),
        "encoder_hidden_states_t5": noise(BATCH, WORDS, 32),
        "encoder_hidden_states_llama3": noise(6, BATCH, WORDS, 32),
        "pooled_embeds": noise(BATCH, 32),
    },
    "Kandinsky6Transformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 3, 8, 8, 33),
        "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
    },
    "AceStepAudioTokenDetokenizer": lambda config: {"hidden_states": noise(BATCH, 4, 64)},
    "AceStepAudioTokenizer": lambda config: {"hidden_states": noise(BATCH, 4, 5, 64)},
    "AceStepTransformer1DModel": lambda config: {
        "hidden_states": noise(BATCH, 16, 64),
        "context_latents": noise(BATCH, 16, 128),
        "encoder_hidden_states": noise(BATCH, WORDS, 64),
    },
    "AceStepConditionEncoder": lambda config: {
        "text_hidden_states": noise(BATCH, WORDS, 32),
        "text_attention_mask": ones(BATCH, WORDS),
        "lyric_hidden_states": noise(BATCH, WORDS, 32),
        "lyric_attention_mask": ones(BATCH, WORDS),
        "refer_audio_acoustic_hidden_states_packed": noise(BATCH, 4, 64),
        "refer_audio_order_mask": torch.arange(BATCH),
    },
    "AnimaTextConditioner": lambda config: {
        "source_hidden_states": noise(BATCH, WORDS, 64),
        "target_input_ids": ids(128, BATCH, WORDS),
    },
    "AnyFlowTransformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 3, 16, 8, 8),
        "timestep": torch.rand(BATCH, 3),
        "r_timestep": torch.rand(BATCH, 3),
    },
    "AudioLDM2ProjectionModel": lambda config: {
        "hidden_states": noise(BATCH, WORDS, 32),
        "hidden_states_1": noise(BATCH, WORDS, 32),
    },
    "AutoencoderKLHunyuanImageRefiner": lambda config: {"sample": noise(1, 3, 5, 32, 32)},
    "AutoencoderKLHunyuanVideo15": lambda config: {"sample": noise(1, 3, 5, 32, 32)},
    "AutoencoderKLKVAEAudio": lambda config: {"sample": noise(1, 1, 4800)},
    "AutoencoderKLMagvit": lambda config: {"sample": noise(1, 3, 9, 32, 32)},
    "AutoencoderKLMiniMaxH3Audio": lambda config: {"sample": noise(1, 1, 3200)},
    "AutoencoderKLMochi": lambda config: {"sample": noise(1, 3, 7, 32, 32)},
    "AutoencoderKLQwenImage": lambda config: {"sample": noise(1, 3, 1, 32, 32)},
    "AutoencoderOobleck": lambda config: {"sample": noise(1, 2, 4096)},
    "AutoencoderRAE": lambda config: {"sample": noise(BATCH, 3, 28, 28)},
    "AutoencoderSAME": lambda config: {"sample": noise(1, 2, 1024)},
    "BriaFiboTransformer2DModel": lambda config: {"text_encoder_layers": [noise(BATCH, WORDS, 32)] * 6},
    "CLIPImageProjection": lambda config: {"x": noise(BATCH, 64)},
    "CogVideoXTransformer3DModel": lambda config: {"hidden_states": noise(BATCH, 3, 16, 8, 8)},
    "ConsisIDTransformer3DModel": lambda config: {"hidden_states": noise(BATCH, 3, 16, 8, 8)},
    "CogView3PlusTransformer2DModel": lambda config: SIZED,
    "CogView4Transformer2DModel": lambda config: SIZED,
    "ConsistencyDecoderVAE": lambda config: {"sample": noise(1, 3, 32, 32)},
    "ControlNetModel": lambda config: {"controlnet_cond": noise(BATCH, 3, 128, 128)},
    "ControlNetUnionModel": lambda config: {
        "controlnet_cond": [noise(BATCH, 3, 128, 128)],
        "control_type": torch.eye(6)[:1].repeat(BATCH, 1),
        "control_type_idx": [0],
    },
    "DiTTransformer2DModel": lambda config: {"timestep": ids(100, BATCH), "class_labels": ids(100, BATCH)},
    "ErnieImageTransformer2DModel": lambda config: {
        "text_bth": noise(BATCH, WORDS, 32),
        "text_lens": torch.tensor([WORDS] * BATCH),
    },
    "GlmImageTransformer2DModel": lambda config: {
        "prior_token_id": ids(100, BATCH, 16),
        "prior_token_drop": torch.zeros(BATCH, 16, dtype=torch.bool),
        "target_size": SIZES,
        "crop_coords": SIZES,
    },
    "HunyuanDiT2DModel": lambda config: HUNYUAN_DIT,
    "HunyuanDiT2DControlNetModel": lambda config: HUNYUAN_DIT | {"controlnet_cond": noise(BATCH, 4, 8, 8)},
    "HunyuanVideo15Transformer3DModel": lambda config: {
        "encoder_hidden_states_2": noise(BATCH, WORDS, 32),
        "encoder_attention_mask_2": ones(BATCH, WORDS),
        "image_embeds": noise(BATCH, WORDS, 32),
    },
    "HunyuanVideoFramepackTransformer3DModel": lambda config: {
        "image_embeds": noise(BATCH, WORDS, 32),
        "indices_latents": torch.arange(3),
        "latents_clean": noise(BATCH, 16, 1, 8, 8),
        "indices_latents_clean": torch.arange(1),
        "latents_history_2x": noise(BATCH, 16, 2, 8, 8),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": noise(BATCH, 16, 4, 8, 8),
        "indices_latents_history_4x": torch.arange(4),
    },
    "I2VGenXLUNet": lambda config: {
        "fps": torch.tensor([8] * BATCH),
        "image_latents": noise(BATCH, 4, 3, 16, 16),
        "image_embeddings": noise(BATCH, 32),
    },
    "Ideogram4PromptEnhancerHead": lambda config: {"hidden_states": noise(BATCH, WORDS, 64)},
    "Ideogram4Transformer2DModel": lambda config: {
        "hidden_states": noise(BATCH, 12, 128),
        "encoder_hidden_states": noise(BATCH, 12, 32),
        "position_ids": ids(8, BATCH, 12, 3),
        "segment_ids": torch.zeros(BATCH, 12, dtype=torch.long),
        "indicator": torch.tensor([[2] * 4 + [3] * 8] * BATCH),
    },
    "Kandinsky5Transformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 3, 8, 8, 4),
        "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
        "text_rope_pos": torch.arange(WORDS),
    },
    "Kandinsky6SRLatentUpscalerBank": lambda config: {"latents": noise(1, 4, 1, 8, 8), "scale": 2},
    "Kandinsky6SRVAE": lambda config: {"sample": noise(1, 3, 5, 64, 64)},
    "Krea2Transformer2DModel": lambda config: {
        "hidden_states": noise(BATCH, 16, 64),
        "encoder_hidden_states": noise(BATCH, WORDS, 2, 64),
        "position_ids": ids(8, 16 + WORDS, 3),
    },
    "LTXVideoTransformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 3 * 16, 128),
        "num_frames": 3,
        "height": 4,
        "width": 4,
    },
    "LTX2VideoTransformer3DModel": lambda config: {
        "hidden_states": noise(BATCH, 3 * 16, 128),
        "audio_hidden_states": noise(BATCH, 8, 128),
        "encoder_hidden_states": noise(BATCH, WORDS, 32),
        "audio_encoder_hidden_states": noise(BATCH, WORDS, 32),
        "num_frames": 3,
        "height": 4,
        "width": 4,
        "audio_num_frames": 8,
    },
    "LatteTransformer3DModel": lambda config: {"encoder_hidden_states": noise(BATCH, WORDS, 32)},
    "LongCatAudioDiTTransformer": lambda config: {
        "hidden_states": noise(BATCH, 16, 64),
        "encoder_attention_mask": torch.ones(BATCH, WORDS, dtype=torch.bool),
        "latent_cond": noise(BATCH, 16, 64),
    },
    "LongCatAudioDiTVae": lambda config: {"sample": noise(1, 1, 4096)},
    "Lumina2Transformer2DModel": lambda config: {"encoder_attention_mask": torch.ones(BATCH, WORDS, dtype=torch.bool)},
    "LuminaNextDiT2DModel": lambda config: {
        "encoder_mask": ones(BATCH, WORDS),
        "image_rotary_emb": torch.polar(torch.ones(4, 4, 8), torch.rand(4, 4, 8)),
        "cross_attention_kwargs": {},
    },
    "MMAudioVAE": lambda config: {"sample": noise(1, 8192)},
    "MMAudioVocoder": lambda config: {"mel": noise(1, 16, 16)},
    "MiniMaxMusic3ConditionEncoder": lambda config: {"hidden_states": noise(BATCH, 16, 8 * 32)},
    "MiniMaxMusic3RVQDepthDecoder": lambda config: {"inputs_embeds": noise(BATCH, 8, 64)},
    "MiniMaxMusic3Transformer1DModel": lambda config: {
        "hidden_states": noise(BATCH, 128, 16),
        "encoder_hidden_states": noise(BATCH, 16, 32),
    },
    "MiniMaxMusic3Vocoder": lambda config: {"latents": noise(1, 8, 8)},
    "OmniGenTransformer2DModel": lambda config: {
        "input_ids": ids(100, BATCH, WORDS),
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": ones(BATCH, WORDS + 17, WORDS + 17),
        "position_ids": torch.arange(WORDS + 17).repeat(BATCH, 1),
    },
    "PriorTransformer": lambda config: {
        "hidden_states": noise(BATCH, 32),
        "proj_embedding": noise(BATCH, 32),
        "encoder_hidden_states": noise(BATCH, 77, 32),
    },
    "QwenImageTransformer2DModel": lambda config: {
        "encoder_hidden_states_mask": ones(BATCH, WORDS),
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    },
    "QwenImageControlNetModel": lambda config: {
        "controlnet_cond": noise(BATCH, 16, 64),
        "encoder_hidden_states_mask": ones(BATCH, WORDS),
        "img_shapes": [[(1, 4, 4)]] * BATCH,
    },
    "QwenImage21Transformer2DModel": lambda config: {"img_mask": torch.tensor([[False] * WORDS + [True] * 4] * BATCH)},
    "ReduxImageEncoder": lambda config: {"x": noise(BATCH, WORDS, 32)},
    "SparseControlNetModel": lambda config: {
        "encoder_hidden_states": noise(BATCH * 3, WORDS, 32),
        "controlnet_cond": noise(BATCH, 4, 3, 16, 16),
        "conditioning_mask": ones(BATCH, 1, 3, 16, 16),
    },
    "StableAudio3DiTModel": lambda config: {
        "hidden_states": noise(BATCH, 256, 16),
        "global_hidden_states": noise(BATCH, 32),
        "local_add_cond": noise(BATCH, 8, 16),
    },
    "StableAudio3DurationEmbedder": lambda config: {"seconds": torch.tensor([3.0, 5.0])},
    "StableAudioDiTModel": lambda config: {
        "hidden_states": noise(BATCH, 64, 16),
        "global_hidden_states": noise(BATCH, 1, 32),
        "encoder_hidden_states": noise(BATCH, WORDS, 32),
    },
    "StableAudioProjectionModel": lambda config: {
        "text_hidden_states": noise(BATCH, WORDS, 32),
        "start_seconds": torch.tensor([0.0, 1.0]),
        "end_seconds": torch.tensor([3.0, 5.0]),
    },
    "StableCascadeUNet": lambda config: {
        "sample": noise(BATCH, 16, 8, 8),
        "timestep_ratio": torch.tensor([0.5, 0.1]),
        "clip_text_pooled": noise(BATCH, 1, 32),
    },
    "T5FilmDecoder": lambda config: {
        "encodings_and_masks": [(noise(BATCH, WORDS, 64), ones(BATCH, WORDS))],
        "decoder_input_tokens": noise(BATCH, 8, 16),
        "decoder_noise_time": torch.tensor([0.5, 0.1]),
    },
    "TransformerTemporalModel": lambda config: {
        "hidden_states": noise(6, 32, 8, 8),
        "encoder_hidden_states": None,
        "num_frames": 3,
    },
    "UNet1DModel": lambda config: {"sample": noise(BATCH, 2, 64)},
    "UNetControlNetXSModel": lambda config: {"controlnet_cond": noise(BATCH, 3, 128, 128)},
    "UNetSpatioTemporalConditionModel": lambda config: {
        "sample": noise(BATCH, 3, 8, 16, 16),
        "encoder_hidden_states": noise(BATCH, 1, 32),
        "added_time_ids": noise(BATCH, 3),
    },
    "UVit2DModel": lambda config: {
        "input_ids": ids(100, BATCH, 8, 8),
        "pooled_text_emb": noise(BATCH, 32),
        "micro_conds": noise(BATCH, 5),
    },
    "UniDiffuserTextDecoder": lambda config: {
        "input_ids": ids(100, BATCH, WORDS),
        "prefix_embeds": noise(BATCH, 4, 64),
    },
    "WanAnimateTransformer3DModel": lambda config: {
        "hidden_states": noise(1, 36, 3, 8, 8),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, WORDS, 32),
        "encoder_hidden_states_image": noise(1, WORDS, 32),
        "pose_hidden_states": noise(1, 16, 2, 8, 8),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    },
    "WanVACETransformer3DModel": lambda config: {"control_hidden_states": noise(BATCH, 16, 3, 8, 8)},
    "ZImageTransformer2DModel": lambda config: {
        "x": [noise(16, 1, 8, 8) for _ in range(BATCH)],
        "cap_feats": [noise(WORDS, 32) for _ in range(BATCH)],
    },
}
