"""Text benchmarks: tasks of lm-evaluation-harness, answered by the same model as lmms-eval's."""
