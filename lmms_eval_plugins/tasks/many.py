"""The bundled tasks with 2, 6 or 18 questions about each picture."""

from datasets import Dataset

PER_PICTURE = 18  # questions about each picture of the data set, which follow one another


def two_of_each(docs: Dataset) -> Dataset:
    """Return the first two questions about each picture."""
    return _first(docs, 2)


def six_of_each(docs: Dataset) -> Dataset:
    """Return the first six questions about each picture."""
    return _first(docs, 6)


def _first(docs: Dataset, count: int) -> Dataset:
    return docs.select([place for place in range(len(docs)) if place % PER_PICTURE < count])
