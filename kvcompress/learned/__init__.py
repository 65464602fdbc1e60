"""Small models trained to predict scores from hidden states, in the layouts in which they are published."""
