"""torch_memory_saver's behaviour over `saver` and the C symbols `tms_*`: what compat/tms/ shows under its names."""
