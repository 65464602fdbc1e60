"""How a layer's kept entries are stored; `new.py` chooses."""
