"""A server of chat completions, as OpenAI's clients ask for them, on requests in flight.

- `command.py`: `kvcompress serve`. Start here.
- `app.py`: the endpoints.
- `chat.py`: what a request may ask, and its prompt.
- `text.py`: an answer's text while its tokens come.
- `worker.py`: the thread that owns the model.
- `metrics.py`: what `/metrics` tells.
"""
