"""What connects compression to a model that nobody has edited, and disconnects it again."""
