"""Small models that were trained to foretell scores from hidden states, in the layouts in which they are published."""
