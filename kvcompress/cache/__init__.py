"""Where keys and values live between two forward passes."""
