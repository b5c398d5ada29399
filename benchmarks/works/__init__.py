"""What ebbtide and its rivals are asked to do: one file a work. Each has `parts(sizes)`."""
