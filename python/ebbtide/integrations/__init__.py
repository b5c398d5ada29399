"""ebbtide inside other projects: vLLM's sleep mode, and trainers that take turns with something on one GPU."""
