"""Hugging Face's classifiers with the attention masks that tokenizers make, against gates put in by hand."""

import copy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hgnp

try:  # Transformers imports torchvision where it is installed
    import torchvision
except ImportError:
    pass
except RuntimeError:  # built for CUDA beside a CPU build of torch: its import needs two operators that are not there
    for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    OPERATORS = torch.library.Library("torchvision", "DEF")
    OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:the network's config cannot state:UserWarning")

SIZES = {"vocab_size": 40, "num_labels": 3, "max_position_embeddings": 16}
ENCODER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 10}
PAD = 1


def bert(**how: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(pad_token_id=PAD, **SIZES, **ENCODER, **how)
    )


def roberta(**how: Any) -> nn.Module:
    return transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(pad_token_id=PAD, **SIZES, **ENCODER, **how)
    )


def distilbert(**how: Any) -> nn.Module:
    sizes = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 10}
    return transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(pad_token_id=PAD, **SIZES, **sizes, **how)
    )


def llama(**how: Any) -> nn.Module:
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(pad_token_id=PAD, num_key_value_heads=1, **SIZES, **ENCODER, **how)
    )


def gpt2(**how: Any) -> nn.Module:
    sizes = {
        "vocab_size": 40,
        "num_labels": 3,
        "n_positions": 16,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_inner": 10,
    }
    tokens = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**tokens, **sizes, **how))


FEED_FORWARD = {
    "bert": (bert, "bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.0.output.dense"),
    "roberta": (roberta, "roberta.encoder.layer.0.intermediate.dense", "roberta.encoder.layer.0.output.dense"),
    "distilbert": (distilbert, "distilbert.transformer.layer.0.ffn.lin1", "distilbert.transformer.layer.0.ffn.lin2"),
    "llama": (llama, "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"),
    "gpt2": (gpt2, "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"),
}
"""Network → how it is made, the layers in its feed-forward parts, and those that read them."""

Inputs = dict[str, Tensor]


def tokens(kind: str, samples: int = 4, length: int = 6) -> Inputs:
    """What a tokenizer makes: of texts that are all as long, of shorter ones too, or without saying so."""
    ids = torch.randint(2, 40, (samples, length))
    mask = torch.ones_like(ids)
    if kind == "padded":
        mask[1, length // 2 :] = 0
        mask[-1, -1:] = 0
    ids[mask == 0] = PAD
    return {"input_ids": ids} if kind == "without" else {"input_ids": ids, "attention_mask": mask}


def by_hand(net: nn.Module, reader: str, inputs: Inputs, y: Tensor) -> Tensor:
    """The scores of a layer, by a hook on the one that reads its output."""
    gate = torch.ones(len(y), 1, 10, dtype=torch.double, requires_grad=True)
    handle = net.get_submodule(reader).register_forward_pre_hook(lambda _, args: (args[0] * gate, *args[1:]))
    net.eval()
    (slope,) = torch.autograd.grad(F.cross_entropy(net(**inputs).logits, y), gate)
    net.train()
    handle.remove()
    raw = slope.abs().sum((0, 1))
    return raw / raw.norm()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (DeprecationWarning, FutureWarning))
        yield


CASES = [
    *((name, "sdpa", "full", ["full", "padded", "without"]) for name in FEED_FORWARD),
    *((name, "sdpa", "padded", ["full", "padded"]) for name in FEED_FORWARD),
    ("bert", "sdpa", "without", ["padded"]),
    ("bert", "eager", "full", ["padded"]),
]


@pytest.mark.parametrize(("name", "attention", "example", "batches"), CASES)
def test_scores_with_masks_are_those_of_gates_by_hand(
    name: str, attention: str, example: str, batches: list[str]
) -> None:
    torch.manual_seed(0)
    make, layer, reader = FEED_FORWARD[name]
    net, y = make(attn_implementation=attention).double(), torch.arange(4) % 3
    neurons = hgnp.Neurons(net, tokens(example))
    for kind in batches:
        inputs = tokens(kind, length=8)
        found = hgnp.sensitivity(net, neurons, [(inputs, y)], output=lambda o: o.logits)
        torch.testing.assert_close(found[layer], by_hand(net, reader, inputs, y), rtol=1e-9, atol=1e-12)


def vit(**how: Any) -> nn.Module:
    sizes = {"image_size": 4, "patch_size": 2, "num_channels": 1, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **HEADS, **how))


HEADS = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 4}
WITH_HEADS = {
    "bert": (
        lambda **how: transformers.BertForSequenceClassification(
            transformers.BertConfig(pad_token_id=PAD, **SIZES, **HEADS, **how)
        ),
        "bert.encoder.layer.0.attention.self",
        "bert.encoder.layer.0.attention.output.dense",
        6,
    ),
    "gpt2": (
        lambda **how: transformers.GPT2ForSequenceClassification(
            transformers.GPT2Config(
                vocab_size=40, num_labels=3, n_positions=16, n_embd=12, n_layer=1, n_head=6, pad_token_id=PAD,
                bos_token_id=0, eos_token_id=0, use_cache=False, **how,
            )
        ),
        "transformer.h.0.attn",
        "transformer.h.0.attn.c_proj",
        6,
    ),
    "llama": (
        lambda **how: transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(
                pad_token_id=PAD, num_key_value_heads=3, use_cache=False, **SIZES, **HEADS, **how
            )
        ),
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.o_proj",
        3,
    ),
    "qwen3": (  # its norms of queries and keys multiply every head by the same scale
        lambda **how: transformers.Qwen3ForSequenceClassification(
            transformers.Qwen3Config(
                pad_token_id=PAD, num_key_value_heads=3, head_dim=4, use_cache=False, **SIZES, **HEADS, **how
            )
        ),
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.o_proj",
        3,
    ),
    "vit": (vit, "vit.layers.0.attention", "vit.layers.0.attention.o_proj", 6),
}  # fmt: skip
"""Network → how it is made, its attention, the layer that reads it, and how many heads can be removed: of keys, in Llama."""


def gate_heads(net: nn.Module, reader: str, gate: Tensor) -> Any:
    """Multiplies what the output projection reads by a gate for each head, by a hook."""

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * gate.repeat_interleave(args[0].shape[-1] // gate.shape[-1], -1), *args[1:])

    return net.get_submodule(reader).register_forward_pre_hook(hook)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_are_scored_removed_saved_and_loaded(name: str, attention: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, module, reader, count = WITH_HEADS[name]
    net = make(attn_implementation=attention).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    net.apply(lambda part: part.__dict__.update(p=0.0) if isinstance(part, nn.Dropout) else None)

    def inputs(kind: str) -> Inputs:
        return {"pixel_values": torch.randn(4, 1, 4, 4).double()} if name == "vit" else tokens(kind, length=8)

    neurons, whole, y = hgnp.Neurons(net, inputs("full")), copy.deepcopy(net), torch.arange(4) % 3
    assert {layer.name: layer.alive for layer in neurons.layers}[module] == count

    batch = inputs("padded")
    gate = torch.ones(4, 1, count, dtype=torch.double, requires_grad=True)
    handle = gate_heads(net.eval(), reader, gate)
    (slope,) = torch.autograd.grad(F.cross_entropy(net(**batch).logits, y), gate)
    handle.remove()
    raw = slope.abs().sum((0, 1))
    found = hgnp.sensitivity(net, neurons, [(batch, y)], output=lambda o: o.logits)
    torch.testing.assert_close(found[module], raw / raw.norm(), rtol=1e-9, atol=1e-12)

    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    F.cross_entropy(net(**batch).logits, y).backward()
    optimizer.step()
    whole.load_state_dict(net.state_dict())
    before, width = neurons.count, net.get_submodule(reader).weight.numel()
    assert neurons.remove({module: [count - 1]}, optimizer).taken == 1
    neurons.remove(neurons.least({module: torch.arange(count - 1.0)}, 1), optimizer)
    assert neurons.count == before - 2
    assert net.get_submodule(reader).weight.numel() == width * (count - 2) // count
    mask = torch.ones(count).double()
    mask[[0, count - 1]] = 0
    gate_heads(whole, reader, mask)
    small = hgnp.load(hgnp.save(net, tmp_path), make(attn_implementation=attention).double())
    for mode, kind in ((False, "full"), (False, "padded"), (True, "padded"), (True, "without")):
        batch = inputs(kind)
        expected, got = whole.train(mode)(**batch).logits, net.train(mode)(**batch).logits
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        if not mode:
            assert torch.equal(small.eval()(**batch).logits, got)
    assert hgnp.sensitivity(net, neurons, [(batch, y)], output=lambda o: o.logits)[module].shape == (count - 2,)
    F.cross_entropy(net(**batch).logits, y).backward()
    optimizer.step()


@pytest.mark.parametrize("whole_t5", [False, True])
def test_heads_of_t5_are_removed_from_all_layers_that_share_their_position_bias(whole_t5: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 8, "d_kv": 2, "d_ff": 4, "num_heads": 4, "pad_token_id": PAD}
    sizes |= {"num_layers": 1 if whole_t5 else 2, "num_decoder_layers": 2, "decoder_start_token_id": PAD}
    config = transformers.T5Config(dropout_rate=0.0, use_cache=False, **sizes)
    net = (transformers.T5ForConditionalGeneration if whole_t5 else transformers.T5EncoderModel)(config).double()
    parts, inputs = ["encoder.block.{}.layer.0.SelfAttention"], tokens("padded")
    if whole_t5:  # cross-attention has no bias: its first layer makes zeros for the others
        parts = ["decoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.1.EncDecAttention"]
        inputs["decoder_input_ids"] = inputs["input_ids"]
    neurons, whole, mask = hgnp.Neurons(net, inputs), copy.deepcopy(net), torch.ones(4).double()
    for part in parts:
        modules = [part.format(block) for block in (0, 1)]
        selection = neurons.least({name: torch.arange(4.0) for name in modules}, 2)
        assert selection == {name: [0] for name in modules}
        neurons.remove(selection)
        mask[0] = 0
        for name in modules:
            gate_heads(whole, f"{name}.o", mask)
    for mode in (False, True):
        expected, got = (each.train(mode)(**inputs)[0] for each in (whole, net))
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_a_config_follows_where_it_can_state_the_widths(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, module, _, count = WITH_HEADS[name]
    net = make().double().eval()
    neurons, inputs = hgnp.Neurons(net, tokens("full")), tokens("padded")
    feed_forward = FEED_FORWARD[name][1]
    stated = "n_inner" if name == "gpt2" else "intermediate_size"
    before = net.get_submodule(feed_forward).weight.shape[name == "gpt2"]

    def restored() -> nn.Module:
        net.save_pretrained(tmp_path)
        return type(net).from_pretrained(tmp_path, dtype=torch.double).eval()

    neurons.remove({feed_forward: [1]})
    assert getattr(net.config, stated) == before - 1
    assert torch.equal(restored()(**inputs).logits, net(**inputs).logits)
    if name == "llama":
        neurons.remove({module: [0]})
        assert (net.config.num_attention_heads, net.config.num_key_value_heads, net.config.head_dim) == (4, 2, 2)
        assert torch.equal(restored()(**inputs).logits, net(**inputs).logits)
        assert "hgnp.save" not in str(neurons)
    else:  # the width of its heads is the hidden size divided by their number
        with pytest.warns(UserWarning, match="use hgnp.save and hgnp.load, not save_pretrained"):
            neurons.remove({module: [0]})
        assert net.config.num_attention_heads == count
        assert "hgnp.save" in str(neurons)
    found = hgnp.sensitivity(net, neurons, [(inputs, torch.arange(4) % 3)], output=lambda o: o.logits)
    assert found[module].shape == (count - 1,)


def test_a_finished_run_that_is_loaded_brings_its_config_along(tmp_path: Path) -> None:
    batches = [(tokens("full"), torch.arange(4) % 3)]
    recipe = hgnp.Recipe(keep=0.97, method="l1", warmup_epochs=0, neurons_per_round=4, finetune_epochs=0)
    for resume in (False, True):
        net, protect = bert(), ["bert.encoder.layer.0.attention", "bert.pooler"]
        hgnp.prune(
            net, batches, recipe=recipe, protect=protect, output=lambda o: o.logits, out=tmp_path, resume=resume
        )  # fmt: skip
        width = net.get_submodule("bert.encoder.layer.0.intermediate.dense").out_features
        assert net.config.intermediate_size == width < 10


def test_a_bert_is_pruned_on_batches_with_masks() -> None:
    torch.manual_seed(0)
    net = bert()
    batches = [(tokens(kind, samples=8), torch.arange(8) % 3) for kind in ("full", "padded", "full")]
    recipe = hgnp.Recipe(keep=0.8, warmup_epochs=1, neurons_per_round=8, finetune_epochs=1, bound=0.0, lr=0.01)
    result = hgnp.prune(net, batches, recipe=recipe, output=lambda o: o.logits)
    assert result.history[-1]["kept"] <= 0.8
    assert net(**tokens("padded")).logits.isfinite().all()


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch.export fixes the number of rows; hgnp says so")
def test_a_pruned_bert_is_exported_with_its_mask(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    net, inputs = bert().eval(), tokens("padded")
    neurons = hgnp.Neurons(net, inputs)
    neurons.remove(neurons.least({layer.name: torch.rand(layer.alive) for layer in neurons.layers}, 4))
    assert neurons.kept < 1
    result = hgnp.export(net, tmp_path / "bert.onnx", inputs)
    session = onnxruntime.InferenceSession(result.path, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_outputs()] == ["logits"]
    assert {entry.name for entry in session.get_inputs()} == set(inputs)
    for rows in (1, 3):
        some = {name: tensor[:rows] for name, tensor in inputs.items()}
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in some.items()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), net(**some).logits, rtol=1e-4, atol=1e-5)
