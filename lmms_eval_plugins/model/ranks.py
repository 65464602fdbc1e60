"""Distributed evaluation with the model in each process: exchange of values, and of requests among ranks."""

from collections import Counter
from collections.abc import Hashable
from itertools import chain
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, Instance


def of_each_rank(value: Any) -> list[Any]:
    """Return the value of every rank, in rank order; the same list on each. All ranks must call it."""
    if not torch.distributed.is_initialized():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class Dealt:
    """Requests exchanged among ranks so that each group is answered by one rank.

    lmms-eval distributes single questions, and expects each answer from the rank that it gave the question to.

    Attributes:
        requests: the requests that this rank answers.
    """

    def __init__(self, requests: list[Instance], groups: list[Hashable], rank: int):
        """`groups` holds the group of each request. All ranks must call this, and then `returned`."""
        self._rank, self.requests = rank, []
        self._places = []  # of each request, the rank that it comes from and its index there
        messages_of = {request.args[4]: request.args[1] for request in requests}  # functions, which cannot be sent
        plain = [(request.args[:1] + request.args[2:], request.metadata) for request in requests]
        ranks = of_each_rank((set(messages_of), list(zip(groups, plain, strict=True))))
        if any(tasks != messages_of.keys() for tasks, _ in ranks):  # a rank lacks a task's function: keep the requests
            self.requests, self._places = requests, [(rank, place) for place in range(len(requests))]
            return
        owners = _owners(Counter(group for _, theirs in ranks for group, _ in theirs), len(ranks))
        for origin, (_, theirs) in enumerate(ranks):
            for place, (group, ((context, *others), metadata)) in enumerate(theirs):
                if owners[group] == rank:
                    arguments = (context, messages_of[others[2]], *others)
                    self.requests.append(Instance(requests[0].request_type, arguments, 0, metadata))
                    self._places.append((origin, place))

    def returned(self, results: list[GenerationResult]) -> list[GenerationResult]:
        """Return the answers to the rank's own requests, in their order, given the answers to `requests`."""
        answered = chain.from_iterable(of_each_rank(list(zip(self._places, results, strict=True))))
        own = {place: result for (origin, place), result in answered if origin == self._rank}
        return [own[place] for place in range(len(own))]


def _owners(sizes: Counter[Hashable], ranks: int) -> dict[Hashable, int]:
    """Assign each group to a rank: the largest group first, each to the rank with the fewest requests so far."""
    loads, owners = [0] * ranks, {}
    for group, size in sizes.most_common():
        owners[group] = loads.index(min(loads))
        loads[owners[group]] += size
    return owners
