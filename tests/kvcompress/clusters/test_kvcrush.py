import torch

import kvcompress
from kvcompress.scoring.layer_view import LayerView, StoredEntries


def test_a_head_that_no_longer_holds_a_token_has_no_bit_for_it():
    """Two heads hold tokens 0 and 2, and 2 and 3; the second has an unused slot, too."""
    columns = torch.tensor([[[0, 1, 2], [-1, 2, 3]]])
    view = LayerView(0, 1, [3], [2], 1.0, stored=StoredEntries(columns, 4, (4,)))
    bits = torch.tensor([[[True, False, True], [False, True, True]]])
    by_anchor = {"zeros": [[1, 0, 2], [2, 1]], "alternating": [[2, 1, 1], [1, 0]]}
    for anchor, (first, second) in by_anchor.items():
        found = kvcompress.make_cluster("kvcrush", anchor=anchor).distances(bits, view)
        assert found[0, 0].tolist() == first
        assert found[0, 1, 1:].tolist() == second
