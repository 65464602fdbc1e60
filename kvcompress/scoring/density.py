"""Clustering by density peaks, for methods that merge tokens."""

import torch


def density_peaks(states: torch.Tensor, count: int, neighbours: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster `states` (tokens, size) around `count` density peaks.

    A peak is dense, by the distances to its `neighbours` nearest tokens (itself among them), and far from anything
    denser.

    Returns:
        the peaks (count,), and the nearest peak of each token (tokens,).
    """
    distances = torch.cdist(states, states) / states.shape[1] ** 0.5
    nearest = distances.topk(min(neighbours, len(states)), largest=False).values
    density = nearest.square().mean(1).neg().exp()
    # Two tokens that are each other's nearest are equally dense: the earlier one counts as denser (the released codes
    # of SparseVLM, FastVID and HoliTom let noise decide).
    density += 1e-6 * torch.linspace(1, 0, len(states), dtype=torch.float32, device=states.device)
    denser = density > density[:, None]  # [i, j]: j is denser than i
    apart = distances.masked_fill(~denser, float("inf")).amin(1)
    apart = torch.where(apart.isinf(), distances.max(), apart)  # the densest of all
    peaks = (apart * density).topk(count).indices
    cluster = distances[:, peaks].argmin(1)
    cluster[peaks] = torch.arange(count, device=states.device)
    return peaks, cluster
