"""What bounds pause and resume on this machine: one file a bound. Each has `parts(sizes)`."""
