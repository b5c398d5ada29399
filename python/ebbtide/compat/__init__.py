"""Names that programs know from other projects, over ebbtide."""
