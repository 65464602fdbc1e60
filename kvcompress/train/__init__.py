"""Training what learned methods need, on texts of one's own.

`command` is `python -m kvcompress train`. One file per method says what is learned and how: `kvzap`, `fastkvzip` and
`duoattention`. They share `run`, a training that goes on after a cut; `samples`, hidden states with the scores to
predict from them; and `watching`, which sees a model's attention at work.
"""
