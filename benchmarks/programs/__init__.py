"""Programs in plain torch (and JAX), as a user would write them: they know nothing of ebbtide or of the benchmark.

`benchmarks/unmodified.py` starts them, plainly or under `ebbtide run`. Each takes its arguments as one JSON object and
prints its figures as another, on its last line.
"""
