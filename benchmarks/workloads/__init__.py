"""The work for ebbtide and the baselines: one file for each workload. Each has `parts(sizes)`."""
