"""Requests in flight: many sequences on compressed caches that decode together.

- `loop.py`: the loop from prompts to answers. Start here.
- `request.py`: a request, and how its tokens are chosen.
- `request_state.py`: the state of a request while it is prefilled and decoded.
- `cache.py`, `layer.py`: the cache of a decode step over all slots, and its layers.
- `pool.py`: storage of a layer's entries.
"""

from .loop import InFlight
from .request import Answer, Request

__all__ = ["Answer", "InFlight", "Request"]
