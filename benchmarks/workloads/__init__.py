"""What ebbtide and the baselines are asked to do: one file for each workload. Each has `parts(sizes)`."""
