"""The coverage report: a summary, the table, and what is frozen and why, from measured rows."""

import importlib.metadata
import math
import platform
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
EXACT = 1e-10
CONVOLUTIONAL = ("conv", "detector", "segmentation")
DATE = "2026-11-18"

INHERENT, TO_FOLLOW = "inherent", "not supported yet"
KINDS: list[tuple[str, str, str, str]] = [
    # pattern of the reason, what it is called, verdict, why
    (r"a norm mixes its channels", "a norm over channels", INHERENT,
     "LayerNorm, GroupNorm, weight norm and standardised weights compute statistics over the channels, which change with every "
     "removal; `approximate=True` allows it."),
    (r"reduced to one value", "a mean or maximum over channels", INHERENT,
     "An RMSNorm, response norm or attention gate in plain operations: it divides by the number of channels."),
    (r"combined with a tensor that cannot be cut \((bmm|(add|mul) in \S*([aA]tt|token_mixer))|^all of \S*attn",
     "attention values", TO_FOLLOW,
     "The same position could be removed from the values of all heads, where the code does not state the size of a head."),
    (r"a softmax makes it nonzero", "a softmax", INHERENT,
     "The outputs of a softmax are never zero."),
    (r"bias of a layer over other dimensions", "a bias over other dimensions", INHERENT,
     "A layer that mixes positions adds its bias to masked channels too, which are then not zero."),
    (r"depends on its data .*(still in use|before it is used)", "after data-dependent code", INHERENT,
     "A detector selects boxes by their scores: what it does with features and layers from there on depends on the data. "
     "`outputs=` with a forward function that ends before it frees them."),
    (r"depends on its data", "a path chosen at random or by data", TO_FOLLOW,
     "Layers dropped at random in training (`if torch.rand([]) < p`): both paths could be recorded."),
    (r"is one coupled group", "all channels of a layer coupled", INHERENT,
     "Split and shuffle, repeated, or grouped convolutions of heads couple every channel with every other: none can be removed "
     "alone."),
    (r"fixes a size|network's code fails: |takes another path|moves its|on the width", "a width stated in the code", INHERENT,
     "The network's own code states a number of channels: a split, slice, view or group count that no longer fits; or "
     "attention reshapes its heads to the width of its input."),
    (r"looked up by index", "a table", INHERENT, "A row is a word or a position: removing it would renumber the others."),
    (r"cannot be cut \((add|mul)|kernel that cannot be cut", "combined with something of fixed width", INHERENT,
     "Channels are added to zero padding of a fixed width, or gated by a convolution that slides over the channels; or the "
     "layer mixes positions, and has one neuron per position of the image."),
    (r"single neuron", "one neuron", INHERENT, "A layer of one neuron cannot lose it."),
]  # fmt: skip


NOTES = {
    "timm/cait_xxs24_224": ". Its `proj_l` makes the logits of attention heads; a masked one still attends evenly (softmax of "
    "zeros), a removed one not at all. With these layers protected the error is below 1e-15.",
    "timm/resmlp_12_224": ". Its token-mixing layers add a bias for each place to all channels, dead ones too; masking leaves "
    "that in the stream, removal takes it out. With these biases at zero the error is below 1e-15.",
}


OF_INPUT = "takes the width of all heads to be that of its input: "
HEADS = {
    # attention module, as read in its source
    "torch.nn.modules.activation.MultiheadAttention":
        OF_INPUT + "`F.multi_head_attention_forward` has `embed_dim // num_heads` and `unflatten(-1, (3, E))`",
    "torchvision.models.swin_transformer.ShiftedWindowAttention": OF_INPUT + "`C // num_heads`, `reshape(…, C)`",
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": OF_INPUT + "`C // num_heads`, `reshape(…, C)`",
    "torchvision.models.maxvit.RelativePositionalMultiHeadAttention": OF_INPUT + "`reshape(B, G, P, D)`",
    "timm.models.cait.TalkingHeadAttn": OF_INPUT + "`C // self.num_heads`, `reshape(B, N, C)`",
    "timm.models.cait.ClassAttn": OF_INPUT + "`C // self.num_heads`, `reshape(B, 1, C)`",
    "timm.models.xcit.XCA": OF_INPUT + "`C // self.num_heads`, `reshape(B, N, C)`",
    "timm.models.pvt_v2.Attention": OF_INPUT + "`reshape(B, N, C)`",
    "timm.models.edgenext.CrossCovarianceAttn": OF_INPUT + "`reshape(B, N, C)`",
    "ultralytics.nn.modules.block.Attention": OF_INPUT + "`view(B, C, H, W)`",
}  # fmt: skip


def kind_of(reason: str) -> tuple[str, str, str]:
    for pattern, title, verdict, why in KINDS:
        if re.search(pattern, reason):
            return title, verdict, why
    return re.sub(r" in \S+\)", ")", reason), TO_FOLLOW, "Not analysed yet."


def render(rows: Sequence[Row], names: Iterable[str]) -> str:
    """The report on `rows`; `names` are the networks there are, measured or not."""
    ours = {row["model"]: row for row in rows if row["tool"] == "hgnp"}
    theirs = {row["model"]: row for row in rows if row["tool"] == "torch-pruning"}
    parts = [
        _head(_commits(ours), _commits(theirs)),
        _summary(ours, theirs),
        _table(ours, theirs),
        _heads(ours),
        _frozen(ours),
        _failures(ours),
        _missing(ours, names),
    ]
    return "\n\n".join(parts) + "\n"


def _commits(rows: dict[str, Row]) -> str:
    return ", ".join(sorted({row.get("commit", "older ones") for row in rows.values()})) or "none"


def _head(ours: str, theirs: str) -> str:
    packages = ("torch", "torchvision", "timm", "transformers", "ultralytics", "torch-pruning")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    rows = "" if theirs == ours else f"; that of Torch-Pruning's rows, which names the outputs for it, is {theirs}"
    return (
        "# Coverage: what can be pruned, and whether it comes out right\n\n"
        f"Measured {DATE} with `python benchmarks/coverage.py --out benchmarks/coverage.md`, Python "
        f"{platform.python_version()}, {versions}. Random weights, float64, norms and biases drawn at random. One thread of a "
        "two-core machine that was busy with other work: build times are clock times and up to ten times too long. The "
        f"library as of commit {ours}{rows}."
    )


def _summary(ours: dict[str, Row], theirs: dict[str, Row]) -> str:
    done = {name: row for name, row in ours.items() if "total" in row}
    conv = [row for row in done.values() if row["kind"] in CONVOLUTIONAL]
    enough = [row for row in conv if _share(row) >= 0.8]
    former = [row for row in ours.values() if row["kind"] == "transformer"]
    whole = [row for row in former if row.get("hidden") and not row["hidden_stuck"]]
    heads = [row for row in done.values() if row.get("heads", [0, 0])[1]]
    pruned = [row for row in done.values() if "error" in row]
    wrong = [row["model"] for row in pruned if not row["error"] < EXACT]
    passed = [row for row in pruned if row["trains"] and row["loads"] and row["exports"]]
    late = [row for row in theirs.values() if row.get("crash", "").startswith("not done")]
    exact = [row for row in theirs.values() if row.get("error", math.nan) < EXACT]
    run = [row for row in theirs.values() if row.get("runs")]
    lines = [
        f"- Convolutional classifiers, detectors and segmentation nets: {len(enough)} of {len(conv)} "
        f"({len(enough) / max(len(conv), 1):.0%}) have at least 80 % of their neurons prunable; of torchvision's classifiers "
        f"alone {_most(conv, torchvision=True)}, of the others, chosen for unusual wiring, {_most(conv, torchvision=False)}.",
        f"- Of these, detectors: {_enough(conv, 'detector')}; segmentation nets: {_enough(conv, 'segmentation')}.",
        f"- Transformers: every hidden unit of every MLP is prunable in {len(whole)} of {len(former)}.",
        f"- Heads: all are prunable in {sum(row['heads'][0] == row['heads'][1] for row in heads)} of {len(heads)} "
        f"networks that list some. The code of the others cannot follow: {_followable(ours)} below.",
        f"- Wrong results: {len(wrong)}{' (' + ', '.join(wrong) + ')' if wrong else ''} of {len(pruned)} networks pruned; "
        f"worst error {max((row['error'] for row in pruned), default=0):.1e}.",
        f"- Pruned by half, {len(passed)} of {len(pruned)} continue training with their optimizer, load bit-equal into "
        "a fresh instance and export.",
        f"- Torch-Pruning: of {len(theirs)} networks measured {len(run)} ran after pruning, {len(exact)} of them equal to "
        f"masking; {len(late)} were not done in the time allowed on the busy machine, which says little about them; "
        f"{sum(bool(row.get('trains')) for row in theirs.values())} continued training with their optimizer; "
        f"{sum(bool(row.get('loads')) for row in theirs.values())} loaded into a fresh instance without pickle.",
    ]
    return "## Summary\n\n" + "\n".join(lines)


def _most(rows: Sequence[Row], *, torchvision: bool) -> str:
    """How many of torchvision's networks, or of the others, are prunable for the most part."""
    some = [_share(row) >= 0.8 for row in rows if ("/" not in row["model"]) == torchvision]
    return f"{sum(some)} of {len(some)} ({sum(some) / max(len(some), 1):.0%})"


def _enough(rows: Sequence[Row], kind: str) -> str:
    some = [_share(row) >= 0.8 for row in rows if row["kind"] == kind]
    return f"{sum(some)} of {len(some)}"


def _share(row: Row) -> float:
    return row["prunable"] / max(row["total"], 1)


def _mark(row: Row, key: str) -> str:
    return {True: "yes", False: "**no**"}.get(row.get(key), "–")


def _error(row: Row) -> str:
    if "error" not in row:
        return "–"
    return f"{row['error']:.0e}" if row["error"] < EXACT else f"**{row['error']:.0e}**"


def _table(ours: dict[str, Row], theirs: dict[str, Row]) -> str:
    lines = [
        "## Table",
        "",
        "Neurons: output rows of linear layers and convolutions, the network's own outputs left out. Error: the pruned network "
        "against the masked one, relative to the largest output, worst of several removals (single layers, then half of "
        "everything). The next three are about the network pruned by half: a step with the SGD momentum it had before, a "
        "bit-equal load into a fresh instance, torch.export. TP: Torch-Pruning asked for half of all channels; what it took, "
        "whether the network runs, its error against masking (through a LayerNorm that is approximate by design), "
        "whether its optimizer still trains it, whether a fresh instance takes its state dict, torch.export.",
        "",
        "| network | neurons | prunable | build s | error | trains | loads | exports "
        "| TP removed | runs | error | trains | loads | exports |",
        "|---|--:|--:|--:|--:|---|---|---|--:|---|--:|---|---|---|",
    ]
    for name, row in ours.items():
        other = theirs.get(name, {})
        mine = (
            [f"{row['total']:,}", f"{_share(row):.1%}", f"{row['build_s']:.1f}", _error(row)]
            + [_mark(row, key) for key in ("trains", "loads", "exports")]
            if "total" in row
            else ["**failed**"] + ["–"] * 6
        )
        removed = f"{other['removed']:.0%}" if "removed" in other else "**failed**" if other else "–"
        its = [removed, _mark(other, "runs"), _error(other)] + [_mark(other, k) for k in ("trains", "loads", "exports")]
        lines.append(f"| {' | '.join([name, *mine, *its])} |")
    return "\n".join(lines)


def _stuck(ours: dict[str, Row]) -> dict[str, list[tuple[str, Row]]]:
    """Class of attention module → (network, its heads that stay)."""
    found: dict[str, list[tuple[str, Row]]] = defaultdict(list)
    for name, row in ours.items():
        for kind, entry in row.get("heads_stuck", {}).items():
            found[kind].append((name, entry))
    return found


def _followable(ours: dict[str, Row]) -> str:
    unread = [kind for kind in _stuck(ours) if kind not in HEADS]
    return f"the table, except for {', '.join(unread)}, which nobody has read," if unread else "the table"


def _heads(ours: dict[str, Row]) -> str:
    lines = [
        "## Heads that stay, and why",
        "",
        "Heads: those that stay in a network; *inside*: the same position of every head is removed instead. Its code: as "
        "read in its source. Reason: the one that `neurons.frozen` gives in the first module.",
        "",
        "| attention module | heads that stay | its code | reason |",
        "|---|---|---|---|",
    ]
    for kind, entries in _stuck(ours).items():
        networks = "; ".join(f"{name} {entry['count'] or '*inside*'}" for name, entry in entries)
        reason = escaped(entries[0][1]["reason"]) or "–"
        lines.append(f"| `{kind}` | {networks} | {HEADS.get(kind, 'not read yet')} | {reason} |")
    return "\n".join(lines)


def _frozen(ours: dict[str, Row]) -> str:
    shares_by_kind: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, row in ours.items():
        shares: dict[tuple[str, str, str], int] = defaultdict(int)
        for reason, count in row.get("reasons", {}).items():
            shares[kind_of(reason)] += count
        for kind, count in shares.items():
            if count > 0.05 * row["total"]:
                shares_by_kind[kind].append(f"{name} {count / row['total']:.0%}")
    lines = [
        "## What is frozen and why",
        "",
        "Every reason that covers more than 5 % of a network's neurons, with that share. *Inherent*: no removal could leave "
        "the network's code and results as they are.",
        "",
        "| reason | | why | networks |",
        "|---|---|---|---|",
    ]
    for (title, verdict, why), networks in sorted(shares_by_kind.items(), key=lambda item: (item[0][1], -len(item[1]))):
        lines.append(f"| {title} | {verdict} | {why} | {'; '.join(networks)} |")
    return "\n".join(lines)


def _failures(ours: dict[str, Row]) -> str:
    rows = []
    for name, row in ours.items():
        if "crash" in row:
            rows.append((name, row["crash"]))
        if not row.get("error", 0) < EXACT:
            rows.append((name, f"{row['error']:.1e} from masking{NOTES.get(name, '')}"))
        rows += [(name, f"{key.removesuffix('_error')}: {row[key]}") for key in row if key.endswith("_error")]
        if row.get("hidden_stuck"):
            rows.append((name, f"hidden units frozen in {len(row['hidden_stuck'])} of {row['hidden']} MLP layers"))
    table = ["| network | failure |", "|---|---|", *(f"| {name} | {escaped(failure)} |" for name, failure in rows)]
    return "\n".join(["## What failed", "", *(table if rows else ["Nothing."])])


def escaped(text: str) -> str:
    """A cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


def _missing(ours: dict[str, Row], names: Iterable[str]) -> str:
    missing = [name for name in names if name not in ours]
    return f"Not measured: {', '.join(missing) or 'nothing'}."
