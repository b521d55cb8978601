"""The parts of a run add up to the run, and kernels are sorted by what they do."""

import sys
from pathlib import Path

import pytest

from hgnp.experiments.build import prepare
from hgnp.experiments.overrides import resolve_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import cost_profile

SETTINGS = [
    "model_args.width=4", "data_args.batch=256", "data_args.limit=512", "recipe.warmup_epochs=1", "recipe.finetune_epochs=1",
    "recipe.neurons_per_round=6", "recipe.keep=0.8", "recipe.method=taylor", "recipe.measure=none",
]  # fmt: skip


def test_a_run_and_its_steps_are_taken_apart() -> None:
    made = prepare(resolve_config("demo", data=None, method=None, settings=SETTINGS, seed=0, device="cpu"))
    before = {part: getattr(*place) for part, place in cost_profile.PARTS.items()}
    seconds = cost_profile.parts(made)
    assert {part: getattr(*place) for part, place in cost_profile.PARTS.items()} == before
    assert {
        "steps",
        "rounds",
        "scores",
        "selection",
        "removal",
        "validation",
        "checkpoints",
        "measurements",
        "rest",
    } <= seconds.keys()
    assert all(each > 0 for each in seconds.values())
    kinds, step = cost_profile.kernels(made.net, made, 2)
    assert min(kinds["convolutions"], kinds["optimizer"]) > 0
    assert kinds["norms"] > 0
    assert step > 0
    assert f"| norms | {kinds['norms']:.3f} |" in cost_profile.steps_table({"full": (kinds, step)})
    text = "\n".join(cost_profile.parts_table(seconds))
    beside = sum(seconds[part] for part in cost_profile.BESIDE if part in seconds)
    assert f"measurements together: {beside / sum(seconds.values()):.1%} (target: at most 10 %)" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolutions"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>", "optimizer"),
        ("void at::native::batch_norm_backward_reduce_channels_last_kernel", "norms"),
        ("void cudnn::ops::nchwToNhwcKernel<__half>", "layout"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("something_else", "other"),
    ],
)
def test_kernels_by_kind(name: str, kind: str) -> None:
    assert cost_profile.kind(name) == kind
