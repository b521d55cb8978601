"""Steps skip the penalty while it is inactive, and look at it again when v is refreshed."""

import copy

import pytest
import torch
import torch.nn.functional as F

from curvature_cases import convnet, gradients, images
from hgnp import Flatness


@pytest.mark.parametrize("choices", [{}, {"fisher_type": "mc"}, {"kfac_approx": "expand"}])
def test_an_inactive_penalty_is_skipped_until_v_is_refreshed(choices):
    net, every = convnet("batch"), 4
    flat = Flatness(net, mu=0.5, bound=0.0, refresh_every=every, skip_inactive=True, **choices)
    bound, skipped = {}, []
    for step in range(16):
        x, y = images(6 + step % 3)
        twin = copy.deepcopy(net)
        known = Flatness(twin, mu=0.5, bound=0.0, refresh_every=every, **choices)
        known.load_state_dict(flat.state_dict() | {"skipping": False})
        flat.bound = known.bound = bound.setdefault(step // every, [-1.0, 1e6, 1e6, -1.0][step // every])
        state = flat.state_dict()
        net.zero_grad()
        loss = flat.backward(x, y)
        if not state["skipping"]:  # as if it never skipped
            assert known.backward(x, y) == loss
        else:
            plain = F.cross_entropy(twin(x), y)
            plain.backward()
            assert plain == loss
        torch.testing.assert_close(gradients(net), gradients(twin), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))
        skipped.append(state["skipping"])
        if state["age"] + 1 == every and not choices.get("fisher_type"):  # skipped or not, v is that of this batch
            fresh = Flatness(copy.deepcopy(twin), **choices)
            fresh.backward(x, y)
            found, expected = (radii(each) for each in (flat, fresh))
            for name, radius in expected.items():
                torch.testing.assert_close(found[name], radius, rtol=0.2, atol=1e-6)
    # the first step along a v is the one after its refresh; the third v is looked at with the bound of its own steps
    assert skipped == [False] * 5 + [True] * 3 + [False] + [True] * 3 + [False] * 4


def radii(flat):
    """λ of each block's top group."""
    pairs = flat.state_dict()["pairs"]
    return {name: (pair["psi.value"] * pair["gamma.value"])[pair["group"]] for name, pair in pairs.items()}


def test_skipping_survives_a_checkpoint():
    ours, theirs = (convnet("batch") for _ in range(2))
    flats = [Flatness(net, bound=1e6, refresh_every=5, skip_inactive=True) for net in (ours, theirs)]
    for step in range(8):
        for flat in flats:
            flat.net.zero_grad()
            flat.backward(*images(6))
        fresh = Flatness(theirs, bound=1e6, refresh_every=5, skip_inactive=True)
        fresh.load_state_dict(flats[1].state_dict())
        for key in ("age", "skipping"):
            assert fresh.state_dict()[key] == flats[0].state_dict()[key]
        assert fresh.state_dict()["skipping"] is (step % 5 != 4)
        flats[1] = fresh
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=0, atol=0)
