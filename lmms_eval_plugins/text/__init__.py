"""Text benchmarks: tasks of lm-evaluation-harness, answered by the model that answers lmms-eval's."""
