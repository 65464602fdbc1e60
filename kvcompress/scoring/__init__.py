"""Building blocks of methods: window attention, sums over queries, selection, merging, budgets, vision tokens."""
