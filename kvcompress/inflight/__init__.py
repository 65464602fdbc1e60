"""Requests in flight: many sequences on compressed caches, one decode step for all of them.

- `loop.py`: the requests' way, from a prefill to an answer. Begin here.
- `request.py`: what is asked, and how its tokens are chosen.
- `under_way.py`: where a request stands.
- `cache.py`, `layer.py`, `sliding.py`: the cache of a decode step over all slots, and its layers.
- `pool.py`: where a layer's entries lie.
"""

from .loop import InFlight
from .request import Answer, Request

__all__ = ["Answer", "InFlight", "Request"]
