"""Questions about one picture go to one rank, and each answer back to where its question came from."""

import threading
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lmms_eval_plugins.model import ranks
from tests.support.checkpoints import requests


def on_ranks(world: int, run) -> list:
    """What `run(rank)` returns on each of so many threads, which gather as processes do."""
    values, results, barrier, own = [None] * world, [None] * world, threading.Barrier(world), threading.local()

    def of_each_rank(value):
        values[own.rank] = value
        barrier.wait(10)
        found = list(values)
        barrier.wait(10)
        return found

    def process(rank):
        own.rank = rank
        results[rank] = run(rank)

    before, ranks.of_each_rank = ranks.of_each_rank, of_each_rank
    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(world)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ranks.of_each_rank = before
    return results


@given(world=st.integers(1, 4), pictures=st.lists(st.integers(0, 5), min_size=4, max_size=20), data=st.data())
def test_each_picture_is_answered_by_one_rank_and_each_rank_gets_its_own_answers(world, pictures, data):
    origin = [rank if rank < world else data.draw(st.integers(0, world - 1)) for rank in range(len(pictures))]
    asked = requests(SimpleNamespace(task_dict={}), [{"text": f"{n}"} for n in range(len(pictures))])
    answered = {}

    def run(rank):
        own = [request for request, of in zip(asked, origin, strict=True) if of == rank]
        dealt = ranks.Dealt(own, [pictures[request.args[3]] for request in own], rank)
        for request in dealt.requests:
            answered.setdefault(request.args[3], []).append(rank)
            assert request.args[1] is asked[0].args[1]
        return [request.args[0] for request in own], dealt.returned([request.args[0] for request in dealt.requests])

    for own, results in on_ranks(world, run):
        assert results == own
    assert all(len(found) == 1 for found in answered.values())
    ranks_of = {picture: {answered[n][0] for n, of in enumerate(pictures) if of == picture} for picture in pictures}
    assert all(len(found) == 1 for found in ranks_of.values())
    loads = [sum(found == [rank] for found in answered.values()) for rank in range(world)]
    assert max(loads) - min(loads) <= max(pictures.count(picture) for picture in pictures)


def test_a_rank_that_lacks_a_task_makes_all_answer_their_own():
    lm = SimpleNamespace(task_dict={})
    own = [requests(lm, [{"text": "a"}] * 2, task="one"), requests(lm, [{"text": "b"}], task="other")]
    for rank, dealt in enumerate(on_ranks(2, lambda rank: ranks.Dealt(own[rank], [0] * len(own[rank]), rank))):
        assert dealt.requests is own[rank]
