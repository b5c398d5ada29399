"""Mutation testing of csrc: `make mutants` breaks one place at a time and asks whether a test notices."""
