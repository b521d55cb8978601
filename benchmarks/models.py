"""The networks that the coverage table is about: made from their code alone, with random weights, never downloaded."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torchvision's Python code wants these, built or not; detectors call the first
_operators = torch.library.Library("torchvision", "FRAGMENT")


def _nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes that overlap no better one by more than the threshold, best first."""
    order = scores.argsort(descending=True, stable=True)
    overlap = torchvision.ops.box_iou(boxes[order], boxes[order]).triu(1) > iou_threshold
    kept = torch.ones(len(order), dtype=torch.bool)
    for place in range(len(order)):
        if kept[place]:
            kept &= ~overlap[place]
    return order[kept]


for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        if _name == "nms":
            _operators.impl("nms", _nms, "CPU")
import timm  # noqa: E402
import torchvision  # noqa: E402
import transformers as hf  # noqa: E402

if not torchvision.extension._has_ops():  # what is missing is defined above, or has an implementation in Python
    torchvision.ops.boxes._assert_has_ops = lambda: None

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

HIDDEN = re.compile(
    r"((?<!cpb_)mlp\w*\.(0|1|fc1(_g|_x)?|c_fc|gate_proj|up_proj|w12)|mlp_layer\.1|intermediate\.dense|intermediate_dense"
    r"|\.fc1|\.lin1|\.wi(_\d)?)$"
)
"""Layers whose neurons are the hidden units of a transformer's MLP."""


@dataclass(frozen=True)
class Case:
    """A network, its example input, and its kind: `conv`, `detector`, `segmentation`, `transformer`, or `other` for what is a
    bit of both."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    kind: str
    watched: tuple[str, ...] = ()
    """Modules whose outputs are compared beside the network's: what lies before non-maximum suppression."""
    exported: tuple[str, ...] = ("",)
    """The modules that are exported: those before non-maximum suppression of a detector that looks at its data."""


def cases() -> dict[str, Case]:
    return {
        **_torchvision_cases(),
        **_timm_cases(),
        **_hugging_face_cases(),
        **_detectors(),
        **_segmentation_nets(),
        **_own_cases(),
    }


def _images(side: int, channels: int = 3) -> Callable[[], Inputs]:
    return lambda: ((torch.randn(2, channels, side, side),), {})


# torchvision: every classification model. Convolutional nets take any size: a small one gives the same channels sooner.


def _torchvision_cases() -> dict[str, Case]:
    found = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        transformer = name.startswith(("vit", "swin", "maxvit"))
        side = 112 if name.startswith("swin") else 224 if transformer else 299 if name == "inception_v3" else 64
        kind = "other" if name == "maxvit_t" else "transformer" if transformer else "conv"
        found[name] = Case(lambda name=name: torchvision.models.get_model(name), _images(side), kind)
    return found


# timm: unusual wiring

TIMM = {
    "conv": "repvgg_a0 mobileone_s0 ghostnet_100 hrnet_w18_small res2net50_26w_4s dla34 cspresnet50 resnest26d "
    "seresnext26d_32x4d mobilenetv4_conv_small nf_resnet50 resnetv2_50x1_bit resnetv2_50 resnetv2_50d_gn convmixer_768_32 "
    "skresnet34 dpn68 xception41 vovnet39a selecsls42b inception_resnet_v2 rexnet_100 tresnet_m tinynet_e lcnet_050 darknet53 "
    "regnetz_b16 ecaresnet26t gcresnet33ts convnextv2_atto repvit_m0_9 fbnetc_100 hgnet_tiny",
    "transformer": "vit_tiny_patch16_224 deit3_small_patch16_224 cait_xxs24_224 xcit_nano_12_p16_224 pvt_v2_b0 pit_ti_224",
    "other": "mixer_s32_224 gmlp_ti16_224 resmlp_12_224 efficientvit_b0 fastvit_t8 poolformer_s12 levit_128s mobilevit_xxs "
    "edgenext_xx_small efficientformer_l1 halonet26t",
}


def _timm_cases() -> dict[str, Case]:
    found = {}
    for kind, names in TIMM.items():
        for name in names.split():
            side = timm.get_pretrained_cfg(name).input_size[-1]
            side = 256 if name == "halonet26t" else side if kind != "conv" else 96 if "inception" in name else 64
            found[f"timm/{name}"] = Case(lambda name=name: timm.create_model(name), _images(side), kind)
    return found


# Hugging Face: small configurations

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def _tokens(count: int = 1) -> Callable[[], Inputs]:
    names = ("input_ids", "decoder_input_ids")[:count]
    return lambda: ((), {name: torch.randint(3, 90, (2, 9)) for name in names})


def _sound() -> Inputs:
    return (), {"input_values": torch.randn(2, 1200)}


def _whisper_inputs() -> Inputs:
    return (), {"input_features": torch.randn(2, 20, 60), "decoder_input_ids": torch.randint(3, 90, (2, 7))}


def _hugging_face_cases() -> dict[str, Case]:
    text = {"vocab_size": 100, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    whisper = hf.WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=20, max_source_positions=30, max_target_positions=16,
        decoder_start_token_id=1, **text,
    )  # fmt: skip
    wav2vec2 = hf.Wav2Vec2Config(
        **SMALL, vocab_size=40, conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
        layerdrop=0.0,
    )  # fmt: skip
    gpt2 = hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=32, **text)
    llama = hf.LlamaConfig(**SMALL, num_key_value_heads=2, **text)
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, **text}
    bert = hf.BertConfig(**SMALL, **text)
    vit = hf.ViTConfig(**SMALL, image_size=32, patch_size=8)
    resnet = hf.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], layer_type="bottleneck")
    made = {
        "hf/bert": (lambda: hf.BertForSequenceClassification(bert), _tokens(), "transformer"),
        "hf/distilbert": (
            lambda: hf.DistilBertForSequenceClassification(
                hf.DistilBertConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=128, vocab_size=100)
            ),
            _tokens(),
            "transformer",
        ),
        "hf/gpt2": (lambda: hf.GPT2LMHeadModel(gpt2), _tokens(), "transformer"),
        "hf/llama": (lambda: hf.LlamaForCausalLM(llama), _tokens(), "transformer"),
        "hf/t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5)), _tokens(2), "transformer"),
        "hf/t5-gated": (
            lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, feed_forward_proj="gated-gelu")),
            _tokens(2),
            "transformer",
        ),
        "hf/vit": (lambda: hf.ViTForImageClassification(vit), _images(32), "transformer"),
        "hf/wav2vec2": (lambda: hf.Wav2Vec2ForCTC(wav2vec2), _sound, "transformer"),
        "hf/whisper": (lambda: hf.WhisperForConditionalGeneration(whisper), _whisper_inputs, "transformer"),
        "hf/resnet": (lambda: hf.ResNetForImageClassification(resnet), _images(64), "conv"),
    }
    return {name: Case(*entry) for name, entry in made.items()}


# Detectors. torchvision's take images and targets, return losses in training, and look at their data before they return boxes.


def _images_and_targets() -> Inputs:
    corners = torch.rand(2, 3, 2) * 24
    boxes = torch.cat([corners, corners + 16 + 20 * torch.rand(2, 3, 2)], 2)
    targets = [{"boxes": each.double(), "labels": torch.tensor([1, 2, 3])} for each in boxes]
    return (torch.rand(2, 3, 64, 64), targets), {}


SMALL_IMAGES = {"min_size": 64, "max_size": 64}
FEW_BOXES = {f"rpn_{when}_nms_top_n_{mode}": 50 for when in ("pre", "post") for mode in ("train", "test")}
FEW_BOXES["box_batch_size_per_image"] = 8
TORCHVISION_DETECTORS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fasterrcnn_resnet50_fpn": (("backbone", "rpn.head"), SMALL_IMAGES | FEW_BOXES),
    "fasterrcnn_mobilenet_v3_large_320_fpn": (("backbone", "rpn.head"), SMALL_IMAGES | FEW_BOXES),
    "retinanet_resnet50_fpn": (("head",), SMALL_IMAGES),
    "fcos_resnet50_fpn": (("head",), SMALL_IMAGES),
    "ssdlite320_mobilenet_v3_large": (("head",), {}),
    "ssd300_vgg16": (("head",), {}),
}
ULTRALYTICS = ("yolov8n", "yolo11n", "yolov5n", "yolov9t", "yolov8n-seg")


def _detectors() -> dict[str, Case]:
    found = {}
    for name, (watched, options) in TORCHVISION_DETECTORS.items():
        plain = {"weights": None, "weights_backbone": None, "num_classes": 5, **options}
        make = partial(torchvision.models.get_model, name, **plain)
        found[f"detect/{name}"] = Case(make, _images_and_targets, "detector", watched, ("backbone", watched[-1]))
    for name in ULTRALYTICS:
        found[f"detect/{name}"] = Case(partial(yolo, name), _images(64), "detector")
    return found


def yolo(name: str) -> nn.Module:
    """As ultralytics' own builder makes it."""
    from ultralytics.nn import tasks

    build = tasks.SegmentationModel if name.endswith("-seg") else tasks.DetectionModel
    return build(f"{name}.yaml", verbose=False)  # type: ignore[no-any-return]


SEGMENTATION = ("deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")


def _segmentation_nets() -> dict[str, Case]:
    found = {}
    for name in SEGMENTATION:
        make = partial(torchvision.models.get_model, name, weights=None, weights_backbone=None, num_classes=5)
        found[f"segment/{name}"] = Case(make, _images(64), "segmentation")
    return found


# Written here: what libraries of models lack


class UNet(nn.Module):
    """Three levels, skip connections by concatenation, transposed convolutions up."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(self._block, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.merge = nn.ModuleList(self._block(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


class PaddedBlock(nn.Module):
    """A residual block whose shortcut is padded with zero channels where it widens, as He et al. did on CIFAR."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.stride, self.extra = (1, 0) if inside == outside else (2, (outside - inside) // 2)
        self.conv1 = nn.Conv2d(inside, outside, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


def resnet56() -> nn.Module:
    """CIFAR's ResNet-56 with zero-padded shortcuts."""
    widths = [16] * 10 + [32] * 9 + [64] * 9
    blocks = [PaddedBlock(a, b) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def vgg16_cifar() -> nn.Module:
    """VGG-16 with batch norm for 32-pixel images: thirteen convolutions and one linear layer."""
    layers: list[nn.Module] = []
    inside = 3
    for entry in (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"):
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inside, entry, 3, padding=1), nn.BatchNorm2d(entry), nn.ReLU(inplace=True)]
            inside = entry
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def pixel_shuffle_upscaler() -> nn.Module:
    """Channels turned into places, then convolved."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.PReLU(32), nn.Conv2d(32, 64, 3, padding=1), nn.PixelShuffle(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 3, 3, padding=1),
    )  # fmt: skip


def _own_cases() -> dict[str, Case]:
    return {
        "own/unet": Case(UNet, _images(32), "segmentation"),
        "own/resnet56-padded": Case(resnet56, _images(32), "conv"),
        "own/vgg16-cifar": Case(vgg16_cifar, _images(32), "conv"),
        "own/upscaler": Case(pixel_shuffle_upscaler, _images(16), "conv"),
    }
